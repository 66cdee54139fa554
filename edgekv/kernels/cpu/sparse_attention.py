"""Attention to chosen tokens only: exact scores, and sums of their values."""

from typing import Any

import numpy as np

from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.jit import fast_jit
from edgekv.kernels.cpu.loops import Loops, add_loop, address_of, floats, halves, ints, numbers, score_loop
from edgekv.kernels.cpu.scalar import get, put
from edgekv.types import F32, I32, U16

LANES = simd.LANES
TILE = 4 * LANES
TOKENS_AHEAD = 8
LINE_HALVES = 32  # float16 values to a cache line
ZERO = np.float32(0)


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


CHOSEN = {"f16": Loops(_store_numbers, score=_score_at, add=_add_at)}
"""By the kind of a codec of whose tokens only chosen ones are read."""


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
