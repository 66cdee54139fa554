"""Values in four bits with a scale and a zero point per token."""

import numpy as np

from edgekv.codecs.ints.cpu import of_levels
from edgekv.kernels.cpu.compile import Scalar, jit
from edgekv.kernels.cpu.loops import chars, floats, halves, numbers, put_loop
from edgekv.kernels.cpu.scalar import as_float, clamp, get, maximum, minimum, put, round_to_even, round_up_to_half
from edgekv.types import F32, U8, U16

ZERO, ONE, HIGHEST_CODE = np.array([0, 1, 15], np.float32)


@put_loop
def _put(store: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    y = numbers(store)
    codes, delta, zeros, head_dim = chars(get(y, 0)), halves(get(y, 1)), chars(get(y, 4)), get(y, 3)
    for i in range(n):
        token = g * get(y, 2) + t0 + i
        _encode_token(floats(x), i * head_dim, head_dim, codes, delta, zeros, token)


KERNELS = {"int4": of_levels("codes", "delta", "zero", put=_put)}


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
