"""Uniform levels between given ends, in bit planes: sums over the elements whose bit is set, plane by plane."""

import numpy as np
from numba import prange

from edgekv.kernels.numba_ import simd
from edgekv.kernels.numba_.bits import add_where
from edgekv.kernels.numba_.half import as_float
from edgekv.kernels.numba_.int4 import round_to_even
from edgekv.kernels.numba_.jit import Args, Scalar, fast_jit, jit, parallel_jit
from edgekv.kernels.numba_.launch import (
    add_partial_sums,
    flat,
    partial_sums,
    run,
    token_span,
    token_splits,
)
from edgekv.kernels.numba_.scalar import get, maximum, minimum, put
from edgekv.kernels.spec import BLOCK
from edgekv.kernels.spec_codes import F32, U8, U16

LANES = simd.LANES
TILE = 2 * LANES
ENCODE_WORK = 4  # of an element, in multiply-adds
BYTE_BITS = 8
ZERO = np.float32(0)


def encode_levels(x: F32, low: U16, step: U16, planes: U8, t0: int) -> None:
    args = np.ascontiguousarray(x), low, step, planes, t0
    run(_encode_tokens, _encode_parallel, x.shape[0] * x.shape[1], ENCODE_WORK * x.size, args)


def scores_levels(q: F32, planes: U8, low: U16, step: U16, t0: int, t1: int, s: F32, s0: int) -> None:
    n_heads = len(q)
    work = planes.shape[2] * q.size * (t1 - t0)
    splits = token_splits(n_heads, work)
    args = splits, np.ascontiguousarray(q), planes, low, step, t0, t1, *flat(s), s0
    run(_scores_items, _scores_parallel, n_heads * splits, work, args)


def values_levels(p: F32, s0: int, planes: U8, low: U16, step: U16, t0: int, t1: int, out: F32) -> None:
    n_heads = len(out)
    work = planes.shape[2] * out.size * (t1 - t0)
    splits = token_splits(n_heads, work)
    weights = np.empty((n_heads * splits, BLOCK), np.float32)
    partial = partial_sums(out, splits)
    args = splits, *flat(p), s0, planes, low, step, t0, t1, partial, weights
    run(_values_items, _values_parallel, n_heads * splits, work, args)
    add_partial_sums(partial, out)


@jit
def _encode_tokens(first: int, last: int, args: Args) -> None:
    x, low, step, planes, t0 = args
    (_, n_tokens, head_dim), (n_bits, n_bytes) = x.shape, planes.shape[2:]
    x = x.reshape(-1)
    highest = np.float32((1 << n_bits) - 1)
    for item in range(first, last):
        g, i = item // n_tokens, item % n_tokens
        lo, size = _ends(low, step, g, t0 + i)
        token = planes[g, t0 + i].reshape(-1)
        token[:] = 0
        for d in range(head_dim):
            code = _level(get(x, item * head_dim + d), lo, size, highest)
            for j in range(n_bits):
                bit = (code >> np.int32(j) & np.int32(1)) << np.int32(d % BYTE_BITS)
                token[j * n_bytes + d // BYTE_BITS] |= np.uint8(bit)


@parallel_jit
def _encode_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _encode_tokens(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@jit
def _level(x: Scalar, low: Scalar, size: Scalar, highest: Scalar) -> Scalar:
    if size == ZERO:
        return np.int32(0)
    position = minimum(maximum((x - low) / size, ZERO), highest)
    return np.int32(round_to_even(position))


@jit
def _ends(low: U16, step: U16, g: int, t: int) -> tuple[Scalar, Scalar]:
    """low and step of head g's token t, where all heads or all tokens may share one."""
    row, column = min(g, low.shape[0] - 1), min(t, low.shape[1] - 1)
    return as_float(low[row, column]), as_float(step[row, column])


@fast_jit
def _scores_items(first: int, last: int, args: Args) -> None:
    splits, q, planes, low, step, t0, t1, s, gap_g, gap_m, s0 = args
    (_, n_rows, head_dim), (_, capacity, n_bits, n_bytes) = q.shape, planes.shape
    q, planes = q.reshape(-1), planes.reshape(-1)
    for item in range(first, last):
        g = item // splits
        start, end = token_span(t0, t1, splits, item % splits)
        for t in range(start, end, BLOCK):
            n, query, row = min(BLOCK, end - t), g * n_rows * head_dim, g * gap_g + s0 + t - t0
            for _ in range(n_rows):
                token = (g * capacity + t) * n_bits * n_bytes
                for i in range(0, n - 3, 4):
                    _dot_four(q, query, planes, token, n_bits, n_bytes, head_dim, s, row + i)
                    token += 4 * n_bits * n_bytes
                for i in range(n // 4 * 4, n):
                    put(s, row + i, _dot(q, query, planes, token, n_bits, n_bytes, head_dim))
                    token += n_bits * n_bytes
                _scale(s, row, n, _total(q, query, head_dim), low, step, g, t)
                query, row = query + head_dim, row + gap_m


@parallel_jit
def _scores_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _scores_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@fast_jit
def _dot(q: F32, query: int, planes: U8, token: int, n_bits: int, n_bytes: int, head_dim: int) -> Scalar:
    """The query times a token's codes: from the highest plane down, twice the sum so far plus the plane's."""
    whole = head_dim // LANES * LANES
    a = simd.splat(ZERO)
    for plane in range(token + (n_bits - 1) * n_bytes, token - 1, -n_bytes):
        a = simd.add(a, a)
        for d in range(0, whole, LANES):
            a = add_where(planes, plane + d // BYTE_BITS, simd.load(q, query + d), a)
    return simd.total(a) + _dot_rest(q, query, planes, token, n_bits, n_bytes, whole, head_dim)


@fast_jit
def _dot_four(
    q: F32, query: int, planes: U8, token: int, n_bits: int, n_bytes: int, head_dim: int, s: F32, row: int
) -> None:
    """s[row:][:4] = `_dot` of four tokens: their sums do not wait for each other."""
    whole, gap = head_dim // LANES * LANES, n_bits * n_bytes
    a0 = a1 = a2 = a3 = simd.splat(ZERO)
    for plane in range(token + (n_bits - 1) * n_bytes, token - 1, -n_bytes):
        a0, a1, a2, a3 = simd.add(a0, a0), simd.add(a1, a1), simd.add(a2, a2), simd.add(a3, a3)
        for d in range(0, whole, LANES):
            x, j = simd.load(q, query + d), plane + d // BYTE_BITS
            a0, a1 = add_where(planes, j, x, a0), add_where(planes, j + gap, x, a1)
            a2, a3 = add_where(planes, j + 2 * gap, x, a2), add_where(planes, j + 3 * gap, x, a3)
    put(s, row, simd.total(a0))
    put(s, row + 1, simd.total(a1))
    put(s, row + 2, simd.total(a2))
    put(s, row + 3, simd.total(a3))
    if whole < head_dim:
        for i in range(4):
            rest = _dot_rest(q, query, planes, token + i * gap, n_bits, n_bytes, whole, head_dim)
            put(s, row + i, get(s, row + i) + rest)


@fast_jit
def _dot_rest(
    q: F32, query: int, planes: U8, token: int, n_bits: int, n_bytes: int, first: int, head_dim: int
) -> Scalar:
    """The elements from `first` on, which do not fill a vector."""
    total = ZERO
    for plane in range(token + (n_bits - 1) * n_bytes, token - 1, -n_bytes):
        total += total
        for d in range(first, head_dim):
            total += get(q, query + d) * _bit(planes, plane, d)
    return total


@fast_jit
def _total(x: F32, start: int, n: int) -> Scalar:
    total = ZERO
    for i in range(start, start + n):
        total += get(x, i)
    return total


@fast_jit
def _scale(s: F32, row: int, n: int, total: Scalar, low: U16, step: U16, g: int, t: int) -> None:
    """s[row:][:n] = low * total + step * s, of head g's tokens from t on."""
    lo, size = _ends(low, step, g, t)
    for i in range(n):
        if low.shape[1] > 1:
            lo, size = _ends(low, step, g, t + i)
        put(s, row + i, lo * total + size * get(s, row + i))


@fast_jit
def _values_items(first: int, last: int, args: Args) -> None:
    splits, p, gap_g, gap_m, s0, planes, low, step, t0, t1, out, weights = args
    n_heads, n_rows, head_dim = out.shape[1:]
    out, weights = out.reshape(-1), weights[first]
    for item in range(first, last):
        g, split = item // splits, item % splits
        start, end = token_span(t0, t1, splits, split)
        for t in range(start, end, BLOCK):
            n = min(BLOCK, end - t)
            column, target = g * gap_g + s0 + t - t0, (split * n_heads + g) * n_rows * head_dim
            for _ in range(n_rows):
                shift = ZERO
                for i in range(n):
                    lo, size = _ends(low, step, g, t + i)
                    put(weights, i, get(p, column + i) * size)
                    shift += get(p, column + i) * lo
                _add_tokens(weights, n, shift, planes, g, t, head_dim, out, target)
                column, target = column + gap_m, target + head_dim


@parallel_jit
def _values_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _values_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@fast_jit
def _add_tokens(
    weights: F32, n: int, shift: Scalar, planes: U8, g: int, t: int, head_dim: int, out: F32, target: int
) -> None:
    """out[target:][:head_dim] += shift + sum of weights times the codes of n tokens from t on."""
    _, capacity, n_bits, n_bytes = planes.shape
    planes, whole = planes.reshape(-1), head_dim // TILE * TILE
    token = (g * capacity + t) * n_bits * n_bytes
    start = simd.splat(shift)
    for d in range(0, whole, TILE):
        i, plane = target + d, token + d // BYTE_BITS
        a0, a1 = simd.add(simd.load(out, i), start), simd.add(simd.load(out, i + LANES), start)
        for r in range(n):
            x = simd.broadcast(weights, r)
            for _ in range(n_bits):
                a0 = add_where(planes, plane, x, a0)
                a1 = add_where(planes, plane + LANES // BYTE_BITS, x, a1)
                x = simd.add(x, x)
                plane += n_bytes
        simd.store(out, i, a0)
        simd.store(out, i + LANES, a1)
    for d in range(whole, head_dim):
        total, plane = shift, token
        for r in range(n):
            x = get(weights, r)
            for _ in range(n_bits):
                total += x * _bit(planes, plane, d)
                x += x
                plane += n_bytes
        put(out, target + d, get(out, target + d) + total)


@jit
def _bit(planes: U8, plane: int, d: int) -> Scalar:
    return np.float32(get(planes, plane + d // BYTE_BITS) >> (d % BYTE_BITS) & 1)
