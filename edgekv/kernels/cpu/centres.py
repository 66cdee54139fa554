"""Means of 64 and of 16 keys in 4 bits, and queries in two bytes, as `centre_products` multiplies them."""

import numpy as np

from edgekv.kernels.contract.attention import BLOCK, LARGEST_F16
from edgekv.kernels.contract.planes import CENTRE, CENTRES
from edgekv.kernels.cpu.half import as_float, float_to_half
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.rounding import round_to_even
from edgekv.kernels.cpu.scalar import clamp, get, maximum, minimum, put
from edgekv.types import F32, U8, U16

ZERO, ONE, EIGHT = np.array([0, 1, 8], np.float32)
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
        low = clamp(np.floor(get(scratch, d) / divisor) + EIGHT, ZERO, HIGHEST)
        high = clamp(np.floor(get(scratch, d + half) / divisor) + EIGHT, ZERO, HIGHEST)
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
    size, divisor = _size_of(x, start, n)
    total = 0
    for d in range(n):
        whole = np.int32(round_to_even(get(x, start + d) / divisor))
        put(halves, target + d, np.uint8(np.int32(whole + 128) >> 8 & 255))
        put(halves, target + n + d, np.uint8(whole & 255))
        total += whole
    return size, total


@jit
def as_words(x: F32, start: int, n: int, halves: U8, target: int) -> tuple[Scalar, int]:
    """`split`, as words of two bytes that have a sign."""
    size, divisor = _size_of(x, start, n)
    total = 0
    for d in range(n):
        whole = np.int32(round_to_even(get(x, start + d) / divisor))
        put(halves, target + 2 * d, np.uint8(whole & 255))
        put(halves, target + 2 * d + 1, np.uint8(whole >> 8 & 255))
        total += whole
    return size, total


@jit
def _size_of(x: F32, start: int, n: int) -> tuple[Scalar, Scalar]:
    """What 1 of two bytes stands for, and what to divide by."""
    largest = ZERO
    for d in range(start, start + n):
        largest = maximum(largest, abs(get(x, d)))
    size = largest / LARGEST_SPLIT
    return size, ONE if size == ZERO else size
