"""Weights of 4 and 8 bits: codes of whole numbers, or of the numbers e2m1, with one scale for a block of inputs.

Whole numbers have a zero point of 2^(bits-1) or the block's own. Rounding to 4 bits searches the scale that
minimises the block's squared error, to 8 bits it takes max|w| / 127.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgekv.checkpoint.quantized import E2M1_DOUBLED
from edgekv.kernels import threads
from edgekv.kernels.cpu.launch import MIN_PARALLEL_WORK, exact_division_kernel
from edgekv.kernels.cpu.loops import chars, floats, load_arguments
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.weight_codes import code_of_zero
from edgekv.types import F32, I8, U8, Array

SHRINK = np.array([1, 1.05, *np.arange(0.95, 0.62, -0.05), *-np.arange(1.15, 0.67, -0.05)], np.float32)
"""Scales to try: factor 1 maps the largest |w| to code -8, negative ones map it to the +8 side, clipped to 7."""


def pack_numbers(numbers: I8, bits: int, *, e2m1: bool = False) -> U8:
    """Packs numbers (r, blocks, block) around 0, or of `E2M1_DOUBLED`, into codes (r, blocks, block * bits / 8).

    Of two codes of 4 bits in a byte the even one is in the low half.
    """
    codes = numbers.astype(np.int16) + code_of_zero(bits)
    if e2m1:
        codes = np.searchsorted(E2M1_DOUBLED[:8], np.abs(numbers)) | np.where(numbers < 0, 8, 0)
    packed: U8 = codes.astype(np.uint8)
    return packed if bits == 8 else packed[..., 0::2] | np.left_shift(packed[..., 1::2], np.uint8(4))


def dequantize(arrays: Mapping[str, Array], bits: int, columns: int, *, e2m1: bool = False) -> F32:
    """Returns the weights (rows, columns) float32 of codes made by `pack_numbers`, and scales (rows, blocks).

    Zeros (rows, blocks) are the blocks' own zero points, offsets (rows, blocks) what is added to scale * code.
    """
    codes = arrays["codes"]
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], -1)
    values: F32 = (E2M1_DOUBLED[codes] if e2m1 else codes).astype(np.float32)
    if not e2m1 and "offsets" not in arrays:
        values -= arrays["zeros"][..., None] if "zeros" in arrays else np.float32(code_of_zero(bits))
    values *= arrays["scales"][..., None]
    if "offsets" in arrays:
        values += arrays["offsets"][..., None]
    return values.reshape(len(codes), -1)[:, :columns]


def quantize(weight: F32, bits: int, block: int) -> tuple[U8, F32]:
    """Quantizes weight (r, k): codes (r, blocks, block * bits / 8) and scales (r, blocks).

    The last block is padded with zeros.
    """
    shape = len(weight), -(-weight.shape[1] // block)
    codes, scales = np.empty((*shape, block * bits // 8), np.uint8), np.empty(shape, np.float32)
    shrink, n_threads = SHRINK if bits == 4 else SHRINK[:1], threads.count()
    scratch = np.empty((n_threads, 2, block), np.float32)
    numbers = weight.shape[1], shape[1], bits, block, len(shrink)
    arrays = np.ascontiguousarray(weight), shrink, codes, scales, scratch
    _quantize_rows(len(weight), MIN_PARALLEL_WORK, *numbers, *arrays, n_threads=n_threads)
    return codes, scales


@exact_division_kernel
def _quantize_rows(first: int, last: int, thread: int, arguments: int) -> None:
    columns, n_blocks, bits, block, n_shrink = load_arguments(arguments, 5)
    weight, shrink, codes_at, scales, scratch = load_arguments(arguments + 8 * 5, 5)
    w, q = floats(scratch + 8 * thread * block), floats(scratch + 8 * thread * block + 4 * block)
    zero, top = np.float32(1 << (bits - 1)), np.float32((1 << bits) - 1)
    full = -zero if bits == 4 else zero - np.float32(1)
    for i in range(first * n_blocks, last * n_blocks):
        row, start = floats(weight + 4 * (i // n_blocks) * columns), i % n_blocks * block
        codes, peak = chars(codes_at + i * (block * bits // 8)), np.float32(0)
        for j in range(block):
            put(w, j, get(row, start + j) if start + j < columns else np.float32(0))
            if abs(get(w, j)) > abs(peak):
                peak = get(w, j)
        best, scale = np.float32(np.inf), np.float32(0)
        for k in range(n_shrink):
            tried = peak * get(floats(shrink), k) / full
            inverse = np.float32(1) / tried if tried != 0 else np.float32(0)
            level_squares, product = np.float32(0), np.float32(0)
            for j in range(block):
                level = min(max(np.rint(get(w, j) * inverse) + zero, np.float32(0)), top) - zero
                put(q, j, level)
                level_squares += level * level
                product += level * get(w, j)
            if bits == 4:
                tried = product / max(level_squares, np.float32(1)) if level_squares > 0 else np.float32(0)
            error = np.float32(0)
            for j in range(block):
                lost = get(w, j) - get(q, j) * tried
                error += lost * lost
            if error < best:
                best, scale = error, tried
        put(floats(scales), i, scale)
        inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
        for j in range(block):
            put(q, j, min(max(np.rint(get(w, j) * inverse) + zero, np.float32(0)), top))
        if bits == 4:
            for j in range(block // 2):
                put(codes, j, np.uint8(get(q, 2 * j)) | np.uint8(np.uint8(get(q, 2 * j + 1)) << 4))
        else:
            for j in range(block):
                put(codes, j, np.uint8(get(q, j)))
