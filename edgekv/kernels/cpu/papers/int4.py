"""Values in four bits with a scale and a zero point per token."""

from typing import Any

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.block_weights import copy_bytes, copy_floats, copy_halves
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import Loops, add_loop, address_of, chars, floats, halves, numbers, put_loop
from edgekv.kernels.cpu.papers.nibbles import HIGH_AT, SIZES_AT, TOGETHER, WEIGHTS_BYTES, add_row, round_weights
from edgekv.kernels.cpu.rounding import round_to_even, round_up_to_half
from edgekv.kernels.cpu.scalar import clamp, get, maximum, minimum, put
from edgekv.types import F32, U8, U16

# In the loop's scratch, behind a row's weights: copies of what is no whole block, and of tokens' codes.
P_AT = WEIGHTS_BYTES
DELTA_AT, ZERO_AT, TAIL_AT = P_AT + 4 * BLOCK, P_AT + 6 * BLOCK, P_AT + 7 * BLOCK
LINE, BLOCKS_AHEAD = 64, 4
ZERO, ONE, HIGHEST_CODE = np.array([0, 1, 15], np.float32)


def encode_int4(x: F32, codes: U8, delta: U16, zero: U8, t0: int) -> None:
    args = np.ascontiguousarray(x), codes, delta, zero, t0
    run(_encode_tokens, x.shape[0] * x.shape[1], x.size, args)


@add_loop
def _add(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    x = numbers(store)
    token, half = g * get(x, 3) + t, get(x, 4)
    codes, delta, zero, weights = get(x, 0) + token * half, get(x, 1) + 2 * token, get(x, 2) + token, scratch
    whole, tail = n // TOGETHER * TOGETHER, scratch + TAIL_AT
    for j in range(0, BLOCK, LINE // 2):
        simd.prefetch(halves(delta), BLOCKS_AHEAD * BLOCK + j)
    simd.prefetch(chars(zero), BLOCKS_AHEAD * BLOCK)
    if n < BLOCK:
        copy_halves(delta, 0, n, scratch + DELTA_AT)
        copy_bytes(zero, 0, n, scratch + ZERO_AT)
        delta, zero = scratch + DELTA_AT, scratch + ZERO_AT
        for i in range((n - whole) * half):
            put(chars(tail), i, get(chars(codes), whole * half + i))
    for m in range(rows):
        row, target = p + 4 * gap * m, out + 8 * half * m
        if n < BLOCK:
            copy_floats(row, 0, n, scratch + P_AT)
            row = scratch + P_AT
        round_weights(row, delta, zero, weights)
        shift = get(floats(weights + SIZES_AT), 1)
        add_row(weights, 0, whole, codes, half, target)
        if whole < n:
            put(floats(weights + SIZES_AT), 1, ZERO)  # the zero points are added
            add_row(weights, whole, TOGETHER, tail, half, target)
        for d in range(half // 16 * 16, half):
            _add_byte(weights, n, shift, codes + d, half, floats(target), d)


@fast_jit
def _add_byte(weights: int, n: int, shift: Scalar, codes: int, half: int, out: F32, d: int) -> None:
    """`add_row` for one byte of each of n tokens."""
    low = high = 0
    packed, bytes_, size = chars(codes), chars(weights), get(floats(weights + SIZES_AT), 0)
    for t in range(n):
        weight = np.int64(get(bytes_, t)) + 256 * np.int64(get(bytes_, HIGH_AT + t))
        byte = np.int64(get(packed, t * half))
        low, high = low + weight * (byte & 15), high + weight * (byte >> 4)
    put(out, d, get(out, d) + size * np.float32(low) + shift)
    put(out, half + d, get(out, half + d) + size * np.float32(high) + shift)


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


def _encode(codec: Any, x: F32, t0: int) -> None:
    encode_int4(x, codec.arrays["codes"], codec.arrays["delta"], codec.arrays["zero"], t0)


def _scratch(codec: Any, rows: int) -> int:
    size: int = TAIL_AT + TOGETHER * codec.head_dim // 2
    return size


LOOPS = {"int4": Loops(_store_numbers, add=_add, put=_put, scratch=_scratch, encode=_encode)}


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


@jit
def _encode_row(x: F32, i: int, step: Scalar, offset: Scalar, codes: U8, code: int, half: int) -> None:
    for d in range(half):
        low = _code(get(x, i + d), step, offset)
        high = _code(get(x, i + half + d), step, offset)
        put(codes, code + d, np.uint8(low | high << 4))


@jit
def _code(x: Scalar, step: Scalar, offset: Scalar) -> Scalar:
    return np.int32(clamp(round_to_even(x / step) + offset, ZERO, HIGHEST_CODE))
