"""Integers with a scale per token: rows of signed bytes; four bits are unpacked to these, tokens at a time."""

from typing import Any

import numpy as np
from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import Scalar, fast_jit, intrinsic, jit
from edgekv.kernels.cpu.loops import (
    AT_ONCE,
    CodecKernels,
    Loop,
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
from edgekv.types import U16

ZERO, ONE, TOP_4, TOP_8, MIDDLE_4 = np.array([0, 1, 7, 127, 8], np.float32)
MIDDLE = np.uint8(8)
TILE = 32  # tokens of four bits that are unpacked together: 4 KiB at 128 channels
_score_bytes, _add_bytes = score_rows(1), add_rows(1)


@fast_jit
def _score_levels(q: int, rows: int, levels: int, scale: U16, head_dim: int, n: int, s: int, gap: int) -> None:
    """s (rows, n) = scores with n tokens in signed bytes, whose scales are float16."""
    _score_bytes(q, rows, levels, head_dim, n, s, gap)
    if head_dim % WIDTH:
        score_rest(floats(q), rows, signed_chars(levels), head_dim, n, floats(s), gap)
    for m in range(rows):
        for i in range(m * gap, m * gap + n):
            put(floats(s), i, get(floats(s), i) * as_float(get(scale, i - m * gap)))


@fast_jit
def _add_levels(
    p: int, gap: int, rows: int, levels: int, scale: U16, head_dim: int, n: int, out: int, weights: int
) -> None:
    """out (rows, head_dim) += p times n tokens in signed bytes; weights: room for (rows, n)."""
    for m in range(rows):
        for i in range(n):
            put(floats(weights), m * n + i, get(floats(p), m * gap + i) * as_float(get(scale, i)))
    _add_bytes(weights, n, rows, levels, head_dim, n, out)
    if head_dim % WIDTH:
        add_rest(floats(weights), n, rows, signed_chars(levels), head_dim, n, floats(out))


@score_loop
def _score(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    codes, scale, capacity, head_dim, _ = _numbers(store)
    token = g * capacity + t
    _score_levels(q, rows, codes + token * head_dim, halves(scale + 2 * token), head_dim, n, s, gap)


@add_loop
def _add(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    codes, scale, capacity, head_dim, _ = _numbers(store)
    token = g * capacity + t
    values, scales = codes + token * head_dim, halves(scale + 2 * token)
    _add_levels(p, gap, rows, values, scales, head_dim, n, out, scratch)


@score_loop
def _score_nibbles(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    _, scale, capacity, head_dim, _ = _numbers(store)
    for i in range(0, n, TILE):
        few, token = min(TILE, n - i), g * capacity + t + i
        _unpack(store, token, few, scratch)
        _score_levels(q, rows, scratch, halves(scale + 2 * token), head_dim, few, s + 4 * i, gap)


@add_loop
def _add_nibbles(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    _, scale, capacity, head_dim, _ = _numbers(store)
    for i in range(0, n, TILE):
        few, token = min(TILE, n - i), g * capacity + t + i
        _unpack(store, token, few, scratch)
        values, weights = scratch, scratch + TILE * head_dim
        _add_levels(p + 4 * i, gap, rows, values, halves(scale + 2 * token), head_dim, few, out, weights)


@fast_jit
def _unpack(store: int, token: int, n: int, levels: int) -> None:
    """levels (n, head_dim) int8 = the codes of n tokens, less their zero point: 8, or each token's own."""
    codes, _, _, head_dim, zeros = _numbers(store)
    half = head_dim // 2
    for i in range(n):
        zero = get(chars(zeros), token + i) if zeros else MIDDLE
        _unpack_token(codes + (token + i) * half, half, zero, levels + i * head_dim)


@intrinsic
def _unpack_token(context: Any, codes: Any, n: Any, zero: Any, levels: Any) -> Any:
    """levels (2 * n,) = the lower, then the upper four bits of n bytes, less zero."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        codes, n, zero, levels = args
        done = emit.I64(0)
        for width in (4 * WIDTH, 1):
            kind = emit.vector(emit.I8, width) if width > 1 else emit.I8
            less = emit.splat(b, zero, width) if width > 1 else zero
            with emit.loop(b, done, n, width) as turn:
                x, to = emit.load(b, kind, b.add(codes, turn.i)), b.add(levels, turn.i)
                emit.store(b, b.sub(b.and_(x, emit.constant(kind, 15)), less), to)
                emit.store(b, b.sub(b.lshr(x, emit.constant(kind, 4)), less), b.add(to, n))
            done = turn.i
        return context.get_dummy_value()

    return types.none(types.intp, types.intp, types.uint8, types.intp), build


@put_loop
def _put(store: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    codes, scale, capacity, head_dim, _ = _numbers(store)
    source, to = floats(x), signed_chars(codes)
    for i in range(n):
        token = g * capacity + t0 + i
        step = _put_scale(x + 4 * i * head_dim, head_dim, TOP_8, scale + 2 * token)
        for d in range(head_dim):
            level = _level(get(source, i * head_dim + d), step, TOP_8)
            put(to, token * head_dim + d, np.int8(np.int32(level)))


@put_loop
def _put_nibbles(store: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    codes, scale, capacity, head_dim, _ = _numbers(store)
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


@fast_jit
def _numbers(store: int) -> tuple[int, int, int, int, int]:
    x = numbers(store)
    return get(x, 0), get(x, 1), get(x, 2), get(x, 3), get(x, 4)


def of_levels(codes: str, scale: str, zeros: str | None = None, *, put: Loop) -> CodecKernels:
    """Of bytes, or of four bits, two to a byte: the names of their arrays (G, tokens, ...)."""

    def store(codec: Any) -> tuple[int, ...]:
        zero_at = address_of(codec.arrays[zeros]) if zeros else 0
        addresses = address_of(codec.arrays[codes]), address_of(codec.arrays[scale])
        return *addresses, codec.capacity, codec.head_dim, zero_at

    if put is _put:
        return CodecKernels(store, _score, _add, put=put, at_once=AT_ONCE, scratch=_weight_bytes)
    return CodecKernels(store, _score_nibbles, _add_nibbles, put=put, at_once=AT_ONCE, scratch=_tile_bytes)


def _weight_bytes(codec: Any, rows: int) -> int:
    return 4 * rows * AT_ONCE


def _tile_bytes(codec: Any, rows: int) -> int:
    return TILE * int(codec.head_dim) + 4 * rows * TILE


KERNELS = {
    "int8": of_levels("codes", "scale", put=_put),
    "symmetric4": of_levels("codes", "scale", put=_put_nibbles),
}
