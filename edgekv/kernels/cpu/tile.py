"""Codecs that only say what their tokens decode to: a tile of them is decoded, then read by the loops of float32.

A tile stays in the first-level cache while all query rows of the group read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import fast_jit, intrinsic
from edgekv.kernels.cpu.loops import (
    AT_ONCE,
    CodecKernels,
    Loop,
    add_loop,
    call,
    floats,
    halves,
    numbers,
    score_loop,
)
from edgekv.kernels.cpu.rows import WIDTH, add_rest, add_singles, score_rest, score_singles
from edgekv.kernels.cpu.scalar import as_float, get, put

TILE = 32  # tokens: 16 KiB at 128 channels
decode_loop = Loop
HEADER = 8 * 2  # bytes before the numbers of a codec's own: its decode loop, its head_dim


def tiled(
    store: Callable[[Any], tuple[int, ...]],
    decode: Loop,
    scratch: Callable[[Any], int] = lambda codec: 0,
    **more: Any,
) -> CodecKernels:
    """Kernels that decode; store: (codec) -> the numbers that ``decode`` gets, scratch: (codec) -> its bytes."""

    def store_numbers(codec: Any) -> tuple[int, ...]:
        return decode.address, codec.head_dim, *store(codec)

    def scratch_bytes(codec: Any, rows: int) -> int:
        return 4 * TILE * int(codec.head_dim) + scratch(codec)

    own: dict[str, Any] = {"decode": decode, "scratch": scratch_bytes, "at_once": AT_ONCE}
    return CodecKernels(store_numbers, TILE_SCORES, TILE_SUMS, **own, **more)


@score_loop
def TILE_SCORES(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, tile: int) -> None:
    """Scores of queries (rows, head_dim) with tokens t..t + n."""
    decode, head_dim = get(numbers(store), 0), get(numbers(store), 1)
    for i in range(0, n, TILE):
        few, to = min(TILE, n - i), s + 4 * i
        call(decode, (store + HEADER, g, t + i, few, tile, tile + 4 * TILE * head_dim))
        score_singles(q, rows, tile, head_dim, few, to, gap)
        if head_dim % WIDTH:
            score_rest(floats(q), rows, floats(tile), head_dim, few, floats(to), gap)


@add_loop
def TILE_SUMS(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, tile: int) -> None:
    """out (rows, head_dim) += p times tokens t..t + n."""
    decode, head_dim = get(numbers(store), 0), get(numbers(store), 1)
    for i in range(0, n, TILE):
        few, weights = min(TILE, n - i), p + 4 * i
        call(decode, (store + HEADER, g, t + i, few, tile, tile + 4 * TILE * head_dim))
        add_singles(weights, gap, rows, tile, head_dim, few, out)
        if head_dim % WIDTH:
            add_rest(floats(weights), gap, rows, floats(tile), head_dim, few, floats(out))


BITS = 2, 4, 8
WIDE = max(8, WIDTH)  # channels decoded side by side


@intrinsic
def decode_tokens(
    context: Any, codes: Any, n_bytes: Any, n_bits: Any, n: Any, low: Any, step: Any, span: Any, tile: Any
) -> Any:
    """tile (n, head_dim) = low + step * code, of n tokens in 8, 4 or 2 bits; low, step (spans, TILE) float32.

    Byte j of a token has the channels j, j + n_bytes, ... from its low bits up. span: channels that share low and
    step, head_dim or a part of it.
    """

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        codes, n_bytes, n_bits, n, low, step, span, tile = args
        several = b.icmp_signed("<", b.mul(span, n_bits), b.mul(n_bytes, emit.I64(8)))
        given = codes, n_bytes, n, low, step, span, tile
        with b.if_else(several) as (spans, tokens):
            with spans:
                _switch_bits(b, n_bits, "spans", given)
            with tokens:
                _switch_bits(b, n_bits, "tokens", given)
        return context.get_dummy_value()

    return types.none(*[types.intp] * 8), build


@intrinsic
def decode_channels(
    context: Any, codes: Any, n_bytes: Any, n_bits: Any, n: Any, low: Any, step: Any, tile: Any
) -> Any:
    """`decode_tokens` with low and step (head_dim,) of each channel."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        codes, n_bytes, n_bits, n, low, step, tile = args
        given = codes, n_bytes, n, low, step, n_bytes, tile
        _switch_bits(b, n_bits, "channels", given)
        return context.get_dummy_value()

    return types.none(*[types.intp] * 7), build


def _switch_bits(b: Any, n_bits: Any, what: str, given: tuple[Any, ...]) -> None:
    for bits in BITS:
        with b.if_then(b.icmp_signed("==", n_bits, emit.I64(bits))):
            emit.call_own(b, f"decode_{what}_{bits}", functools.partial(_decode, bits, what), *given)


def _decode(
    n_bits: int, what: str, b: Any, codes: Any, n_bytes: Any, n: Any, low: Any, step: Any, span: Any, tile: Any
) -> None:
    parts, wide = range(8 // n_bits), emit.I64(WIDE)
    whole = b.mul(b.udiv(n_bytes, wide), wide)
    if what == "spans":  # a vector's channels have the same ends, or there are none
        left = b.or_(b.urem(span, wide), b.urem(n_bytes, wide))
        whole = b.select(b.icmp_signed("==", left, emit.I64(0)), n_bytes, emit.I64(0))
    done = emit.I64(0)
    for width, stop in ((WIDE, whole), (1, n_bytes)):
        byte = emit.vector(emit.I8, width) if width > 1 else emit.I8
        with emit.loop(b, done, stop, width) as turn:
            starts = [b.add(turn.i, b.mul(n_bytes, emit.I64(part))) for part in parts]
            ends = [channel_ends(b, low, step, start, width) for start in starts if what == "channels"]
            rows = [b.mul(b.udiv(start, span), emit.I64(TILE)) for start in starts if what == "spans"]
            with emit.loop(b, emit.I64(0), n, 1) as token:
                raw = emit.load(b, byte, b.add(codes, b.add(turn.i, b.mul(token.i, n_bytes))))
                word = b.zext(raw, emit.like(raw, emit.I32))
                if what == "tokens":
                    ends = [token_ends(b, low, step, token.i, width)] * len(parts)
                elif what == "spans":
                    ends = [token_ends(b, low, step, b.add(row, token.i), width) for row in rows]
                to = b.add(tile, b.mul(token.i, b.mul(n_bytes, emit.I64(4 * len(parts)))))
                for part, (start, (least, size)) in enumerate(zip(starts, ends, strict=True)):
                    code = b.lshr(word, emit.constant(word.type, part * n_bits)) if part else word
                    if part < len(parts) - 1:
                        code = b.and_(code, emit.constant(word.type, (1 << n_bits) - 1))
                    x = emit.multiply_add(b, b.sitofp(code, least.type), size, least)
                    emit.store(b, x, b.add(to, b.mul(start, emit.I64(4))))
        done = turn.i


def channel_ends(b: Any, low: Any, step: Any, start: Any, width: int) -> tuple[Any, Any]:
    """low and step of each of ``width`` channels from ``start`` on, inside a kernel."""
    kind, at = emit.vector(emit.F32, width) if width > 1 else emit.F32, b.mul(start, emit.I64(4))
    return emit.load(b, kind, b.add(low, at)), emit.load(b, kind, b.add(step, at))


def token_ends(b: Any, low: Any, step: Any, i: Any, width: int) -> tuple[Any, Any]:
    """low[i] and step[i], for each of ``width`` channels."""
    at = b.mul(i, emit.I64(4))
    least, size = (emit.load(b, emit.F32, b.add(end, at)) for end in (low, step))
    return (emit.splat(b, least, width), emit.splat(b, size, width)) if width > 1 else (least, size)


@fast_jit
def widen_ends(bits: int, n: int, to: int) -> None:
    """to (n,) float32 = the float16 at an address."""
    source, target = halves(bits), floats(to)
    for i in range(n):
        put(target, i, as_float(get(source, i)))
