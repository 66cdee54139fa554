"""Values in 1 to 4 bits, four tokens side by side, summed with 8-bit weights."""

from typing import Any

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.planes import GAUSS_STEP, LEAST_WEIGHT
from edgekv.kernels.reference.loops import Loops
from edgekv.kernels.reference.planes import to_half
from edgekv.kernels.reference.rotate import rotate_back
from edgekv.types import F32, U8, U16

PARTS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}  # bits of a code, in groups that divide a byte
TOP_WEIGHT = np.float32(255)


def encode_interleaved(x: F32, codes: U8, scale: U16, t0: int) -> None:
    g, n, d = x.shape
    bits = codes.shape[2] // 2
    levels, step = gauss_levels(x, bits)
    scale[:, t0 : t0 + n] = to_half(step)
    blocks = levels.reshape(g, n // BLOCK, BLOCK, d)
    row, left = 0, bits
    for part in PARTS[bits]:
        left -= part
        piece = blocks >> left & (1 << part) - 1
        spread = piece.reshape(g, n // BLOCK, 8 // part, 2 * part, 4, d).transpose(0, 1, 2, 3, 5, 4)
        packed = np.zeros(spread.shape[:2] + spread.shape[3:], np.uint8)  # (G, blocks, 2 * part, D, 4)
        for i in range(8 // part):
            packed |= spread[:, :, i] << part * i
        codes[:, t0 // BLOCK : (t0 + n) // BLOCK, row : row + 2 * part] = packed
        row += 2 * part


def values_interleaved(p: F32, s0: int, codes: U8, scale: U16, t0: int, t1: int, out: F32) -> None:
    """out (G, M, D) += p[:, :, s0:] times tokens t0..t1, still rotated; p is rounded in each block."""
    bits = codes.shape[2] // 2
    middle = np.float32((2**bits - 1) / 2)
    for block in range(t0 // BLOCK, -(-t1 // BLOCK)):
        first, last = max(t0, block * BLOCK), min(t1, (block + 1) * BLOCK)
        weights = np.zeros((*out.shape[:2], BLOCK), np.float32)
        inside = slice(first - block * BLOCK, last - block * BLOCK)
        widths = scale[:, None, first:last].view(np.float16).astype(np.float32)
        weights[..., inside] = p[:, :, s0 + first - t0 : s0 + last - t0] * widths
        top = weights.max(axis=2, keepdims=True)
        whole = np.rint(weights * (TOP_WEIGHT / np.maximum(top, np.float32(LEAST_WEIGHT))))
        levels = _levels(codes[:, block], bits).astype(np.float32) - middle  # (G, 64, D)
        out += top / TOP_WEIGHT * (whole @ levels)


def gauss_levels(x: F32, bits: int) -> tuple[U8, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Codes of x (..., D) in `bits` bits, and the scale that keeps x's length along x."""
    square = np.square(x, dtype=np.float64).sum(axis=-1)
    step = (np.sqrt(square / x.shape[-1]) * GAUSS_STEP[bits]).astype(np.float32)
    half = 2 ** (bits - 1)
    codes = np.clip(np.floor(x / np.where(step == 0, 1, step)[..., None]) + half, 0, 2 * half - 1)
    along = (x.astype(np.float64) * (codes - (half - 0.5))).sum(axis=-1)
    return codes.astype(np.uint8), square / np.where(along == 0, 1, along)


def _levels(codes: U8, bits: int) -> U8:
    """(G, 64, D) of a block (G, 2 * bits, D, 4)."""
    g, _, d, _ = codes.shape
    levels = np.zeros((g, BLOCK, d), np.uint8)
    row = 0
    for part in PARTS[bits]:
        rows = codes[:, row : row + 2 * part]
        pieces = [rows >> part * i & (1 << part) - 1 for i in range(8 // part)]  # each (G, 2 * part, D, 4)
        stacked = np.stack(pieces, axis=1).transpose(0, 1, 2, 4, 3)
        levels = levels << part | stacked.reshape(g, BLOCK, d)
        row += 2 * part
    return levels


def _sums(codec: Any, p: F32, t0: int, t1: int, out: F32) -> None:
    rotated = np.zeros_like(out)
    codes, scale = codec.arrays["codes"], codec.arrays["scale"]
    for g, (first, bits) in enumerate(codec.heads):
        head = codes[first : first + bits].reshape(1, codes.shape[1], -1, *codes.shape[3:])
        values_interleaved(p[g : g + 1], 0, head, scale[g : g + 1], t0, t1, rotated[g : g + 1])
    rotate_back(codec.rotation, rotated, out)


LOOPS = {"interleaved": Loops(sums=_sums)}
