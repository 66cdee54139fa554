"""Means of 64 and of 16 keys in 4 bits, scored with queries split into two signed bytes."""

import numpy as np

from edgekv.kernels.contract.attention import BLOCK, LARGEST_F16
from edgekv.kernels.contract.planes import CENTRE, CENTRES
from edgekv.kernels.cpu import dot, simd
from edgekv.kernels.cpu.half import as_float, float_to_half
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, inline_jit, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.rounding import round_to_even
from edgekv.kernels.cpu.scalar import get, maximum, minimum, put
from edgekv.types import F32, U8, U16

VECTOR = 4 * simd.LANES  # bytes
ZERO, ONE, HALF, TWO, EIGHT = np.array([0, 1, 0.5, 2, 8], np.float32)
MIDDLE, HIGHEST, LARGEST_SPLIT = np.array([7.5, 15, 127 * 256], np.float32)


def encode_centres(x: F32, codes: U8, step: U16, t0: int) -> None:
    n_items = x.shape[0] * x.shape[1] // BLOCK
    args = x, codes, step, t0, np.empty((n_items, x.shape[2]), np.float32)
    run(_centre_items, n_items, 8 * x.size, args)


@fast_jit
def _centre_items(first: int, last: int, args: Args) -> None:
    x, codes, step, t0, scratch = args
    (_, n, width), n_blocks = x.shape, step.shape[1]
    x, codes, step, scratch = x.reshape(-1), codes.reshape(-1), step.reshape(-1), scratch.reshape(-1)
    groups = n // BLOCK
    for item in range(first, last):
        target = (item // groups * n_blocks + t0 // BLOCK + item % groups) * CENTRES
        row, mean = item * BLOCK * width, item * width
        _encode_mean(x, row, BLOCK, width, step, codes, target, scratch, mean)
        for i in range(1, CENTRES):
            _encode_mean(x, row + (i - 1) * CENTRE * width, CENTRE, width, step, codes, target + i, scratch, mean)


@jit
def _encode_mean(
    x: F32, row: int, n: int, width: int, step: U16, codes: U8, target: int, scratch: F32, mean: int
) -> None:
    """Stores the mean of n rows of x and subtracts it from them; scratch[mean:][:width] is used up."""
    half, largest = width // 2, ZERO
    for d in range(width):
        put(scratch, mean + d, get(x, row + d))
    for i in range(row + width, row + n * width, width):
        for d in range(width):
            put(scratch, mean + d, get(scratch, mean + d) + get(x, i + d))
    for d in range(mean, mean + width):
        put(scratch, d, get(scratch, d) * (ONE / np.float32(n)))
        largest = maximum(largest, abs(get(scratch, d)))
    bits = float_to_half(minimum(largest / EIGHT, LARGEST_F16))
    put(step, target, bits)
    size = as_float(bits)
    divisor = ONE if size == ZERO else size
    for d in range(mean, mean + half):
        low = minimum(maximum(np.floor(get(scratch, d) / divisor) + EIGHT, ZERO), HIGHEST)
        high = minimum(maximum(np.floor(get(scratch, d + half) / divisor) + EIGHT, ZERO), HIGHEST)
        put(codes, target * half + d - mean, np.uint8(np.int32(low) | np.int32(high) << 4))
        put(scratch, d, (low - MIDDLE) * size)
        put(scratch, d + half, (high - MIDDLE) * size)
    for i in range(row, row + n * width, width):
        for d in range(width):
            put(x, i + d, get(x, i + d) - get(scratch, mean + d))


@jit
def split(x: F32, start: int, n: int, halves: U8, target: int) -> tuple[Scalar, int]:
    """x[start:][:n] ~ size * (256 * high + low): n bytes high, then n bytes low, from `target` on.

    Returns size, and the sum of all 256 * high + low. The error is at most 2 ** -16 of the largest element.
    """
    largest = ZERO
    for d in range(start, start + n):
        largest = maximum(largest, abs(get(x, d)))
    size = largest / LARGEST_SPLIT
    divisor = ONE if size == ZERO else size
    total = 0
    for d in range(n):
        whole = np.int32(round_to_even(get(x, start + d) / divisor))
        put(halves, target + d, np.uint8(np.int32(whole + 128) >> 8 & 255))
        put(halves, target + n + d, np.uint8(whole & 255))
        total += whole
    return size, total


@inline_jit
def centre_scores(
    halves: U8,
    query: int,
    width: int,
    size: Scalar,
    total: Scalar,
    codes: U8,
    step: U16,
    block: int,
    s: F32,
    i: int,
) -> None:
    """s[i:][: CENTRES - 1] = the products of a row from `split` with the block's centres."""
    half, first = width // 2, block * CENTRES * (width // 2)
    h0 = h1 = h2 = h3 = h4 = l0 = l1 = l2 = l3 = l4 = dot.no_sums()
    whole = half // VECTOR * VECTOR
    for d in range(0, whole, VECTOR):
        q, code = query + d, first + d
        a, b = dot.load_bytes(halves, q), dot.load_bytes(halves, q + half)
        c, e = dot.load_bytes(halves, q + width), dot.load_bytes(halves, q + width + half)
        h0, l0 = _add_codes(dot.load_bytes(codes, code), a, b, c, e, h0, l0)
        h1, l1 = _add_codes(dot.load_bytes(codes, code + half), a, b, c, e, h1, l1)
        h2, l2 = _add_codes(dot.load_bytes(codes, code + 2 * half), a, b, c, e, h2, l2)
        h3, l3 = _add_codes(dot.load_bytes(codes, code + 3 * half), a, b, c, e, h3, l3)
        h4, l4 = _add_codes(dot.load_bytes(codes, code + 4 * half), a, b, c, e, h4, l4)
    if whole < half:  # the width is a multiple of 64: half a vector is left
        q, code = query + whole, first + whole
        a, b = dot.load_half(halves, q), dot.load_half(halves, q + half)
        c, e = dot.load_half(halves, q + width), dot.load_half(halves, q + width + half)
        h0, l0 = _add_codes(dot.load_half(codes, code), a, b, c, e, h0, l0)
        h1, l1 = _add_codes(dot.load_half(codes, code + half), a, b, c, e, h1, l1)
        h2, l2 = _add_codes(dot.load_half(codes, code + 2 * half), a, b, c, e, h2, l2)
        h3, l3 = _add_codes(dot.load_half(codes, code + 3 * half), a, b, c, e, h3, l3)
        h4, l4 = _add_codes(dot.load_half(codes, code + 4 * half), a, b, c, e, h4, l4)
    middle, at = MIDDLE * total, block * CENTRES
    common = as_float(get(step, at)) * (np.float32(dot.total(dot.multiply_add(h0, 256, l0))) - middle)
    totals = dot.totals(
        dot.multiply_add(h1, 256, l1),
        dot.multiply_add(h2, 256, l2),
        dot.multiply_add(h3, 256, l3),
        dot.multiply_add(h4, 256, l4),
    )
    dot.store_products(s, i, size, totals, middle, step, at + 1, common)


@inline_jit
def _add_codes(
    x: dot.Ints, a: dot.Ints, b: dot.Ints, c: dot.Ints, e: dot.Ints, high: dot.Ints, low: dot.Ints
) -> tuple[dot.Ints, dot.Ints]:
    """The codes of x times the high bytes (a of the lower, b of the upper codes) and the low ones (c, e)."""
    lower, upper = dot.codes_of(x, 0, 4), dot.codes_of(x, 4, 4)
    high = dot.add_signed(upper, b, dot.add_signed(lower, a, high))
    return high, dot.add_signed(upper, e, dot.add_signed(lower, c, low))
