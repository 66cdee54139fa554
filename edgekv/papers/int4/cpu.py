"""4-bit codes with a scale per token on the CPU: TILE tokens at a time are unpacked to signed bytes."""

from typing import Any

import numpy as np
from numba import types

from edgekv.codecs.ints.cpu import add_levels, level_of, put_scale, score_levels
from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import Scalar, fast_jit, intrinsic, jit
from edgekv.kernels.cpu.loops import (
    TOKENS_PER_CALL,
    CpuCodec,
    Loop,
    add_loop,
    address_of,
    chars,
    floats,
    halves,
    int64s,
    put_loop,
    score_loop,
)
from edgekv.kernels.cpu.scalar import as_float, clamp, get, maximum, minimum, put, round_to_even, round_up_to_half
from edgekv.types import F32, U8, U16

ZERO, ONE, MAX_CODE, INT4_MAX, MIDDLE = np.array([0, 1, 15, 7, 8], np.float32)
EIGHT = np.uint8(8)
TILE = 32  # tokens that are unpacked together: 4 KiB at 128 channels


@score_loop
def _score(args: int, q: int, rows: int, g: int, t: int, n: int, s: int, stride: int, scratch: int) -> None:
    _, scale, capacity, head_dim, _ = _fields(args)
    for i in range(0, n, TILE):
        n_tokens, token = min(TILE, n - i), g * capacity + t + i
        _unpack(args, token, n_tokens, scratch)
        score_levels(q, rows, scratch, halves(scale + 2 * token), head_dim, n_tokens, s + 4 * i, stride)


@add_loop
def _add(args: int, p: int, stride: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    _, scale, capacity, head_dim, _ = _fields(args)
    for i in range(0, n, TILE):
        n_tokens, token = min(TILE, n - i), g * capacity + t + i
        _unpack(args, token, n_tokens, scratch)
        values, weights = scratch, scratch + TILE * head_dim
        add_levels(p + 4 * i, stride, rows, values, halves(scale + 2 * token), head_dim, n_tokens, out, weights)


@fast_jit
def _unpack(args: int, token: int, n: int, levels: int) -> None:
    """Sets levels (n, head_dim) int8 = the codes of n tokens minus their zero point: 8, or each token's own."""
    codes, _, _, head_dim, zeros = _fields(args)
    half = head_dim // 2
    for i in range(n):
        zero = get(chars(zeros), token + i) if zeros else EIGHT
        _unpack_token(codes + (token + i) * half, half, zero, levels + i * head_dim)


@intrinsic
def _unpack_token(context: Any, codes: Any, n: Any, zero: Any, levels: Any) -> Any:
    """Sets levels (2 * n,) = the lower, then the upper four bits of n bytes, minus zero."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        codes, n, zero, levels = args
        done = emit.I64(0)
        for width in (4 * emit.REGISTER, 1):
            kind = emit.vector(emit.I8, width) if width > 1 else emit.I8
            offset = emit.splat(b, zero, width) if width > 1 else zero
            with emit.loop(b, done, n, width) as loop:
                x, to = emit.load(b, kind, b.add(codes, loop.i)), b.add(levels, loop.i)
                emit.store(b, b.sub(b.and_(x, emit.constant(kind, 15)), offset), to)
                emit.store(b, b.sub(b.lshr(x, emit.constant(kind, 4)), offset), b.add(to, n))
            done = loop.i
        return context.get_dummy_value()

    return types.none(types.intp, types.intp, types.uint8, types.intp), build


@put_loop
def _put_symmetric(args: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    codes, scale, capacity, head_dim, _ = _fields(args)
    source, to, half = floats(x), chars(codes), head_dim // 2
    for i in range(n):
        token, row = g * capacity + t0 + i, i * head_dim
        step = put_scale(x + 4 * row, head_dim, INT4_MAX, scale + 2 * token)
        for d in range(half):
            low = np.int32(level_of(get(source, row + d), step, INT4_MAX) + MIDDLE)
            high = np.int32(level_of(get(source, row + half + d), step, INT4_MAX) + MIDDLE)
            put(to, token * half + d, np.uint8(low | high << 4))


@put_loop
def _put(args: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    codes, delta, capacity, head_dim, zeros = _fields(args)
    for i in range(n):
        token = g * capacity + t0 + i
        _encode_token(floats(x), i * head_dim, head_dim, chars(codes), halves(delta), chars(zeros), token)


@jit
def _encode_token(x: F32, row: int, head_dim: int, codes: U8, delta: U16, zero: U8, token: int) -> None:
    lo = hi = ZERO
    for d in range(row, row + head_dim):
        lo, hi = minimum(lo, get(x, d)), maximum(hi, get(x, d))
    bits = round_up_to_half((hi - lo) / MAX_CODE)
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
    return np.int32(clamp(round_to_even(x / step) + offset, ZERO, MAX_CODE))


@fast_jit
def _fields(args: int) -> tuple[int, int, int, int, int]:
    x = int64s(args)
    return get(x, 0), get(x, 1), get(x, 2), get(x, 3), get(x, 4)


def _kernels(codes: str, scale: str, zeros: str | None, put: Loop) -> CpuCodec:
    """Returns the kernels of a codec; codes, scale, zeros: names of its arrays (n_kv_heads, tokens, ...)."""

    def codec_args(codec: Any) -> tuple[int, ...]:
        zero_at = address_of(codec.arrays[zeros]) if zeros else 0
        addresses = address_of(codec.arrays[codes]), address_of(codec.arrays[scale])
        return *addresses, codec.capacity, codec.head_dim, zero_at

    return CpuCodec(codec_args, _score, _add, put=put, at_once=TOKENS_PER_CALL, scratch=_tile_bytes)


def _tile_bytes(codec: Any, rows: int) -> int:
    return TILE * int(codec.head_dim) + 4 * rows * TILE


KERNELS = {
    "int4": _kernels("codes", "delta", "zero", _put),
    "symmetric4": _kernels("codes", "scale", None, _put_symmetric),
}
