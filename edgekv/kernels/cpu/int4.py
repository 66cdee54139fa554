"""Values in four bits with a scale and a zero point per token."""

from typing import Any

import numpy as np
from numba import prange

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.half import as_float, float_to_half
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, jit, parallel_jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import Loops, add_loop, address_of, chars, floats, halves, numbers, put_loop
from edgekv.kernels.cpu.scalar import get, maximum, minimum, put
from edgekv.types import F32, U8, U16

LANES = simd.LANES
TILE = 2 * LANES  # bytes, of two elements each
LINE, BLOCKS_AHEAD = 64, 4
ZERO, ONE, HIGHEST_CODE, LARGEST_F16 = np.array([0, 1, 15, 65504], np.float32)
ROUND = np.float32(1.5 * 2**23)  # x + ROUND - ROUND rounds |x| < 2**22 to an integer, halves to even


def encode_int4(x: F32, codes: U8, delta: U16, zero: U8, t0: int) -> None:
    args = np.ascontiguousarray(x), codes, delta, zero, t0
    run(_encode_tokens, _encode_parallel, x.shape[0] * x.shape[1], x.size, args)


@add_loop
def _add(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    x = numbers(store)
    codes, delta, zero, half = chars(get(x, 0)), halves(get(x, 1)), chars(get(x, 2)), get(x, 4)
    token, weights, target, column = g * get(x, 3) + t, floats(scratch), 0, 0
    for j in range(0, BLOCK, LINE // 2):
        simd.prefetch(delta, token + BLOCKS_AHEAD * BLOCK + j)
    simd.prefetch(zero, token + BLOCKS_AHEAD * BLOCK)
    for _ in range(rows // 2):
        shift0 = _weigh(floats(p), column, n, delta, zero, token, weights, 0)
        shift1 = _weigh(floats(p), column + gap, n, delta, zero, token, weights, BLOCK)
        _add_two_rows(weights, 0, n, shift0, shift1, codes, token * half, half, floats(out), target)
        column, target = column + 2 * gap, target + 4 * half
    if rows % 2:
        shift0 = _weigh(floats(p), column, n, delta, zero, token, weights, 0)
        _add_row(weights, 0, n, shift0, codes, token * half, half, floats(out), target)


@put_loop
def _put(store: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    y = numbers(store)
    head_dim = 2 * get(y, 4)
    for i in range(n):
        token = g * get(y, 3) + t0 + i
        _encode_token(
            floats(x), i * head_dim, head_dim, chars(get(y, 0)), halves(get(y, 1)), chars(get(y, 2)), token
        )


def _store_numbers(codec: Any) -> tuple[int, ...]:
    a = codec.arrays
    return (*(address_of(a[name]) for name in ("codes", "delta", "zero")), codec.capacity, codec.head_dim // 2)


INT4 = Loops(_store_numbers, add=_add, put=_put, scratch=lambda codec, rows: 8 * BLOCK)


@jit
def _encode_tokens(first: int, last: int, args: Args) -> None:
    x, codes, delta, zero, t0 = args
    (_, n_tokens, head_dim), capacity = x.shape, codes.shape[1]
    x, codes, delta, zero = x.reshape(-1), codes.reshape(-1), delta.reshape(-1), zero.reshape(-1)
    for item in range(first, last):
        token = item // n_tokens * capacity + t0 + item % n_tokens
        _encode_token(x, item * head_dim, head_dim, codes, delta, zero, token)


@jit
def _encode_token(x: F32, row: int, head_dim: int, codes: U8, delta: U16, zero: U8, token: int) -> None:
    lo = hi = ZERO
    for d in range(row, row + head_dim):
        lo, hi = minimum(lo, get(x, d)), maximum(hi, get(x, d))
    bits = round_up_to_half((hi - lo) / HIGHEST_CODE)
    step = as_float(bits)
    if step == ZERO:  # only if all elements are zero: they get code 0
        step = ONE
    offset = round_to_even(-lo / step)
    put(delta, token, bits)
    put(zero, token, np.uint8(offset))
    _encode_row(x, row, step, offset, codes, token * (head_dim // 2), head_dim // 2)


@parallel_jit
def _encode_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _encode_tokens(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@jit
def _encode_row(x: F32, i: int, step: Scalar, offset: Scalar, codes: U8, code: int, half: int) -> None:
    for d in range(half):
        low = _code(get(x, i + d), step, offset)
        high = _code(get(x, i + half + d), step, offset)
        put(codes, code + d, np.uint8(low | high << 4))


@jit
def _code(x: Scalar, step: Scalar, offset: Scalar) -> Scalar:
    return np.int32(minimum(maximum(round_to_even(x / step) + offset, ZERO), HIGHEST_CODE))


@jit
def round_to_even(x: Scalar) -> Scalar:
    return x + ROUND - ROUND


@jit
def round_up_to_half(x: Scalar) -> Scalar:
    """Bits of the smallest float16 not below x >= 0, or of the largest float16."""
    x = minimum(x, LARGEST_F16)
    bits = float_to_half(x)
    return np.uint16(bits + 1) if as_float(bits) < x else bits


@fast_jit
def _weigh(p: F32, column: int, n: int, delta: U16, zero: U8, token: int, weights: F32, w: int) -> Scalar:
    """weights = p * delta, so that codes need no scale; returns what the zero points add up to."""
    shift = ZERO
    for t in range(n):
        weight = get(p, column + t) * as_float(get(delta, token + t))
        put(weights, w + t, weight)
        shift -= weight * np.float32(get(zero, token + t))
    return shift


@fast_jit
def _add_row(
    weights: F32, w: int, n: int, shift: Scalar, codes: U8, code: int, half: int, out: F32, target: int
) -> None:
    """out[target:][:head_dim] += shift + sum over n tokens of weights[w + t] * their codes."""
    whole = half // TILE * TILE
    start = simd.splat(shift)
    for d in range(0, whole, TILE):
        i, j, k = target + d, target + half + d, code + d
        low0, low1 = simd.add(simd.load(out, i), start), simd.add(simd.load(out, i + LANES), start)
        high0, high1 = simd.add(simd.load(out, j), start), simd.add(simd.load(out, j + LANES), start)
        for t in range(n):
            simd.prefetch(codes, k + BLOCK * half)
            x = simd.broadcast(weights, w + t)
            low0 = simd.multiply_add(x, simd.load_low_nibbles(codes, k), low0)
            low1 = simd.multiply_add(x, simd.load_low_nibbles(codes, k + LANES), low1)
            high0 = simd.multiply_add(x, simd.load_high_nibbles(codes, k), high0)
            high1 = simd.multiply_add(x, simd.load_high_nibbles(codes, k + LANES), high1)
            k += half
        simd.store(out, i, low0)
        simd.store(out, i + LANES, low1)
        simd.store(out, j, high0)
        simd.store(out, j + LANES, high1)
    _add_rest(weights, w, n, shift, codes, code, half, whole, out, target)


@fast_jit
def _add_two_rows(
    weights: F32,
    w: int,
    n: int,
    shift0: Scalar,
    shift1: Scalar,
    codes: U8,
    code: int,
    half: int,
    out: F32,
    target: int,
) -> None:
    """`_add_row` for two neighbouring rows: each code is unpacked once."""
    whole = half // TILE * TILE
    a_start, b_start = simd.splat(shift0), simd.splat(shift1)
    for d in range(0, whole, TILE):
        i0, j0, k = target + d, target + half + d, code + d
        i1, j1 = i0 + 2 * half, j0 + 2 * half
        a0, a1 = simd.add(simd.load(out, i0), a_start), simd.add(simd.load(out, i0 + LANES), a_start)
        a2, a3 = simd.add(simd.load(out, j0), a_start), simd.add(simd.load(out, j0 + LANES), a_start)
        b0, b1 = simd.add(simd.load(out, i1), b_start), simd.add(simd.load(out, i1 + LANES), b_start)
        b2, b3 = simd.add(simd.load(out, j1), b_start), simd.add(simd.load(out, j1 + LANES), b_start)
        for t in range(n):
            simd.prefetch(codes, k + BLOCK * half)
            a, b = simd.broadcast(weights, w + t), simd.broadcast(weights, w + BLOCK + t)
            x = simd.load_low_nibbles(codes, k)
            a0, b0 = simd.multiply_add(a, x, a0), simd.multiply_add(b, x, b0)
            x = simd.load_low_nibbles(codes, k + LANES)
            a1, b1 = simd.multiply_add(a, x, a1), simd.multiply_add(b, x, b1)
            x = simd.load_high_nibbles(codes, k)
            a2, b2 = simd.multiply_add(a, x, a2), simd.multiply_add(b, x, b2)
            x = simd.load_high_nibbles(codes, k + LANES)
            a3, b3 = simd.multiply_add(a, x, a3), simd.multiply_add(b, x, b3)
            k += half
        simd.store(out, i0, a0)
        simd.store(out, i0 + LANES, a1)
        simd.store(out, j0, a2)
        simd.store(out, j0 + LANES, a3)
        simd.store(out, i1, b0)
        simd.store(out, i1 + LANES, b1)
        simd.store(out, j1, b2)
        simd.store(out, j1 + LANES, b3)
    _add_rest(weights, w, n, shift0, codes, code, half, whole, out, target)
    _add_rest(weights, w + BLOCK, n, shift1, codes, code, half, whole, out, target + 2 * half)


@fast_jit
def _add_rest(
    weights: F32,
    w: int,
    n: int,
    shift: Scalar,
    codes: U8,
    code: int,
    half: int,
    done: int,
    out: F32,
    target: int,
) -> None:
    """The elements of a row's bytes from the `done`th on, which do not fill a tile."""
    whole = half // LANES * LANES
    start = simd.splat(shift)
    for d in range(done, whole, LANES):
        low = simd.add(simd.load(out, target + d), start)
        high = simd.add(simd.load(out, target + half + d), start)
        for t in range(n):
            x, k = simd.broadcast(weights, w + t), code + t * half + d
            low = simd.multiply_add(x, simd.load_low_nibbles(codes, k), low)
            high = simd.multiply_add(x, simd.load_high_nibbles(codes, k), high)
        simd.store(out, target + d, low)
        simd.store(out, target + half + d, high)
    for d in range(whole, half):
        first, second = get(out, target + d) + shift, get(out, target + half + d) + shift
        for t in range(n):
            byte, weight = get(codes, code + t * half + d), get(weights, w + t)
            first += weight * np.float32(byte & 15)
            second += weight * np.float32(byte >> 4)
        put(out, target + d, first)
        put(out, target + half + d, second)
