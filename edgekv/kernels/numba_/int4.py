"""Values in four bits with a scale and a zero point per token."""

import numpy as np
from numba import prange

from edgekv.kernels.numba_ import simd
from edgekv.kernels.numba_.half import as_float, float_to_half
from edgekv.kernels.numba_.jit import Scalar, fast_jit, jit, parallel_jit
from edgekv.kernels.numba_.launch import flat, run, token_span, token_splits
from edgekv.kernels.numba_.scalar import maximum, minimum
from edgekv.kernels.spec import BLOCK, F32, U8, U16

LANES = simd.LANES
TILE = 2 * LANES  # bytes, of two elements each
ZERO, ONE, HIGHEST_CODE, LARGEST_F16 = np.array([0, 1, 15, 65504], np.float32)
ROUND = np.float32(1.5 * 2**23)  # x + ROUND - ROUND rounds |x| < 2**22 to an integer, halves to even


def encode_int4(x: F32, codes: U8, delta: U16, zero: U8, t0: int) -> None:
    n_rows = x.shape[0] * x.shape[1]
    args = np.ascontiguousarray(x), codes, delta, zero, t0
    run(_encode_items, _encode_parallel, n_rows, x.size, *args)


def values_int4(p: F32, s0: int, codes: U8, delta: U16, zero: U8, t0: int, t1: int, out: F32) -> None:
    work = out.size * (t1 - t0)
    splits = token_splits(out.shape[0], work)
    partial = out[None] if splits == 1 else np.zeros((splits, *out.shape), np.float32)
    weights = np.empty((out.shape[0] * splits, BLOCK), np.float32)
    args = splits, *flat(p), s0, codes, delta, zero, t0, t1, weights, partial
    run(_values_items, _values_parallel, out.shape[0] * splits, work, *args)
    if splits > 1:
        out += partial.sum(axis=0)


@jit
def _encode_items(first: int, last: int, x: F32, codes: U8, delta: U16, zero: U8, t0: int) -> None:
    n_tokens = x.shape[1]
    for item in range(first, last):
        g, t = item // n_tokens, t0 + item % n_tokens
        row = x[g, item % n_tokens]
        lo = hi = ZERO
        for d in range(len(row)):
            lo, hi = minimum(lo, row[d]), maximum(hi, row[d])
        delta[g, t] = _round_up_to_half((hi - lo) / HIGHEST_CODE)
        step = as_float(delta[g, t])
        if step == ZERO:  # only if all elements are (nearly) zero: they round to code 0
            step = ONE
        offset = _round(-lo / step)
        zero[g, t] = np.uint8(offset)
        _encode_row(row, step, offset, codes[g, t])


@jit
def _encode_row(row: F32, step: Scalar, offset: Scalar, codes: U8) -> None:
    half = len(codes)
    for d in range(half):
        low = _code(row[d], step, offset)
        high = _code(row[d + half], step, offset)
        codes[d] = low | high << np.int32(4)


@jit
def _code(x: Scalar, step: Scalar, offset: Scalar) -> Scalar:
    return np.int32(minimum(maximum(_round(x / step) + offset, ZERO), HIGHEST_CODE))


@jit
def _round(x: Scalar) -> Scalar:
    return x + ROUND - ROUND


@jit
def _round_up_to_half(x: Scalar) -> Scalar:
    """Bits of the smallest float16 not below x >= 0, or of the largest float16."""
    x = minimum(x, LARGEST_F16)
    bits = float_to_half(x)
    return np.uint16(bits + 1) if as_float(bits) < x else bits


@parallel_jit
def _encode_parallel(n_parts: int, n_items: int, x: F32, codes: U8, delta: U16, zero: U8, t0: int) -> None:
    for part in prange(n_parts):
        first, last = n_items * part // n_parts, n_items * (part + 1) // n_parts
        _encode_items(first, last, x, codes, delta, zero, t0)


@fast_jit
def _values_items(
    first: int,
    last: int,
    splits: int,
    p: F32,
    gap_g: int,
    gap_m: int,
    s0: int,
    codes: U8,
    delta: U16,
    zero: U8,
    t0: int,
    t1: int,
    weights: F32,
    out: F32,
) -> None:
    n_kv_heads, n_rows, head_dim = out.shape[1:]
    capacity, half = codes.shape[1:]
    out, codes = out.reshape(-1), codes.reshape(-1)
    for item in range(first, last):
        g, split = item // splits, item % splits
        start, end = token_span(t0, t1, splits, split)
        for block in range(start, end, BLOCK):
            n = min(BLOCK, end - block)
            w = weights[item, :n]
            for m in range(n_rows):
                column = g * gap_g + m * gap_m + s0 + block - t0
                tokens = slice(block, block + n)
                shift = _weigh(p[column : column + n], delta[g, tokens], zero[g, tokens], w)
                target = ((split * n_kv_heads + g) * n_rows + m) * head_dim
                _add_block(w, shift, codes, (g * capacity + block) * half, half, out, target)


@fast_jit
def _weigh(p: F32, delta: U16, zero: U8, w: F32) -> Scalar:
    """w = p * delta, so that codes need no scale; returns what their zero points add up to."""
    shift = ZERO
    for t in range(len(w)):
        w[t] = p[t] * as_float(delta[t])
        shift -= w[t] * np.float32(zero[t])
    return shift


@fast_jit
def _add_block(w: F32, shift: Scalar, codes: U8, code: int, half: int, out: F32, target: int) -> None:
    """out[target:][: 2 * half] += shift + sum of w[t] * codes[code + t * half:][:half], unpacked."""
    whole = half // TILE * TILE
    start = simd.splat(shift)
    for d in range(0, whole, TILE):
        i, j = target + d, code + d
        low0, low1 = simd.add(simd.load(out, i), start), simd.add(simd.load(out, i + LANES), start)
        i += half
        high0, high1 = simd.add(simd.load(out, i), start), simd.add(simd.load(out, i + LANES), start)
        for t in range(len(w)):
            simd.prefetch(codes, j + BLOCK * half)
            x = simd.splat(w[t])
            low0 = simd.multiply_add(x, simd.load_low_nibbles(codes, j), low0)
            high0 = simd.multiply_add(x, simd.load_high_nibbles(codes, j), high0)
            low1 = simd.multiply_add(x, simd.load_low_nibbles(codes, j + LANES), low1)
            high1 = simd.multiply_add(x, simd.load_high_nibbles(codes, j + LANES), high1)
            j += half
        simd.store(out, i, high0)
        simd.store(out, i + LANES, high1)
        i -= half
        simd.store(out, i, low0)
        simd.store(out, i + LANES, low1)
    for d in range(whole, half):
        low = high = shift
        for t in range(len(w)):
            byte = codes[code + t * half + d]
            low += w[t] * np.float32(byte & 15)
            high += w[t] * np.float32(byte >> 4)
        out[target + d] += low
        out[target + half + d] += high


@parallel_jit
def _values_parallel(
    n_parts: int,
    n_items: int,
    splits: int,
    p: F32,
    gap_g: int,
    gap_m: int,
    s0: int,
    codes: U8,
    delta: U16,
    zero: U8,
    t0: int,
    t1: int,
    weights: F32,
    out: F32,
) -> None:
    for part in prange(n_parts):
        first, last = n_items * part // n_parts, n_items * (part + 1) // n_parts
        _values_items(first, last, splits, p, gap_g, gap_m, s0, codes, delta, zero, t0, t1, weights, out)
