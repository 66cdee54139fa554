"""Symmetric integers with a scale per token: rows of signed bytes, and tiles of four bits."""

from typing import Any

import numpy as np

from edgekv.kernels.cpu.compile import Scalar, fast_jit, jit
from edgekv.kernels.cpu.loops import (
    AT_ONCE,
    CodecKernels,
    add_loop,
    address_of,
    chars,
    floats,
    halves,
    numbers,
    put_loop,
    score_loop,
    signed_chars,
)
from edgekv.kernels.cpu.rows import WIDTH, add_rest, add_rows, score_rest, score_rows
from edgekv.kernels.cpu.scalar import as_float, clamp, get, maximum, put, round_to_even, round_up_to_half
from edgekv.kernels.cpu.tile import HEADER, TILE, decode_loop, decode_tokens, tiled

ZERO, ONE, TOP_4, TOP_8, MIDDLE_4 = np.array([0, 1, 7, 127, 8], np.float32)
_score_bytes, _add_bytes = score_rows(1), add_rows(1)


@score_loop
def _score(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    codes, scale_at, capacity, head_dim = _numbers(store)
    token, to = g * capacity + t, floats(s)
    keys, scale = codes + token * head_dim, halves(scale_at + 2 * token)
    _score_bytes(q, rows, keys, head_dim, n, s, gap)
    if head_dim % WIDTH:
        score_rest(floats(q), rows, signed_chars(keys), head_dim, n, to, gap)
    for m in range(rows):
        for i in range(n):
            put(to, m * gap + i, get(to, m * gap + i) * as_float(get(scale, i)))


@add_loop
def _add(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    codes, scale_at, capacity, head_dim = _numbers(store)
    token, weights, chances = g * capacity + t, floats(scratch), floats(p)
    values, scale = codes + token * head_dim, halves(scale_at + 2 * token)
    for m in range(rows):
        for i in range(n):
            put(weights, m * n + i, get(chances, m * gap + i) * as_float(get(scale, i)))
    _add_bytes(scratch, n, rows, values, head_dim, n, out)
    if head_dim % WIDTH:
        add_rest(weights, n, rows, signed_chars(values), head_dim, n, floats(out))


@put_loop
def _put(store: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    codes, scale, capacity, head_dim = _numbers(store)
    source, to = floats(x), signed_chars(codes)
    for i in range(n):
        token = g * capacity + t0 + i
        step = _put_scale(x + 4 * i * head_dim, head_dim, TOP_8, scale + 2 * token)
        for d in range(head_dim):
            level = _level(get(source, i * head_dim + d), step, TOP_8)
            put(to, token * head_dim + d, np.int8(np.int32(level)))


@put_loop
def _put_nibbles(store: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    codes, scale, capacity, head_dim = _numbers(store + HEADER)
    source, to, half = floats(x), chars(codes), head_dim // 2
    for i in range(n):
        token, row = g * capacity + t0 + i, i * head_dim
        step = _put_scale(x + 4 * row, head_dim, TOP_4, scale + 2 * token)
        for d in range(half):
            low = np.int32(_level(get(source, row + d), step, TOP_4) + MIDDLE_4)
            high = np.int32(_level(get(source, row + half + d), step, TOP_4) + MIDDLE_4)
            put(to, token * half + d, np.uint8(low | high << 4))


@jit
def _put_scale(x: int, n: int, top: Scalar, place: int) -> Scalar:
    """Stores and returns the step of n elements: not 0, also where all of them are (nearly) zero."""
    largest = ZERO
    for d in range(n):
        largest = maximum(largest, abs(get(floats(x), d)))
    bits = round_up_to_half(largest / top)
    put(halves(place), 0, bits)
    step = as_float(bits)
    return step if step != ZERO else ONE


@jit
def _level(x: Scalar, step: Scalar, top: Scalar) -> Scalar:
    return clamp(round_to_even(x / step), -top, top)


@decode_loop
def _decode_nibbles(store: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    codes, scale_at, capacity, head_dim = _numbers(store)
    token = g * capacity + t
    scale, low, step = halves(scale_at + 2 * token), floats(scratch), floats(scratch + 4 * TILE)
    for i in range(n):
        size = as_float(get(scale, i))
        put(step, i, size)
        put(low, i, -MIDDLE_4 * size)
    decode_tokens(codes + token * (head_dim // 2), head_dim // 2, 4, n, scratch, scratch + 4 * TILE, tile)


@fast_jit
def _numbers(store: int) -> tuple[int, int, int, int]:
    x = numbers(store)
    return get(x, 0), get(x, 1), get(x, 2), get(x, 3)


def _store(codec: Any) -> tuple[int, ...]:
    return address_of(codec.arrays["codes"]), address_of(codec.arrays["scale"]), codec.capacity, codec.head_dim


KERNELS = {
    "int8": CodecKernels(
        _store, _score, _add, put=_put, at_once=AT_ONCE, scratch=lambda codec, rows: 4 * rows * AT_ONCE
    ),
    "symmetric4": tiled(_store, _decode_nibbles, lambda codec: 8 * TILE, put=_put_nibbles),
}
