"""Keys and values held as numbers, float16 bits or float32: one source for both, compiled for each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.half import as_float, float_to_half
from edgekv.kernels.cpu.jit import Args, fast_jit, jit, parallel_jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import Loops, add_loop, address_of, floats, halves, numbers, put_loop, score_loop
from edgekv.kernels.cpu.scalar import get, put
from edgekv.types import F32, U16

LANES = simd.LANES
TILE = 4 * LANES
AHEAD = 8  # tokens
ZERO = np.float32(0)


def encode_f16(x: F32, store: U16, t0: int) -> None:
    args = np.ascontiguousarray(x), store, t0
    run(_encode_tokens, _encode_parallel, x.shape[0] * x.shape[1], x.size, args)


def encode_f32(x: F32, store: F32, t0: int) -> None:
    store[:, t0 : t0 + x.shape[1]] = x


def project(x: F32, matrix: F32) -> F32:
    result: F32 = x @ matrix.T
    return result


def _half_store(codec: Any) -> tuple[int, ...]:
    return address_of(codec.arrays["half"]), codec.capacity, codec.head_dim


def _single_store(codec: Any) -> tuple[int, ...]:
    return address_of(codec.arrays["single"]), codec.capacity, codec.head_dim


@score_loop
def _score_f16(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    half, capacity, head_dim = _numbers(store)
    _score_block(floats(q), halves(half), (g * capacity + t) * head_dim, rows, head_dim, n, floats(s), gap)


@score_loop
def _score_f32(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    single, capacity, head_dim = _numbers(store)
    _score_block(floats(q), floats(single), (g * capacity + t) * head_dim, rows, head_dim, n, floats(s), gap)


@add_loop
def _add_f16(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    half, capacity, head_dim = _numbers(store)
    for m in range(rows):
        value = (g * capacity + t) * head_dim
        _add_block(floats(p), m * gap, n, halves(half), value, head_dim, floats(out), m * head_dim)


@add_loop
def _add_f32(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    single, capacity, head_dim = _numbers(store)
    for m in range(rows):
        value = (g * capacity + t) * head_dim
        _add_block(floats(p), m * gap, n, floats(single), value, head_dim, floats(out), m * head_dim)


@jit
def _numbers(store: int) -> tuple[int, int, int]:
    x = numbers(store)
    return get(x, 0), get(x, 1), get(x, 2)


@put_loop
def _put_f16(store: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    half, capacity, head_dim = _numbers(store)
    target = (g * capacity + t0) * head_dim
    for i in range(n * head_dim):
        put(halves(half), target + i, float_to_half(get(floats(x), i)))


@put_loop
def _put_f32(store: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    single, capacity, head_dim = _numbers(store)
    target = (g * capacity + t0) * head_dim
    for i in range(n * head_dim):
        put(floats(single), target + i, get(floats(x), i))


F16 = Loops(_half_store, score=_score_f16, add=_add_f16, put=_put_f16)
F32_ROWS = Loops(_single_store, score=_score_f32, add=_add_f32, put=_put_f32)


@fast_jit
def _score_block(q: F32, keys: U16 | F32, key: int, rows: int, head_dim: int, n: int, s: F32, gap: int) -> None:
    query = row = 0
    for _ in range(rows // 4):
        _score_four_rows(q, query, keys, key, head_dim, n, s, row, gap)
        query, row = query + 4 * head_dim, row + 4 * gap
    for _ in range(rows % 4):
        _score_row(q, query, keys, key, head_dim, n, s, row)
        query, row = query + head_dim, row + gap


@jit
def _encode_tokens(first: int, last: int, args: Args) -> None:
    x, store, t0 = args
    (_, n_tokens, head_dim), capacity = x.shape, store.shape[1]
    x, store = x.reshape(-1), store.reshape(-1)
    for item in range(first, last):
        target = (item // n_tokens * capacity + t0 + item % n_tokens) * head_dim
        for d in range(head_dim):
            put(store, target + d, float_to_half(get(x, item * head_dim + d)))


@parallel_jit
def _encode_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _encode_tokens(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@fast_jit
def _score_row(q: F32, query: int, keys: U16 | F32, key: int, head_dim: int, n: int, s: F32, row: int) -> None:
    """s[row:][:n] = the query q[query:] times n keys."""
    whole = head_dim // LANES * LANES
    for t in range(n):
        a = simd.splat(ZERO)
        for d in range(0, whole, LANES):
            simd.prefetch(keys, key + AHEAD * head_dim + d)
            a = simd.multiply_add(simd.load(q, query + d), simd.load(keys, key + d), a)
        score = simd.total(a)
        for d in range(whole, head_dim):
            score += get(q, query + d) * as_float(get(keys, key + d))
        put(s, row + t, score)
        key += head_dim


@fast_jit
def _score_four_rows(
    q: F32, query: int, keys: U16 | F32, key: int, head_dim: int, n: int, s: F32, row: int, gap_m: int
) -> None:
    """`_score_row` for four neighbouring rows of q and of s: each key is loaded once."""
    whole = head_dim // LANES * LANES
    q0, q1, q2, q3 = query, query + head_dim, query + 2 * head_dim, query + 3 * head_dim
    for t in range(n):
        a0 = a1 = a2 = a3 = simd.splat(ZERO)
        for d in range(0, whole, LANES):
            simd.prefetch(keys, key + AHEAD * head_dim + d)
            k = simd.load(keys, key + d)
            a0 = simd.multiply_add(simd.load(q, q0 + d), k, a0)
            a1 = simd.multiply_add(simd.load(q, q1 + d), k, a1)
            a2 = simd.multiply_add(simd.load(q, q2 + d), k, a2)
            a3 = simd.multiply_add(simd.load(q, q3 + d), k, a3)
        score0, score1, score2, score3 = simd.total(a0), simd.total(a1), simd.total(a2), simd.total(a3)
        for d in range(whole, head_dim):
            x = as_float(get(keys, key + d))
            score0 += get(q, q0 + d) * x
            score1 += get(q, q1 + d) * x
            score2 += get(q, q2 + d) * x
            score3 += get(q, q3 + d) * x
        put(s, row + t, score0)
        put(s, row + gap_m + t, score1)
        put(s, row + 2 * gap_m + t, score2)
        put(s, row + 3 * gap_m + t, score3)
        key += head_dim


@fast_jit
def _add_block(
    p: F32, column: int, n: int, values: U16 | F32, value: int, head_dim: int, out: F32, target: int
) -> None:
    """out[target:][:head_dim] += sum over n tokens of p[column + t] * values[value + t * head_dim:]."""
    wide, whole = head_dim // TILE * TILE, head_dim // LANES * LANES
    for d in range(0, wide, TILE):
        i, j = target + d, value + d
        a0, a1 = simd.load(out, i), simd.load(out, i + LANES)
        a2, a3 = simd.load(out, i + 2 * LANES), simd.load(out, i + 3 * LANES)
        for t in range(n):
            simd.prefetch(values, j + AHEAD * head_dim)
            simd.prefetch(values, j + AHEAD * head_dim + 2 * LANES)
            w = simd.broadcast(p, column + t)
            a0 = simd.multiply_add(w, simd.load(values, j), a0)
            a1 = simd.multiply_add(w, simd.load(values, j + LANES), a1)
            a2 = simd.multiply_add(w, simd.load(values, j + 2 * LANES), a2)
            a3 = simd.multiply_add(w, simd.load(values, j + 3 * LANES), a3)
            j += head_dim
        simd.store(out, i, a0)
        simd.store(out, i + LANES, a1)
        simd.store(out, i + 2 * LANES, a2)
        simd.store(out, i + 3 * LANES, a3)
    for d in range(wide, whole, LANES):
        a = simd.load(out, target + d)
        for t in range(n):
            x = simd.load(values, value + t * head_dim + d)
            a = simd.multiply_add(simd.broadcast(p, column + t), x, a)
        simd.store(out, target + d, a)
    for d in range(whole, head_dim):
        element = get(out, target + d)
        for t in range(n):
            element += get(p, column + t) * as_float(get(values, value + t * head_dim + d))
        put(out, target + d, element)
