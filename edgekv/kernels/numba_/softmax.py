"""Softmax over a range of columns per row, with an exponential that vectorises (Numba's own is scalar)."""

import numpy as np
from numba import prange

from edgekv.kernels.numba_.jit import Scalar, fast_jit, parallel_jit
from edgekv.kernels.numba_.launch import flat, run
from edgekv.kernels.numba_.scalar import maximum
from edgekv.kernels.spec import F32, I64

EXP_WORK = 3  # in multiply-adds
LOWEST = np.float32(-87.0)  # exp below this is taken as 0
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # Cody and Waite: the high part is exact
# exp(x) = 1 + x + x^2 * (C2 + ...), least relative error over |x| <= ln(2) / 2: 1e-7
C2, C3, C4, C5 = np.array([0.49999231, 0.16667114, 0.041890144, 0.0083125187], np.float32)
HALF, ONE, ZERO = np.array([0.5, 1, 0], np.float32)
MINUS_INFINITY = np.float32(-np.inf)
EXPONENT_BIAS, EXPONENT_SHIFT = np.int32(127), np.int32(23)


def softmax(s: F32, lo: I64, hi: I64) -> None:
    n_rows = s.shape[0] * s.shape[1]
    run(_softmax_items, _softmax_parallel, n_rows, EXP_WORK * s.size, *flat(s), lo, hi, s.shape[2])


@fast_jit
def _softmax_items(
    first: int, last: int, s: F32, gap_g: int, gap_m: int, lo: I64, hi: I64, n_columns: int
) -> None:
    for item in range(first, last):
        g, m = item // len(lo), item % len(lo)
        row = s[g * gap_g + m * gap_m :][:n_columns]
        start, end = max(lo[m], 0), min(hi[m], n_columns)
        end = max(start, end)
        row[:start] = ZERO
        row[end:] = ZERO
        _softmax_row(row[start:end])


@fast_jit
def _softmax_row(row: F32) -> None:
    peak = MINUS_INFINITY
    for i in range(len(row)):
        peak = maximum(peak, row[i])
    if peak == MINUS_INFINITY:
        row[:] = ZERO
        return
    total = ZERO
    for i in range(len(row)):
        row[i] = _exp(row[i] - peak)
        total += row[i]
    scale = ONE / total
    for i in range(len(row)):
        row[i] *= scale


@fast_jit
def _exp(x: Scalar) -> Scalar:
    """exp(x) for x <= 0, relative error 2e-7; 0 below LOWEST."""
    clipped = maximum(x, LOWEST)
    exponent = np.int32(clipped * LOG2_E - HALF)  # rounds, as the argument is negative
    n = np.float32(exponent)
    f = clipped - n * LN2_HIGH - n * LN2_LOW
    mantissa = ONE + f + f * f * (C2 + f * (C3 + f * (C4 + f * C5)))
    power = np.int32((exponent + EXPONENT_BIAS) << EXPONENT_SHIFT).view(np.float32)
    return mantissa * power if x > LOWEST else ZERO


@parallel_jit
def _softmax_parallel(
    n_parts: int, n_items: int, s: F32, gap_g: int, gap_m: int, lo: I64, hi: I64, n_columns: int
) -> None:
    for part in prange(n_parts):
        first, last = n_items * part // n_parts, n_items * (part + 1) // n_parts
        _softmax_items(first, last, s, gap_g, gap_m, lo, hi, n_columns)
