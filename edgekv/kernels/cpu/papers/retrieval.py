"""Which tokens to attend to: those of the largest sums of scores."""

import numpy as np

from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.jit import Args, Scalar, jit
from edgekv.kernels.cpu.launch import flat, run
from edgekv.kernels.cpu.masks import at_least, lowest_one
from edgekv.kernels.cpu.scalar import address, count_ones, get, put
from edgekv.types import F32, I32, I64

LANES = simd.LANES
SELECT_WORK = 16  # of one score, in multiply-adds
ZERO = np.float32(0)
MAGNITUDE, SIGN_SHIFT = np.int32(0x7FFFFFFF), np.int32(31)
LEAST = np.int32(-(1 << 31))  # in place of NaN: below what -inf becomes
ONE_BIT = np.uint64(1)


def select_top(s: F32, lo: I64, hi: I64, k: int, chosen: I32) -> None:
    args = *flat(s), s.shape[1] // len(lo), lo, hi, k, chosen
    n_rows = s.shape[0] * len(lo)
    run(_select_rows, n_rows, SELECT_WORK * n_rows * s.shape[2], args)


@jit
def _select_rows(first: int, last: int, args: Args) -> None:
    s, gap_g, gap_m, n_heads, lo, hi, k, chosen = args
    n, width = len(lo), chosen.shape[2]
    chosen, orders, s = address(chosen), address(s.view(np.int32)), address(s)
    for item in range(first, last):
        j = item % n
        row, length = item // n * gap_g + j * gap_m + lo[j], hi[j] - lo[j]
        for head in range(1, n_heads):
            _add_row(s, row, row + head * n * gap_m, length)
        for i in range(row, row + length):
            put(orders, i, _order(get(s, i)))
        _select_row(orders, row, length, k, chosen, item * width, lo[j])


@jit
def _add_row(s: F32, row: int, other: int, length: int) -> None:
    for i in range(length):
        put(s, row + i, get(s, row + i) + get(s, other + i))


@jit
def _order(x: Scalar) -> Scalar:
    """An int32 that compares as the float32 x does: its bits, those of the magnitude flipped if negative."""
    bits = np.float32(x + ZERO).view(np.int32)  # -0 becomes 0
    return LEAST if x != x else np.int32(bits ^ ((bits >> SIGN_SHIFT) & MAGNITUDE))


@jit
def _select_row(s: I32, row: int, length: int, k: int, chosen: I32, target: int, t0: int) -> None:
    """chosen[target:] = t0 + the places of the k largest of s[row:][:length], or all, in ascending order."""
    if length <= k:
        for i in range(length):
            put(chosen, target + i, np.int32(t0 + i))
        return
    threshold, n_equal = _threshold(s, row, length, k)
    for i in range(0, length, LANES):
        bits = _at_least(s, row + i, length - i, threshold)
        while bits:
            j = i + lowest_one(bits)
            bits &= bits - ONE_BIT
            if get(s, row + j) == threshold:
                n_equal -= 1
                if n_equal < 0:
                    continue
            put(chosen, target, np.int32(t0 + j))
            target += 1


@jit
def _threshold(s: I32, row: int, length: int, k: int) -> tuple[Scalar, int]:
    """A number that k of s[row:][:length] reach, the larger first, and how many of those may equal it."""
    least = most = get(s, row)
    for i in range(length):
        least, most = min(least, get(s, row + i)), max(most, get(s, row + i))
    low, high = np.int64(least), np.int64(most) + 1
    n_above = 0  # that reach `high`: fewer than k, while k or more reach `low`
    while high - low > 1:
        middle = (low + high) >> 1
        n = _count_at_least(s, row, length, np.int32(middle))
        if n == k:
            return np.int32(middle), k
        if n > k:
            low = middle
        else:
            high, n_above = middle, n
    return np.int32(low), k - n_above


@jit
def _count_at_least(s: I32, row: int, length: int, threshold: Scalar) -> Scalar:
    n = np.uint64(0)
    whole = length // LANES * LANES
    for i in range(0, whole, LANES):
        n += count_ones(at_least(s, row + i, threshold))
    return np.int64(n + count_ones(_at_least(s, row + whole, length - whole, threshold)))


@jit
def _at_least(s: I32, start: int, length: int, threshold: Scalar) -> Scalar:
    """`at_least` for the first LANES of `length` elements."""
    if length >= LANES:
        return at_least(s, start, threshold)
    bits = np.uint64(0)
    for i in range(length):
        if get(s, start + i) >= threshold:
            bits |= ONE_BIT << np.uint64(i)
    return bits
