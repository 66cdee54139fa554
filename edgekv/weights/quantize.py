"""Block quantization of weights: int4 and int8, symmetric. The layout is edgekv's own, once that of MatMulNBits.

A row is cut into blocks of ``block`` inputs; each has one float32 scale and codes around a zero point of
2^(bits-1). int4 searches the scale that minimises the block's squared error; int8 uses max|w| / 127.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import numpy.typing as npt

from edgekv.checkpoint.quantized import E2M1_DOUBLED
from edgekv.kernels import threads
from edgekv.kernels.cpu.compile import kept_jit
from edgekv.types import F32, U8

SHRINK = np.array([1, 1.05, *np.arange(0.95, 0.62, -0.05), *-np.arange(1.15, 0.67, -0.05)], np.float32)
"""Scales to try: parts of that which puts the largest number at -8; below 0 parts of its opposite."""

rows_jit = functools.partial(kept_jit, parallel=True, error_model="numpy", fastmath={"reassoc", "nsz", "contract"})
"""For what goes over rows of weights, and is called by `threads.run_parallel`."""


def n_blocks(columns: int, block: int) -> int:
    """Blocks of ``block`` inputs that ``columns`` take."""
    return -(-columns // block)


@rows_jit
def _quantize(weight, bits, block, shrink, codes, scales):  # type: ignore[no-untyped-def]
    rows, columns = weight.shape
    zero, top = np.float32(1 << (bits - 1)), np.float32((1 << bits) - 1)
    full = -zero if bits == 4 else zero - np.float32(1)
    for r in numba.prange(rows):
        q = np.empty(block, np.float32)
        w = np.empty(block, np.float32)
        for b in range(scales.shape[1]):
            width = min(block, columns - b * block)
            peak = np.float32(0)
            for j in range(block):
                w[j] = weight[r, b * block + j] if j < width else np.float32(0)
                if abs(w[j]) > abs(peak):
                    peak = w[j]
            best, scale = np.float32(np.inf), np.float32(0)
            for s in shrink:
                d = peak * s / full
                inverse = np.float32(1) / d if d != 0 else np.float32(0)
                square, product = np.float32(0), np.float32(0)
                for j in range(block):
                    q[j] = min(max(np.rint(w[j] * inverse) + zero, np.float32(0)), top) - zero
                    square += q[j] * q[j]
                    product += q[j] * w[j]
                if bits == 4:
                    d = product / max(square, np.float32(1)) if square > 0 else np.float32(0)
                error = np.float32(0)
                for j in range(block):
                    error += (w[j] - q[j] * d) * (w[j] - q[j] * d)
                if error < best:
                    best, scale = error, d
            scales[r, b] = scale
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            for j in range(block):
                q[j] = min(max(np.rint(w[j] * inverse) + zero, np.float32(0)), top)
            if bits == 4:
                for j in range(block // 2):
                    codes[r, b, j] = np.uint8(q[2 * j]) | np.uint8(np.uint8(q[2 * j + 1]) << 4)
            else:
                for j in range(block):
                    codes[r, b, j] = np.uint8(q[j])


def quantize(weight: F32, bits: int, block: int, codes: U8, scales: F32) -> None:
    """Quantize weight (r, k) into codes (r, blocks, block * bits / 8) and scales (r, blocks).

    The last block is padded with the zero point. int4 puts the even element in the low nibble.
    """
    shrink = SHRINK if bits == 4 else SHRINK[:1]
    threads.run_parallel(_quantize, np.ascontiguousarray(weight), bits, block, shrink, codes, scales)


def pack(centred: npt.NDArray[np.int8], bits: int) -> U8:
    """Codes (r, blocks, block * bits / 8) of whole numbers (r, blocks, block) around 0."""
    codes: U8 = (centred.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    return codes if bits == 8 else codes[..., 0::2] | np.left_shift(codes[..., 1::2], np.uint8(4))


def pack_e2m1(doubled: npt.NDArray[np.int8]) -> U8:
    """Codes (r, blocks, block / 2) of numbers of `E2M1_DOUBLED` (r, blocks, block)."""
    codes = (np.searchsorted(E2M1_DOUBLED[:8], np.abs(doubled)) | np.where(doubled < 0, 8, 0)).astype(np.uint8)
    packed: U8 = codes[..., 0::2] | np.left_shift(codes[..., 1::2], np.uint8(4))
    return packed


def pack_zeros(zeros: npt.NDArray[np.int8]) -> U8:
    """Zero points of 4-bit blocks, two to a byte, of (r, blocks) in -8..7."""
    codes = np.pad(zeros + 8, ((0, 0), (0, zeros.shape[1] % 2))).astype(np.uint8)
    packed: U8 = codes[:, 0::2] | np.left_shift(codes[:, 1::2], np.uint8(4))
    return packed


def unpack_zeros(packed: U8, blocks: int) -> F32:
    """(r, blocks) float32 in -8..7, of what `pack_zeros` gives."""
    zeros: F32 = (
        np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)[:, :blocks].astype(np.float32)
    )
    zeros -= np.float32(8)
    return zeros


def dequantize(
    codes: U8,
    scales: F32,
    bits: int,
    block: int,
    columns: int,
    *,
    zeros: U8 | None = None,
    offsets: F32 | None = None,
    e2m1: bool = False,
) -> F32:
    """(r, columns) float32 from codes, scales, and packed zero points or offsets (r, blocks)."""
    rows = codes.shape[0]
    if bits == 4:
        wide = np.empty((*codes.shape[:2], block), np.uint8)
        wide[..., 0::2], wide[..., 1::2] = codes & 15, codes >> 4
        codes = wide
    if e2m1:
        centred: F32 = E2M1_DOUBLED[codes].astype(np.float32)
    else:
        centred = codes.astype(np.float32) - np.float32(1 << (bits - 1))
    if zeros is not None:
        centred -= unpack_zeros(zeros, scales.shape[1])[..., None]
    values: F32 = centred * scales[..., None]
    if offsets is not None:
        values += offsets[..., None]
    return values.reshape(rows, -1)[:, :columns]
