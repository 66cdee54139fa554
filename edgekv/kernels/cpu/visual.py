"""Uniform levels between given ends, in bit planes, unpacked a block at a time into the core's own cache."""

import numpy as np
from numba import prange

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.codes import F32, U8, U16
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.bits import put_bits, shift_in_bits
from edgekv.kernels.cpu.byte_rows import ROWS, add_codes, add_constant, score_codes
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.int4 import round_to_even
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, jit, parallel_jit
from edgekv.kernels.cpu.launch import (
    add_partial_sums,
    flat,
    partial_sums,
    run,
    token_span,
    token_splits,
)
from edgekv.kernels.cpu.scalar import get, maximum, minimum, put

LANES = simd.LANES
ENCODE_WORK, UNPACK_WORK = 4, 1  # of an element, in multiply-adds
BYTE_BITS = 8
ZERO = np.float32(0)


def encode_levels(x: F32, low: U16, step: U16, planes: U8, t0: int) -> None:
    args = np.ascontiguousarray(x), low, step, planes, t0
    run(_encode_tokens, _encode_parallel, x.shape[0] * x.shape[1], ENCODE_WORK * x.size, args)


def scores_levels(q: F32, planes: U8, low: U16, step: U16, t0: int, t1: int, s: F32, s0: int) -> None:
    n_heads = len(q)
    work = (UNPACK_WORK * n_heads * q.shape[2] + q.size) * (t1 - t0)
    splits = token_splits(n_heads, work)
    codes = np.empty((n_heads * splits, BLOCK * q.shape[2]), np.uint8)
    args = splits, np.ascontiguousarray(q), planes, low, step, t0, t1, *flat(s), s0, codes
    run(_scores_items, _scores_parallel, n_heads * splits, work, args)


def values_levels(p: F32, s0: int, planes: U8, low: U16, step: U16, t0: int, t1: int, out: F32) -> None:
    n_heads = len(out)
    work = (UNPACK_WORK * n_heads * out.shape[2] + out.size) * (t1 - t0)
    splits = token_splits(n_heads, work)
    codes = np.empty((n_heads * splits, BLOCK * out.shape[2]), np.uint8)
    weights = np.empty((n_heads * splits, ROWS * BLOCK), np.float32)
    partial = partial_sums(out, splits)
    args = splits, *flat(p), s0, planes, low, step, t0, t1, partial, codes, weights
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
    splits, q, planes, low, step, t0, t1, s, gap_g, gap_m, s0, codes = args
    (_, n_rows, head_dim), (_, capacity, n_bits, n_bytes) = q.shape, planes.shape
    q, planes, codes = q.reshape(-1), planes.reshape(-1), codes[first]
    for item in range(first, last):
        g = item // splits
        start, end = token_span(t0, t1, splits, item % splits)
        for t in range(start, end, BLOCK):
            n, query, row = min(BLOCK, end - t), g * n_rows * head_dim, g * gap_g + s0 + t - t0
            _unpack(planes, (g * capacity + t) * n_bits * n_bytes, n_bits, n_bytes, n, head_dim, codes)
            score_codes(q, query, n_rows, codes, 0, n, head_dim, s, row, gap_m)
            for m in range(n_rows):
                total = ZERO
                for d in range(query + m * head_dim, query + (m + 1) * head_dim):
                    total += get(q, d)
                _scale(s, row + m * gap_m, n, total, low, step, g, t)


@parallel_jit
def _scores_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _scores_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


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
    splits, p, gap_g, gap_m, s0, planes, low, step, t0, t1, out, codes, weights = args
    (n_heads, n_rows, head_dim), (_, capacity, n_bits, n_bytes) = out.shape[1:], planes.shape
    out, planes, codes, weights = out.reshape(-1), planes.reshape(-1), codes[first], weights[first]
    for item in range(first, last):
        g, split = item // splits, item % splits
        start, end = token_span(t0, t1, splits, split)
        for t in range(start, end, BLOCK):
            n = min(BLOCK, end - t)
            column, target = g * gap_g + s0 + t - t0, (split * n_heads + g) * n_rows * head_dim
            _unpack(planes, (g * capacity + t) * n_bits * n_bytes, n_bits, n_bytes, n, head_dim, codes)
            for m in range(0, n_rows, ROWS):
                rows = min(ROWS, n_rows - m)
                for r in range(rows):
                    shift = _weigh(p, column + r * gap_m, n, low, step, g, t, weights, r * BLOCK)
                    add_constant(out, target + r * head_dim, head_dim, shift)
                add_codes(weights, 0, rows, codes, 0, n, head_dim, out, target)
                column, target = column + rows * gap_m, target + rows * head_dim


@parallel_jit
def _values_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _values_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@fast_jit
def _weigh(p: F32, column: int, n: int, low: U16, step: U16, g: int, t: int, weights: F32, start: int) -> Scalar:
    """weights[start:][:n] = p * step of head g's tokens from t on; returns the sum of p * low."""
    shift = ZERO
    lo, size = _ends(low, step, g, t)
    for i in range(n):
        if low.shape[1] > 1:
            lo, size = _ends(low, step, g, t + i)
        put(weights, start + i, get(p, column + i) * size)
        shift += get(p, column + i) * lo
    return shift


@jit
def _unpack(planes: U8, token: int, n_bits: int, n_bytes: int, n: int, head_dim: int, codes: U8) -> None:
    """codes (n, head_dim) of n tokens, from the highest plane down."""
    whole = head_dim // LANES * LANES
    for i in range(0, n * head_dim, head_dim):
        highest = token + (n_bits - 1) * n_bytes
        for d in range(0, whole, LANES):
            put_bits(codes, i + d, planes, highest + d // BYTE_BITS)
        for plane in range(highest - n_bytes, token - 1, -n_bytes):
            for d in range(0, whole, LANES):
                shift_in_bits(codes, i + d, planes, plane + d // BYTE_BITS)
        for d in range(whole, head_dim):
            code = 0
            for plane in range(highest, token - 1, -n_bytes):
                code += code + (get(planes, plane + d // BYTE_BITS) >> (d % BYTE_BITS) & 1)
            put(codes, i + d, np.uint8(code))
        token += n_bits * n_bytes
