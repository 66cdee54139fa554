"""Loops over 8-bit integers with a scale per token, on a CPU."""

import numpy as np

from edgekv.kernels.cpu.compile import Scalar, fast_jit, jit
from edgekv.kernels.cpu.loops import (
    TOKENS_PER_CALL,
    CpuCodec,
    add_loop,
    address_of,
    floats,
    halves,
    int64s,
    put_loop,
    score_loop,
    signed_chars,
)
from edgekv.kernels.cpu.rows import add_rows, score_rows
from edgekv.kernels.cpu.scalar import as_float, clamp, get, maximum, put, round_to_even, round_up_to_half
from edgekv.types import U16

ZERO, ONE, INT8_MAX = np.array([0, 1, 127], np.float32)
_score_bytes, _add_bytes = score_rows(1), add_rows(1)


@fast_jit
def score_levels(q: int, rows: int, levels: int, scale: U16, head_dim: int, n: int, s: int, stride: int) -> None:
    """s (rows, n) = scores with n tokens in signed bytes, whose scales are float16."""
    _score_bytes(q, rows, levels, head_dim, n, s, stride)
    for m in range(rows):
        for i in range(m * stride, m * stride + n):
            put(floats(s), i, get(floats(s), i) * as_float(get(scale, i - m * stride)))


@fast_jit
def add_levels(
    p: int, stride: int, rows: int, levels: int, scale: U16, head_dim: int, n: int, out: int, weights: int
) -> None:
    """out (rows, head_dim) += p times n tokens in signed bytes; weights: room for (rows, n)."""
    for m in range(rows):
        for i in range(n):
            put(floats(weights), m * n + i, get(floats(p), m * stride + i) * as_float(get(scale, i)))
    _add_bytes(weights, n, rows, levels, head_dim, n, out)


@score_loop
def _score(args: int, q: int, rows: int, g: int, t: int, n: int, s: int, stride: int, scratch: int) -> None:
    codes, scale, capacity, head_dim = _fields(args)
    token = g * capacity + t
    score_levels(q, rows, codes + token * head_dim, halves(scale + 2 * token), head_dim, n, s, stride)


@add_loop
def _add(args: int, p: int, stride: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    codes, scale, capacity, head_dim = _fields(args)
    token = g * capacity + t
    values, scales = codes + token * head_dim, halves(scale + 2 * token)
    add_levels(p, stride, rows, values, scales, head_dim, n, out, scratch)


@put_loop
def _put(args: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    codes, scale, capacity, head_dim = _fields(args)
    source, to = floats(x), signed_chars(codes)
    for i in range(n):
        token = g * capacity + t0 + i
        step = put_scale(x + 4 * i * head_dim, head_dim, INT8_MAX, scale + 2 * token)
        for d in range(head_dim):
            level = level_of(get(source, i * head_dim + d), step, INT8_MAX)
            put(to, token * head_dim + d, np.int8(np.int32(level)))


@jit
def put_scale(x: int, n: int, top: Scalar, address: int) -> Scalar:
    """Stores and returns the step of n elements: not 0, also where all of them are (nearly) zero."""
    largest = ZERO
    for d in range(n):
        largest = maximum(largest, abs(get(floats(x), d)))
    bits = round_up_to_half(largest / top)
    put(halves(address), 0, bits)
    step = as_float(bits)
    return step if step != ZERO else ONE


@jit
def level_of(x: Scalar, step: Scalar, top: Scalar) -> Scalar:
    return clamp(round_to_even(x / step), -top, top)


@fast_jit
def _fields(args: int) -> tuple[int, int, int, int]:
    x = int64s(args)
    return get(x, 0), get(x, 1), get(x, 2), get(x, 3)


KERNELS = {
    "int8": CpuCodec(
        lambda codec: (*map(address_of, codec.arrays.values()), codec.capacity, codec.head_dim),
        _score,
        _add,
        put=_put,
        at_once=TOKENS_PER_CALL,
        scratch=lambda codec, rows: 4 * rows * TOKENS_PER_CALL,
    )
}
