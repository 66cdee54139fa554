"""Symmetric integers of four or eight bits with a scale per token."""

import numpy as np
from numba import prange

from edgekv.kernels.contract.attention import BLOCK, F32, U8, U16
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.codes import add_four_rows, add_row, dot_four_rows, dot_row, parts_of
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.int4 import round_to_even, round_up_to_half
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, jit, parallel_jit
from edgekv.kernels.cpu.launch import (
    add_partial_sums,
    flat,
    partial_sums,
    run,
    token_span,
    token_splits,
)
from edgekv.kernels.cpu.scalar import address, get, maximum, minimum, put

LANES = simd.LANES
ZERO, ONE = np.array([0, 1], np.float32)


def encode_sym(x: F32, codes: U8, scale: U16, t0: int) -> None:
    args = np.ascontiguousarray(x), codes, scale, t0
    run(_encode_tokens, _encode_parallel, x.shape[0] * x.shape[1], x.size, args)


def scores_sym(q: F32, codes: U8, scale: U16, t0: int, t1: int, s: F32, s0: int) -> None:
    work = q.size * (t1 - t0)
    splits = token_splits(q.shape[0], work)
    n_items = q.shape[0] * splits
    n_bytes, block = codes.shape[2:]
    dots = np.empty((n_items, 4 * block), np.float32)
    totals = q.sum(axis=2)  # what the codes' offset is multiplied by
    parts = parts_of(q.shape[2], n_bytes)
    args = splits, np.ascontiguousarray(q), totals, codes, scale, t0, t1, dots, *flat(s), s0, *parts
    run(_scores_items, _scores_parallel, n_items, work, args)


def values_sym(p: F32, s0: int, codes: U8, scale: U16, t0: int, t1: int, out: F32) -> None:
    work = out.size * (t1 - t0)
    splits = token_splits(out.shape[0], work)
    weights = np.empty((out.shape[0] * splits, 4 * BLOCK), np.float32)  # of four rows
    partial = partial_sums(out, splits)
    parts = parts_of(out.shape[2], codes.shape[2])
    args = splits, *flat(p), s0, codes, scale, t0, t1, weights, partial, *parts
    run(_values_items, _values_parallel, out.shape[0] * splits, work, args)
    add_partial_sums(partial, out)


@jit
def _encode_tokens(first: int, last: int, args: Args) -> None:
    x, codes, scale, t0 = args
    (_, n_tokens, head_dim), capacity = x.shape, scale.shape[1]
    n_blocks, n_bytes, block = codes.shape[1:]
    n_bits = 8 * n_bytes // head_dim
    top = np.float32((1 << (n_bits - 1)) - 1)
    x, codes, scale = x.reshape(-1), codes.reshape(-1), scale.reshape(-1)
    for item in range(first, last):
        g, t = item // n_tokens, t0 + item % n_tokens
        peak = ZERO
        for d in range(item * head_dim, (item + 1) * head_dim):
            peak = maximum(peak, abs(get(x, d)))
        bits = round_up_to_half(peak / top)
        step = as_float(bits)
        if step == ZERO:  # only if all elements are (nearly) zero: they round to 0
            step = ONE
        put(scale, g * capacity + t, bits)
        code = (g * n_blocks + t // block) * n_bytes * block + t % block
        for j in range(n_bytes):
            byte = 0
            for part in range(8 // n_bits):
                level = _level(get(x, item * head_dim + part * n_bytes + j), step, top)
                byte |= level << part * n_bits
            put(codes, code + j * block, np.uint8(byte))


@parallel_jit
def _encode_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _encode_tokens(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@jit
def _level(x: Scalar, step: Scalar, top: Scalar) -> Scalar:
    """The code of x, from 1 up."""
    return np.int64(minimum(maximum(round_to_even(x / step), -top), top) + top + ONE)


@fast_jit
def _scores_items(first: int, last: int, args: Args) -> None:
    splits, q, totals, codes, scale, t0, t1, dots, s, gap_g, gap_m, s0 = args[:12]
    parts = args[12:]
    (_, n_rows, head_dim), capacity = q.shape, scale.shape[1]
    n_blocks, n_bytes, block = codes.shape[1:]
    middle = np.float32(1 << (8 // len(parts) - 1))
    q, totals, dots, s = address(q), address(totals), address(dots), address(s)
    codes, scale = address(codes), address(scale)
    for item in range(first, last):
        g, dot = item // splits, item * 4 * block
        start, end = token_span(t0, t1, splits, item % splits)
        for b in range(start // block, (end + block - 1) // block):
            i, n = max(start - b * block, 0), min(end - b * block, block)
            token, code = g * capacity + b * block, (g * n_blocks + b) * n_bytes * block
            row, m = g * gap_g + s0 + b * block - t0, g * n_rows
            for _ in range(n_rows // 4):
                dot_four_rows(parts, q, m * head_dim, head_dim, codes, code, n_bytes, block, dots, dot)
                for k in range(4):
                    _finish(dots, dot + k * block, i, n, middle * get(totals, m + k), scale, token, s, row)
                    row += gap_m
                m += 4
            for _ in range(n_rows % 4):
                dot_row(parts, q, m * head_dim, codes, code, n_bytes, block, dots, dot)
                _finish(dots, dot, i, n, middle * get(totals, m), scale, token, s, row)
                row, m = row + gap_m, m + 1


@parallel_jit
def _scores_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _scores_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@fast_jit
def _finish(
    dots: F32, dot: int, first: int, last: int, shift: Scalar, scale: U16, token: int, s: F32, row: int
) -> None:
    """Scores of tokens first..last of a block from the products with their codes."""
    for t in range(first, last):
        put(s, row + t, (get(dots, dot + t) - shift) * as_float(get(scale, token + t)))


@fast_jit
def _values_items(first: int, last: int, args: Args) -> None:
    splits, p, gap_g, gap_m, s0, codes, scale, t0, t1, weights, out = args[:11]
    parts = args[11:]
    n_kv_heads, n_rows, head_dim = out.shape[1:]
    capacity, n_bytes = codes.shape[1:3]
    middle = np.float32(1 << (8 // len(parts) - 1))
    p, out, codes = address(p), address(out), address(codes)
    scale, weights = address(scale), address(weights)
    for item in range(first, last):
        g, split = item // splits, item % splits
        start, end = token_span(t0, t1, splits, split)
        for block in range(start, end, BLOCK):
            n, token = min(BLOCK, end - block), g * capacity + block
            column, code = g * gap_g + s0 + block - t0, token * n_bytes
            target = (split * n_kv_heads + g) * n_rows * head_dim
            for m in range(n_rows):
                w, row = (item * 4 + m % 4) * BLOCK, target + m * head_dim
                total = _weigh(p, column + m * gap_m, n, scale, token, weights, w)
                for d in range(row, row + head_dim):
                    put(out, d, get(out, d) - middle * total)
                if m >= n_rows // 4 * 4:
                    add_row(parts, weights, w, n, head_dim, codes, code, n_bytes, out, row)
                elif m % 4 == 3:
                    w, row = w - 3 * BLOCK, row - 3 * head_dim
                    add_four_rows(parts, weights, w, BLOCK, n, head_dim, codes, code, n_bytes, out, row)


@parallel_jit
def _values_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _values_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@fast_jit
def _weigh(p: F32, column: int, n: int, scale: U16, token: int, weights: F32, w: int) -> Scalar:
    """weights = p * scale, so that codes need no scale; returns their sum."""
    whole = n // LANES * LANES
    totals = simd.splat(ZERO)
    for t in range(0, whole, LANES):
        a = simd.multiply(simd.load(p, column + t), simd.load(scale, token + t))
        simd.store(weights, w + t, a)
        totals = simd.add(totals, a)
    total = simd.total(totals)
    for t in range(whole, n):
        weight = get(p, column + t) * as_float(get(scale, token + t))
        put(weights, w + t, weight)
        total += weight
    return total
