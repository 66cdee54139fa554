"""KIVI's codes: keys per channel over a group of tokens, values per token over a span of channels."""

import numpy as np
from numba import prange

from edgekv.kernels.contract.attention import BLOCK, F32, U8, U16
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.codes import add_four_rows, add_row, dot_four_rows, dot_row, parts_of
from edgekv.kernels.cpu.half import as_float, float_to_half
from edgekv.kernels.cpu.int4 import LARGEST_F16, round_to_even, round_up_to_half
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


def encode_kivi_keys(x: F32, codes: U8, step: U16, low: U16, t0: int) -> None:
    group = codes.shape[3]
    args = np.ascontiguousarray(x), codes, step, low, t0 // group
    run(_encode_groups, _encode_groups_parallel, x.shape[0] * x.shape[1] // group, x.size, args)


def scores_kivi(q: F32, codes: U8, step: U16, low: U16, t0: int, t1: int, s: F32, s0: int) -> None:
    work = q.size * (t1 - t0)
    splits = token_splits(q.shape[0], work)
    n_items = q.shape[0] * splits
    head_dim, (n_bytes, group) = q.shape[2], codes.shape[2:]
    folded = np.empty((n_items, 4 * head_dim), np.float32)
    dots = np.empty((n_items, 4 * group), np.float32)
    parts = parts_of(head_dim, n_bytes)
    args = splits, np.ascontiguousarray(q), codes, step, low, t0, t1, folded, dots, *flat(s), s0, *parts
    run(_scores_items, _scores_parallel, n_items, work, args)


def encode_kivi_values(x: F32, codes: U8, step: U16, low: U16, t0: int) -> None:
    args = np.ascontiguousarray(x), codes, step, low, t0
    run(_encode_tokens, _encode_tokens_parallel, x.shape[0] * x.shape[1], x.size, args)


def values_kivi(p: F32, s0: int, codes: U8, step: U16, low: U16, t0: int, t1: int, out: F32) -> None:
    work = out.size * (t1 - t0)
    splits = token_splits(out.shape[0], work)
    weights = np.empty((out.shape[0] * splits, 4 * step.shape[1] * BLOCK), np.float32)  # of four rows
    partial = partial_sums(out, splits)
    parts = parts_of(out.shape[2], codes.shape[2])
    args = splits, *flat(p), s0, codes, step, low, t0, t1, weights, partial, *parts
    run(_values_items, _values_parallel, out.shape[0] * splits, work, args)
    add_partial_sums(partial, out)


@jit
def _encode_groups(first: int, last: int, args: Args) -> None:
    x, codes, step, low, group0 = args
    _, n_tokens, head_dim = x.shape
    n_groups, n_bytes, group = codes.shape[1:]
    n_bits = 8 * n_bytes // head_dim
    top = np.float32((1 << n_bits) - 1)
    x, codes, step, low = x.reshape(-1), codes.reshape(-1), step.reshape(-1), low.reshape(-1)
    for item in range(first, last):
        source = item * group * head_dim
        place = item // (n_tokens // group) * n_groups + group0 + item % (n_tokens // group)
        for d in range(head_dim):
            _set_range(x, source + d, group, head_dim, top, step, low, place * head_dim + d)
        for j in range(n_bytes):
            for t in range(group):
                byte = 0
                for part in range(8 // n_bits):
                    d = part * n_bytes + j
                    level = _level(get(x, source + t * head_dim + d), top, step, low, place * head_dim + d)
                    byte |= level << part * n_bits
                put(codes, (place * n_bytes + j) * group + t, np.uint8(byte))


@parallel_jit
def _encode_groups_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _encode_groups(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@jit
def _encode_tokens(first: int, last: int, args: Args) -> None:
    x, codes, step, low, t0 = args
    _, n_tokens, head_dim = x.shape
    capacity, n_bytes = codes.shape[1:]
    n_spans, n_bits = step.shape[1], 8 * n_bytes // head_dim
    span, top = head_dim // n_spans, np.float32((1 << n_bits) - 1)
    x, codes, step, low = x.reshape(-1), codes.reshape(-1), step.reshape(-1), low.reshape(-1)
    for item in range(first, last):
        source, g, t = item * head_dim, item // n_tokens, t0 + item % n_tokens
        first_range = g * n_spans * capacity + t
        for i in range(n_spans):
            _set_range(x, source + i * span, span, 1, top, step, low, first_range + i * capacity)
        for j in range(n_bytes):
            byte = 0
            for part in range(8 // n_bits):
                d = part * n_bytes + j
                level = _level(get(x, source + d), top, step, low, first_range + d // span * capacity)
                byte |= level << part * n_bits
            put(codes, (g * capacity + t) * n_bytes + j, np.uint8(byte))


@parallel_jit
def _encode_tokens_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _encode_tokens(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@jit
def _set_range(x: F32, i: int, n: int, gap: int, top: Scalar, step: U16, low: U16, place: int) -> None:
    """Step and low end of the codes of n elements from x[i] on, `gap` apart."""
    lo = hi = get(x, i)
    for k in range(i + gap, i + n * gap, gap):
        lo, hi = minimum(lo, get(x, k)), maximum(hi, get(x, k))
    bits = float_to_half(minimum(maximum(lo, -LARGEST_F16), LARGEST_F16) + ZERO)  # no -0
    put(low, place, bits)
    put(step, place, round_up_to_half(maximum(hi - as_float(bits), ZERO) / top))


@jit
def _level(x: Scalar, top: Scalar, step: U16, low: U16, place: int) -> Scalar:
    size = as_float(get(step, place))
    if size == ZERO:
        size = ONE
    position = round_to_even((x - as_float(get(low, place))) / size)
    return np.int64(minimum(maximum(position, ZERO), top))


@fast_jit
def _scores_items(first: int, last: int, args: Args) -> None:
    splits, q, codes, step, low, t0, t1, folded, dots, s, gap_g, gap_m, s0 = args[:13]
    parts = args[13:]
    n_rows, head_dim = q.shape[1:]
    n_groups, n_bytes, group = codes.shape[1:]
    q, codes, step, low = address(q), address(codes), address(step), address(low)
    folded, dots, s = address(folded), address(dots), address(s)
    for item in range(first, last):
        g, fold, dot = item // splits, item * 4 * head_dim, item * 4 * group
        start, end = token_span(t0, t1, splits, item % splits)
        for b in range(start // group, (end + group - 1) // group):
            i, n = max(start - b * group, 0), min(end - b * group, group)
            place = (g * n_groups + b) * head_dim
            code = (g * n_groups + b) * n_bytes * group
            row, query = g * gap_g + s0 + b * group - t0, g * n_rows * head_dim
            for _ in range(n_rows // 4):
                shift0 = _fold(q, query, step, low, place, head_dim, folded, fold)
                shift1 = _fold(q, query + head_dim, step, low, place, head_dim, folded, fold + head_dim)
                query += 2 * head_dim
                shift2 = _fold(q, query, step, low, place, head_dim, folded, fold + 2 * head_dim)
                shift3 = _fold(q, query + head_dim, step, low, place, head_dim, folded, fold + 3 * head_dim)
                query += 2 * head_dim
                dot_four_rows(parts, folded, fold, head_dim, codes, code, n_bytes, group, dots, dot)
                _finish(dots, dot, i, n, shift0, s, row)
                _finish(dots, dot + group, i, n, shift1, s, row + gap_m)
                _finish(dots, dot + 2 * group, i, n, shift2, s, row + 2 * gap_m)
                _finish(dots, dot + 3 * group, i, n, shift3, s, row + 3 * gap_m)
                row += 4 * gap_m
            for _ in range(n_rows % 4):
                shift0 = _fold(q, query, step, low, place, head_dim, folded, fold)
                dot_row(parts, folded, fold, codes, code, n_bytes, group, dots, dot)
                _finish(dots, dot, i, n, shift0, s, row)
                row, query = row + gap_m, query + head_dim


@parallel_jit
def _scores_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _scores_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@fast_jit
def _fold(x: F32, i: int, step: U16, low: U16, place: int, n: int, folded: F32, fold: int) -> Scalar:
    """folded = x * step for n elements, so that their codes need no scale; returns what the low ends add up to."""
    whole = n // LANES * LANES
    shifts = simd.splat(ZERO)
    for k in range(0, whole, LANES):
        a = simd.load(x, i + k)
        simd.store(folded, fold + k, simd.multiply(a, simd.load(step, place + k)))
        shifts = simd.multiply_add(a, simd.load(low, place + k), shifts)
    shift = simd.total(shifts)
    for k in range(whole, n):
        put(folded, fold + k, get(x, i + k) * as_float(get(step, place + k)))
        shift += get(x, i + k) * as_float(get(low, place + k))
    return shift


@fast_jit
def _finish(dots: F32, dot: int, first: int, last: int, shift: Scalar, s: F32, row: int) -> None:
    for t in range(first, last):
        put(s, row + t, get(dots, dot + t) + shift)


@fast_jit
def _values_items(first: int, last: int, args: Args) -> None:
    splits, p, gap_g, gap_m, s0, codes, step, low, t0, t1, weights, out = args[:12]
    parts = args[12:]
    n_kv_heads, n_rows, head_dim = out.shape[1:]
    capacity, n_bytes = codes.shape[1:]
    n_spans = step.shape[1]
    span, gap_w = head_dim // n_spans, n_spans * BLOCK
    p, out, codes, weights = address(p), address(out), address(codes), address(weights)
    step, low = address(step), address(low)
    for item in range(first, last):
        g, split = item // splits, item % splits
        start, end = token_span(t0, t1, splits, split)
        for block in range(start, end, BLOCK):
            n, code = min(BLOCK, end - block), (g * capacity + block) * n_bytes
            column = g * gap_g + s0 + block - t0
            target = (split * n_kv_heads + g) * n_rows * head_dim
            for m in range(n_rows):
                w, row = (item * 4 + m % 4) * gap_w, target + m * head_dim
                for i in range(n_spans):
                    place = (g * n_spans + i) * capacity + block
                    shift = _fold(p, column + m * gap_m, step, low, place, n, weights, w + i * BLOCK)
                    for d in range(row + i * span, row + (i + 1) * span):
                        put(out, d, get(out, d) + shift)
                if m >= n_rows // 4 * 4:
                    add_row(parts, weights, w, n, span, codes, code, n_bytes, out, row)
                elif m % 4 == 3:
                    w, row = w - 3 * gap_w, row - 3 * head_dim
                    add_four_rows(parts, weights, w, gap_w, n, span, codes, code, n_bytes, out, row)


@parallel_jit
def _values_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _values_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)
