"""Attention over chosen tokens only: which to choose, and exact scores and value sums of those."""

from typing import Any

import numpy as np
from numba import prange

from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, jit, parallel_jit
from edgekv.kernels.cpu.launch import flat, run
from edgekv.kernels.cpu.loops import Loops, add_loop, address_of, floats, halves, ints, numbers, score_loop
from edgekv.kernels.cpu.masks import at_least, lowest_one
from edgekv.kernels.cpu.scalar import address, count_ones, get, maximum, minimum, put
from edgekv.types import F32, I32, I64, U16

LANES = simd.LANES
TILE = 4 * LANES
TOKENS_AHEAD = 8
LINE_HALVES = 32  # float16 values to a cache line
SELECT_WORK = 16  # of one score, in multiply-adds
ZERO = np.float32(0)
MAGNITUDE, SIGN_SHIFT = np.int32(0x7FFFFFFF), np.int32(31)
ONE_BIT = np.uint64(1)


def select_top(s: F32, lo: I64, hi: I64, k: int, chosen: I32) -> None:
    args = *flat(s), s.shape[1] // len(lo), lo, hi, k, chosen
    n_rows = s.shape[0] * len(lo)
    run(_select_rows, _select_parallel, n_rows, SELECT_WORK * n_rows * s.shape[2], args)


@score_loop
def _score_at(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    """Of the chosen tokens those from place t on; the list of head g ends at its count."""
    x = numbers(store)
    half, capacity, head_dim = get(x, 0), get(x, 1), get(x, 2)
    tokens, list_gap, count = get(x, 3), get(x, 4), get(x, 5)
    first = g * list_gap
    for m in range(rows):
        _score_row(
            *(floats(q), m * head_dim, halves(half), g * capacity, head_dim, ints(tokens)),
            *(first + t, first + t + n, first + count, floats(s), m * gap),
        )


@add_loop
def _add_at(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    x = numbers(store)
    half, capacity, head_dim = get(x, 0), get(x, 1), get(x, 2)
    tokens, list_gap, count = get(x, 3), get(x, 4), get(x, 5)
    first = g * list_gap
    for m in range(rows):
        _add_tokens(
            *(floats(p), m * gap, halves(half), g * capacity, head_dim, ints(tokens)),
            *(first + t, first + t + n, first + count, floats(out), m * head_dim),
        )


def _store_numbers(codec: Any) -> tuple[int, ...]:
    return address_of(codec.arrays["half"]), codec.capacity, codec.head_dim


CHOSEN_F16 = Loops(_store_numbers, score=_score_at, add=_add_at)


@jit
def _select_rows(first: int, last: int, args: Args) -> None:
    s, gap_g, gap_m, n_heads, lo, hi, k, chosen = args
    n, width = len(lo), chosen.shape[2]
    chosen, s = address(chosen), address(s)
    for item in range(first, last):
        j = item % n
        row, length = item // n * gap_g + j * gap_m + lo[j], hi[j] - lo[j]
        for head in range(1, n_heads):
            _add_row(s, row, row + head * n * gap_m, length)
        _select_row(s, row, length, k, chosen, item * width, lo[j])


@parallel_jit
def _select_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _select_rows(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@jit
def _add_row(s: F32, row: int, other: int, length: int) -> None:
    for i in range(length):
        put(s, row + i, get(s, row + i) + get(s, other + i))


@jit
def _select_row(s: F32, row: int, length: int, k: int, chosen: I32, target: int, t0: int) -> None:
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
def _threshold(s: F32, row: int, length: int, k: int) -> tuple[Scalar, int]:
    """A number that k of s[row:][:length] reach, the larger first, and how many of those may equal it.

    Bisects the floats themselves, as integers in the same order.
    """
    least = most = get(s, row)
    for i in range(length):
        least, most = minimum(least, get(s, row + i)), maximum(most, get(s, row + i))
    low, high = _order(least), _order(most) + 1
    n_above = 0  # that reach `high`: fewer than k, while k or more reach `low`
    while high - low > 1:
        middle = (low + high) >> 1
        threshold = _at(middle)
        n = _count_at_least(s, row, length, threshold)
        if n == k:
            return threshold, k
        if n > k:
            low = middle
        else:
            high, n_above = middle, n
    return _at(low), k - n_above


@jit
def _order(x: Scalar) -> Scalar:
    """An integer that compares as the float32 x does: its bits, those of the magnitude flipped if negative."""
    bits = np.float32(x).view(np.int32)
    return np.int64(bits ^ ((bits >> SIGN_SHIFT) & MAGNITUDE))


@jit
def _at(order: int) -> Scalar:
    """The float32 with this `_order`."""
    bits = np.int32(order)
    return np.int32(bits ^ ((bits >> SIGN_SHIFT) & MAGNITUDE)).view(np.float32)


@jit
def _count_at_least(s: F32, row: int, length: int, threshold: Scalar) -> Scalar:
    n = np.uint64(0)
    whole = length // LANES * LANES
    for i in range(0, whole, LANES):
        n += count_ones(at_least(s, row + i, threshold))
    return np.int64(n + count_ones(_at_least(s, row + whole, length - whole, threshold)))


@jit
def _at_least(s: F32, start: int, length: int, threshold: Scalar) -> Scalar:
    """`at_least` for the first LANES of `length` elements."""
    if length >= LANES:
        return at_least(s, start, threshold)
    bits = np.uint64(0)
    for i in range(length):
        if get(s, start + i) >= threshold:
            bits |= ONE_BIT << np.uint64(i)
    return bits


@fast_jit
def _score_row(
    q: F32,
    query: int,
    keys: U16,
    token0: int,
    head_dim: int,
    tokens: I32,
    start: int,
    end: int,
    list_end: int,
    s: F32,
    row: int,
) -> None:
    """s[row:] = the query q[query:] times the keys of tokens[start:end]."""
    whole = head_dim // LANES * LANES
    for i in range(start, end):
        key = (token0 + get(tokens, i)) * head_dim
        ahead = (token0 + get(tokens, min(i + TOKENS_AHEAD, list_end - 1))) * head_dim
        for d in range(0, head_dim, LINE_HALVES):
            simd.prefetch(keys, ahead + d)
        a = simd.splat(ZERO)
        for d in range(0, whole, LANES):
            a = simd.multiply_add(simd.load(q, query + d), simd.load(keys, key + d), a)
        score = simd.total(a)
        for d in range(whole, head_dim):
            score += get(q, query + d) * as_float(get(keys, key + d))
        put(s, row + i - start, score)


@fast_jit
def _add_tokens(
    p: F32,
    column: int,
    values: U16,
    token0: int,
    head_dim: int,
    tokens: I32,
    start: int,
    end: int,
    list_end: int,
    out: F32,
    target: int,
) -> None:
    """out[target:][:head_dim] += the sum of p[column:] times the values of tokens[start:end]."""
    whole = head_dim // TILE * TILE
    for d in range(0, whole, TILE):
        o = target + d
        a0, a1 = simd.load(out, o), simd.load(out, o + LANES)
        a2, a3 = simd.load(out, o + 2 * LANES), simd.load(out, o + 3 * LANES)
        for i in range(start, end):
            value = (token0 + get(tokens, i)) * head_dim + d
            ahead = (token0 + get(tokens, min(i + TOKENS_AHEAD, list_end - 1))) * head_dim + d
            simd.prefetch(values, ahead)
            simd.prefetch(values, ahead + LINE_HALVES)
            w = simd.broadcast(p, column + i - start)
            a0 = simd.multiply_add(w, simd.load(values, value), a0)
            a1 = simd.multiply_add(w, simd.load(values, value + LANES), a1)
            a2 = simd.multiply_add(w, simd.load(values, value + 2 * LANES), a2)
            a3 = simd.multiply_add(w, simd.load(values, value + 3 * LANES), a3)
        simd.store(out, o, a0)
        simd.store(out, o + LANES, a1)
        simd.store(out, o + 2 * LANES, a2)
        simd.store(out, o + 3 * LANES, a3)
    for i in range(start, end):
        value, w = (token0 + get(tokens, i)) * head_dim, get(p, column + i - start)
        for d in range(whole, head_dim):
            x = as_float(get(values, value + d))
            put(out, target + d, get(out, target + d) + w * x)
