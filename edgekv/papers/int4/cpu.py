"""Values in four bits with a scale and a zero point per token."""

from typing import Any

import numpy as np

from edgekv.kernels.cpu.compile import Scalar, jit
from edgekv.kernels.cpu.loops import address_of, chars, floats, halves, numbers, put_loop
from edgekv.kernels.cpu.scalar import as_float, clamp, get, maximum, minimum, put, round_to_even, round_up_to_half
from edgekv.kernels.cpu.tile import HEADER, TILE, decode_loop, decode_tokens, tiled
from edgekv.types import F32, U8, U16

ZERO, ONE, HIGHEST_CODE = np.array([0, 1, 15], np.float32)


@decode_loop
def _decode(store: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    x = numbers(store)
    token, half = g * get(x, 3) + t, get(x, 4)
    delta, zero = halves(get(x, 1) + 2 * token), chars(get(x, 2) + token)
    low, step = floats(scratch), floats(scratch + 4 * TILE)
    for i in range(n):
        size = as_float(get(delta, i))
        put(step, i, size)
        put(low, i, -size * np.float32(get(zero, i)))
    codes = get(x, 0) + token * half
    decode_tokens(codes, half, 4, n, scratch, scratch + 4 * TILE, tile)


@put_loop
def _put(store: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    y = numbers(store + HEADER)
    head_dim = 2 * get(y, 4)
    for i in range(n):
        token = g * get(y, 3) + t0 + i
        _encode_token(
            floats(x), i * head_dim, head_dim, chars(get(y, 0)), halves(get(y, 1)), chars(get(y, 2)), token
        )


def _store_numbers(codec: Any) -> tuple[int, ...]:
    a = codec.arrays
    return (*(address_of(a[name]) for name in ("codes", "delta", "zero")), codec.capacity, codec.head_dim // 2)


KERNELS = {"int4": tiled(_store_numbers, _decode, lambda codec: 8 * TILE, put=_put)}


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
