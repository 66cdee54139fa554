"""Keys and values held as numbers, float16 bits or float32: one source for both, compiled for each."""

from __future__ import annotations

import numpy as np
from numba import prange

from edgekv.kernels.numba_ import simd
from edgekv.kernels.numba_.half import as_float, float_to_half
from edgekv.kernels.numba_.jit import fast_jit, jit, parallel_jit
from edgekv.kernels.numba_.launch import flat, run, token_span, token_splits
from edgekv.kernels.spec import BLOCK, F32, U16

LANES = simd.LANES
TILE = 4 * LANES
ZERO = np.float32(0)


def encode_f16(x: F32, store: U16, t0: int) -> None:
    n_rows = x.shape[0] * x.shape[1]
    run(_encode_items, _encode_parallel, n_rows, x.size, np.ascontiguousarray(x), store, t0)


def scores_f16(q: F32, keys: U16 | F32, t0: int, t1: int, s: F32, s0: int) -> None:
    work = q.size * (t1 - t0)
    splits = token_splits(q.shape[0], work)
    args = splits, np.ascontiguousarray(q), keys, t0, t1, *flat(s), s0
    run(_scores_items, _scores_parallel, q.shape[0] * splits, work, *args)


def values_f16(p: F32, s0: int, values: U16 | F32, t0: int, t1: int, out: F32) -> None:
    work = out.size * (t1 - t0)
    splits = token_splits(out.shape[0], work)
    partial = out[None] if splits == 1 else np.zeros((splits, *out.shape), np.float32)
    args = splits, *flat(p), s0, values, t0, t1, partial
    run(_values_items, _values_parallel, out.shape[0] * splits, work, *args)
    if splits > 1:
        out += partial.sum(axis=0)


scores_f32 = scores_f16
values_f32 = values_f16


@jit
def _encode_items(first: int, last: int, x: F32, store: U16, t0: int) -> None:
    n_tokens = x.shape[1]
    for item in range(first, last):
        source = x[item // n_tokens, item % n_tokens]
        target = store[item // n_tokens, t0 + item % n_tokens]
        for d in range(len(source)):
            target[d] = float_to_half(source[d])


@parallel_jit
def _encode_parallel(n_parts: int, n_items: int, x: F32, store: U16, t0: int) -> None:
    for part in prange(n_parts):
        _encode_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, x, store, t0)


@fast_jit
def _scores_items(
    first: int,
    last: int,
    splits: int,
    q: F32,
    keys: U16 | F32,
    t0: int,
    t1: int,
    s: F32,
    gap_g: int,
    gap_m: int,
    s0: int,
) -> None:
    n_rows, head_dim = q.shape[1:]
    capacity = keys.shape[1]
    q, keys = q.reshape(-1), keys.reshape(-1)
    for item in range(first, last):
        g = item // splits
        start, end = token_span(t0, t1, splits, item % splits)
        for block in range(start, end, BLOCK):
            n = min(BLOCK, end - block)
            key = (g * capacity + block) * head_dim
            column = g * gap_g + s0 + block - t0
            for m in range(0, n_rows - 3, 4):
                query, row = (g * n_rows + m) * head_dim, column + m * gap_m
                _score_four_rows(q, query, keys, key, head_dim, n, s, row, gap_m)
            for m in range(n_rows // 4 * 4, n_rows):
                query, row = (g * n_rows + m) * head_dim, column + m * gap_m
                _score_row(q, query, keys, key, head_dim, n, s[row : row + n])


@fast_jit
def _score_row(q: F32, query: int, keys: U16 | F32, key: int, head_dim: int, n: int, s: F32) -> None:
    whole = head_dim // LANES * LANES
    for t in range(n):
        a = simd.splat(ZERO)
        for d in range(0, whole, LANES):
            simd.prefetch(keys, key + BLOCK * head_dim + d)
            a = simd.multiply_add(simd.load(q, query + d), simd.load(keys, key + d), a)
        score = simd.total(a)
        for d in range(whole, head_dim):
            score += q[query + d] * as_float(keys[key + d])
        s[t] = score
        key += head_dim


@fast_jit
def _score_four_rows(
    q: F32, query: int, keys: U16 | F32, key: int, head_dim: int, n: int, s: F32, row: int, gap_m: int
) -> None:
    """`_score_row` for four neighbouring rows of q and of s: each key is loaded once."""
    whole = head_dim // LANES * LANES
    q0, q1, q2, q3 = query, query + head_dim, query + 2 * head_dim, query + 3 * head_dim
    s0, s1 = s[row : row + n], s[row + gap_m : row + gap_m + n]
    s2, s3 = s[row + 2 * gap_m : row + 2 * gap_m + n], s[row + 3 * gap_m : row + 3 * gap_m + n]
    for t in range(n):
        a0 = a1 = a2 = a3 = simd.splat(ZERO)
        for d in range(0, whole, LANES):
            simd.prefetch(keys, key + BLOCK * head_dim + d)
            k = simd.load(keys, key + d)
            a0 = simd.multiply_add(simd.load(q, q0 + d), k, a0)
            a1 = simd.multiply_add(simd.load(q, q1 + d), k, a1)
            a2 = simd.multiply_add(simd.load(q, q2 + d), k, a2)
            a3 = simd.multiply_add(simd.load(q, q3 + d), k, a3)
        score0, score1, score2, score3 = simd.total(a0), simd.total(a1), simd.total(a2), simd.total(a3)
        for d in range(whole, head_dim):
            x = as_float(keys[key + d])
            score0 += q[q0 + d] * x
            score1 += q[q1 + d] * x
            score2 += q[q2 + d] * x
            score3 += q[q3 + d] * x
        s0[t], s1[t], s2[t], s3[t] = score0, score1, score2, score3
        key += head_dim


@parallel_jit
def _scores_parallel(
    n_parts: int,
    n_items: int,
    splits: int,
    q: F32,
    keys: U16 | F32,
    t0: int,
    t1: int,
    s: F32,
    gap_g: int,
    gap_m: int,
    s0: int,
) -> None:
    for part in prange(n_parts):
        first, last = n_items * part // n_parts, n_items * (part + 1) // n_parts
        _scores_items(first, last, splits, q, keys, t0, t1, s, gap_g, gap_m, s0)


@fast_jit
def _values_items(
    first: int,
    last: int,
    splits: int,
    p: F32,
    gap_g: int,
    gap_m: int,
    s0: int,
    values: U16 | F32,
    t0: int,
    t1: int,
    out: F32,
) -> None:
    n_kv_heads, n_rows, head_dim = out.shape[1:]
    capacity = values.shape[1]
    out, values = out.reshape(-1), values.reshape(-1)
    for item in range(first, last):
        g, split = item // splits, item % splits
        start, end = token_span(t0, t1, splits, split)
        for block in range(start, end, BLOCK):
            n = min(BLOCK, end - block)
            value = (g * capacity + block) * head_dim
            for m in range(n_rows):
                column = g * gap_g + m * gap_m + s0 + block - t0
                target = ((split * n_kv_heads + g) * n_rows + m) * head_dim
                _add_block(p[column : column + n], values, value, head_dim, out, target)


@fast_jit
def _add_block(p: F32, values: U16 | F32, value: int, head_dim: int, out: F32, target: int) -> None:
    """out[target:][:head_dim] += sum of p[t] * values[value + t * head_dim:][:head_dim]."""
    whole = head_dim // TILE * TILE
    for d in range(0, whole, TILE):
        i, j = target + d, value + d
        a0, a1 = simd.load(out, i), simd.load(out, i + LANES)
        a2, a3 = simd.load(out, i + 2 * LANES), simd.load(out, i + 3 * LANES)
        for t in range(len(p)):
            simd.prefetch(values, j + BLOCK * head_dim)
            simd.prefetch(values, j + BLOCK * head_dim + 2 * LANES)
            w = simd.splat(p[t])
            a0 = simd.multiply_add(w, simd.load(values, j), a0)
            a1 = simd.multiply_add(w, simd.load(values, j + LANES), a1)
            a2 = simd.multiply_add(w, simd.load(values, j + 2 * LANES), a2)
            a3 = simd.multiply_add(w, simd.load(values, j + 3 * LANES), a3)
            j += head_dim
        simd.store(out, i, a0)
        simd.store(out, i + LANES, a1)
        simd.store(out, i + 2 * LANES, a2)
        simd.store(out, i + 3 * LANES, a3)
    for t in range(len(p)):
        for d in range(whole, head_dim):
            out[target + d] += p[t] * as_float(values[value + t * head_dim + d])


@parallel_jit
def _values_parallel(
    n_parts: int,
    n_items: int,
    splits: int,
    p: F32,
    gap_g: int,
    gap_m: int,
    s0: int,
    values: U16 | F32,
    t0: int,
    t1: int,
    out: F32,
) -> None:
    for part in prange(n_parts):
        first, last = n_items * part // n_parts, n_items * (part + 1) // n_parts
        _values_items(first, last, splits, p, gap_g, gap_m, s0, values, t0, t1, out)
