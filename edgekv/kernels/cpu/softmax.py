"""Softmax over a range of columns per row, with an exponential that vectorises (Numba's own is scalar)."""

import numpy as np
from numba import prange

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, inline_jit, parallel_jit
from edgekv.kernels.cpu.launch import flat, run
from edgekv.kernels.cpu.scalar import get, maximum, put
from edgekv.types import F32, I64

EXP_WORK = 3  # in multiply-adds
LOWEST = np.float32(-87)  # exp below this is taken as 0
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # Cody and Waite: n * high is exact
# exp(x) = 1 + x + x^2 * (C2 + x * (C3 + ...)), least relative error over |x| <= ln(2) / 2: 1e-7
C2, C3, C4, C5 = np.array([0.49999231, 0.16667114, 0.041890144, 0.0083125187], np.float32)
ZERO, HALF, ONE, MINUS_INFINITY = np.array([0, 0.5, 1, -np.inf], np.float32)
EXPONENT_BIAS, EXPONENT_SHIFT = np.int32(127), np.int32(23)


def softmax(s: F32, lo: I64, hi: I64) -> None:
    args = *flat(s), lo, hi, s.shape[2]
    run(_softmax_rows, _softmax_parallel, s.shape[0] * s.shape[1], EXP_WORK * s.size, args)


@fast_jit
def _softmax_rows(first: int, last: int, args: Args) -> None:
    s, gap_g, gap_m, lo, hi, n_columns = args
    for item in range(first, last):
        g, m = item // len(lo), item % len(lo)
        row = g * gap_g + m * gap_m
        start = min(max(lo[m], 0), n_columns)
        end = min(max(hi[m], start), n_columns)
        fill(s, row, row + start, ZERO)
        _softmax_row(s, row + start, row + end)
        fill(s, row + end, row + n_columns, ZERO)


@fast_jit
def _softmax_row(s: F32, start: int, end: int) -> None:
    peak = MINUS_INFINITY
    for i in range(end - start):
        peak = maximum(peak, get(s, start + i))
    if peak == MINUS_INFINITY:
        fill(s, start, end, ZERO)
        return
    total = ZERO
    for i in range(end - start):
        weight = exp_of_negative(get(s, start + i) - peak)
        put(s, start + i, weight)
        total += weight
    scale = ONE / total
    for i in range(end - start):
        put(s, start + i, get(s, start + i) * scale)


@fast_jit
def weigh(s: F32, row: int, n: int, ends: F32, end: int) -> Scalar:
    """s[row:][:n] = exp(s - the largest score so far), which ends[end] has; their sum is added to ends[end + 1].

    Returns what earlier weights must be multiplied with. Scores of -inf get 0.
    """
    shrink = raise_peak(s, row, n, ends, end)
    peak = get(ends, end)
    if peak == MINUS_INFINITY:
        fill(s, row, row + n, ZERO)
        return ONE
    total = _exponentials(s, row, BLOCK, peak) if n == BLOCK else _exponentials(s, row, n, peak)
    put(ends, end + 1, get(ends, end + 1) + total)
    return shrink


@fast_jit
def raise_peak(s: F32, row: int, n: int, ends: F32, end: int) -> Scalar:
    """Takes s[row:][:n] into the largest score so far, ends[end], to which the sum ends[end + 1] is relative.

    Returns what earlier weights must be multiplied with.
    """
    before = get(ends, end)
    peak = maximum(before, _largest(s, row, BLOCK) if n == BLOCK else _largest(s, row, n))
    if peak == before:
        return ONE
    shrink = exp_of_negative(before - peak)
    put(ends, end, peak)
    put(ends, end + 1, get(ends, end + 1) * shrink)
    return shrink


@inline_jit
def _largest(s: F32, row: int, n: int) -> Scalar:
    peak = MINUS_INFINITY
    for i in range(n):
        peak = maximum(peak, get(s, row + i))
    return peak


@inline_jit
def _exponentials(s: F32, row: int, n: int, peak: Scalar) -> Scalar:
    """s[row:][:n] = exp(s - peak); returns their sum. A whole block's n is known to the compiler."""
    total = ZERO
    for i in range(n):
        weight = exp_of_negative(get(s, row + i) - peak)
        put(s, row + i, weight)
        total += weight
    return total


@fast_jit
def exp_of_negative(x: Scalar) -> Scalar:
    """exp(x) for x <= 0, relative error 2e-7; 0 below LOWEST."""
    clipped = maximum(x, LOWEST)
    exponent = np.int32(clipped * LOG2_E - HALF)  # truncation rounds, as the argument is negative
    n = np.float32(exponent)
    f = clipped - n * LN2_HIGH - n * LN2_LOW
    mantissa = ONE + f + f * f * (C2 + f * (C3 + f * (C4 + f * C5)))
    power = np.int32((exponent + EXPONENT_BIAS) << EXPONENT_SHIFT).view(np.float32)
    return mantissa * power if x > LOWEST else ZERO


@fast_jit
def fill(s: F32, start: int, end: int, x: Scalar) -> None:
    for i in range(end - start):
        put(s, start + i, x)


@parallel_jit
def _softmax_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _softmax_rows(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)
