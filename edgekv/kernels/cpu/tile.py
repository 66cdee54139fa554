"""Codecs that only say what their tokens decode to: a tile of them is decoded, then read by the loops of float32.

A tile stays in the first-level cache while all query rows of the group read it.
"""

from __future__ import annotations

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


WIDE = max(8, WIDTH)  # channels decoded side by side


def _channels(b: Any, low: Any, step: Any, start: Any, width: int) -> tuple[Any, Any]:
    """Ends of each of ``width`` channels from ``start`` on."""
    kind, at = emit.vector(emit.F32, width) if width > 1 else emit.F32, b.mul(start, emit.I64(4))
    return emit.load(b, kind, b.add(low, at)), emit.load(b, kind, b.add(step, at))


def _token(b: Any, low: Any, step: Any, i: Any, width: int) -> tuple[Any, Any]:
    """Ends of token i, for each of ``width`` channels."""
    at = b.mul(i, emit.I64(4))
    ends = [emit.load(b, emit.F32, b.add(end, at)) for end in (low, step)]
    if width > 1:
        ends = [emit.splat(b, end, width) for end in ends]
    return ends[0], ends[1]


def _span(b: Any, start: Any, span: Any, i: Any) -> Any:
    """Where the ends lie of token i and the span of channels that ``start`` is in."""
    return b.add(b.mul(b.udiv(start, span), emit.I64(TILE)), i)


def _code_decoder(n_bits: int, ends_of: str) -> Any:
    """Returns the loop over codes of so many bits, whose ends belong to a channel, a token, or a span of one."""
    parts = 8 // n_bits

    @intrinsic
    def decode(
        context: Any, codes: Any, n_bytes: Any, whole: Any, n: Any, low: Any, step: Any, span: Any, tile: Any
    ) -> Any:
        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            codes, n_bytes, whole, n, low, step, span, tile = args
            done = emit.I64(0)
            for width, stop in ((WIDE, whole), (1, n_bytes)):
                byte = emit.vector(emit.I8, width) if width > 1 else emit.I8
                with emit.loop(b, done, stop, width) as turn:
                    starts = [b.add(turn.i, b.mul(n_bytes, emit.I64(part))) for part in range(parts)]
                    ends = [_channels(b, low, step, start, width) for start in starts if ends_of == "channel"]
                    with emit.loop(b, emit.I64(0), n, 1) as token:
                        raw = emit.load(b, byte, b.add(codes, b.add(turn.i, b.mul(token.i, n_bytes))))
                        word = b.zext(raw, emit.like(raw, emit.I32))
                        if ends_of == "token":
                            ends = [_token(b, low, step, token.i, width)] * parts
                        elif ends_of == "span":
                            ends = [_token(b, low, step, _span(b, x, span, token.i), width) for x in starts]
                        row = b.add(tile, b.mul(token.i, b.mul(n_bytes, emit.I64(4 * parts))))
                        for part, (start, (least, size)) in enumerate(zip(starts, ends, strict=True)):
                            code = b.lshr(word, emit.constant(word.type, part * n_bits)) if part else word
                            if part < parts - 1:
                                code = b.and_(code, emit.constant(word.type, (1 << n_bits) - 1))
                            x = emit.multiply_add(b, b.sitofp(code, least.type), size, least)
                            emit.store(b, x, b.add(row, b.mul(start, emit.I64(4))))
                done = turn.i
            return context.get_dummy_value()

        return types.none(*[types.intp] * 8), build

    return decode


def _plane_decoder(per_channel: bool) -> Any:
    """Returns the loop over codes in bit planes, whose ends belong to channels or to tokens."""

    @intrinsic
    def decode(
        context: Any, planes: Any, n_bits: Any, head_dim: Any, n: Any, low: Any, step: Any, tile: Any
    ) -> Any:
        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            planes, n_bits, head_dim, n, low, step, tile = args
            n_bytes, done = b.udiv(b.add(head_dim, emit.I64(7)), emit.I64(8)), emit.I64(0)
            for width in (WIDE, 1):
                code = emit.vector(emit.I32, width) if width > 1 else emit.I32
                with emit.loop(b, done, head_dim, width) as turn:
                    ends = _channels(b, low, step, turn.i, width) if per_channel else None
                    byte = b.add(planes, b.udiv(turn.i, emit.I64(8)))
                    with emit.loop(b, emit.I64(0), n, 1) as token:
                        first = b.add(byte, b.mul(token.i, b.mul(n_bits, n_bytes)))
                        with emit.loop(b, emit.I64(0), n_bits, 1, [emit.constant(code, 0)]) as plane:
                            bits = _bits(b, b.add(first, b.mul(plane.i, n_bytes)), turn.i, width)
                            shift = b.trunc(plane.i, emit.I32)
                            weight = b.shl(b.zext(bits, code), emit.splat(b, shift, width) if width > 1 else shift)
                            plane.following = [b.or_(plane.values[0], weight)]
                        least, size = ends or _token(b, low, step, token.i, width)
                        x = emit.multiply_add(b, b.sitofp(plane.values[0], least.type), size, least)
                        place = b.add(b.mul(token.i, head_dim), turn.i)
                        emit.store(b, x, b.add(tile, b.mul(place, emit.I64(4))))
                done = turn.i
            return context.get_dummy_value()

        return types.none(*[types.intp] * 7), build

    return decode


def _bits(b: Any, address: Any, channel: Any, width: int) -> Any:
    """The bits of ``width`` channels, or of one channel, whose byte is at an address."""
    if width > 1:
        return b.bitcast(emit.load(b, emit.integer(width), address), emit.vector(emit.integer(1), width))
    place = b.and_(b.trunc(channel, emit.I8), emit.I8(7))
    return b.trunc(b.lshr(emit.load(b, emit.I8, address), place), emit.integer(1))


BITS = 2, 4, 8
_TOKENS_2, _TOKENS_4, _TOKENS_8 = (_code_decoder(n_bits, "token") for n_bits in BITS)
_SPANS_2, _SPANS_4, _SPANS_8 = (_code_decoder(n_bits, "span") for n_bits in BITS)
_CHANNELS_2, _CHANNELS_4, _CHANNELS_8 = (_code_decoder(n_bits, "channel") for n_bits in BITS)
decode_planes, decode_channel_planes = _plane_decoder(per_channel=False), _plane_decoder(per_channel=True)


@fast_jit
def decode_tokens(codes: int, n_bytes: int, n_bits: int, n: int, low: int, step: int, tile: int) -> None:
    """tile (n, head_dim) = low + step * code, of codes of 8, 4 or 2 bits of n tokens; low, step (n,) float32.

    Byte j of a token has the channels j, j + n_bytes, ... from its low bits up.
    """
    whole = n_bytes // WIDE * WIDE
    if n_bits == 2:
        _TOKENS_2(codes, n_bytes, whole, n, low, step, 1, tile)
    elif n_bits == 4:
        _TOKENS_4(codes, n_bytes, whole, n, low, step, 1, tile)
    else:
        _TOKENS_8(codes, n_bytes, whole, n, low, step, 1, tile)


@fast_jit
def decode_spans(codes: int, n_bytes: int, n_bits: int, n: int, low: int, step: int, span: int, tile: int) -> None:
    """`decode_tokens` with low and step (spans, TILE) of ``span`` neighbouring channels of a token."""
    alike = span % WIDE == 0 and n_bytes % WIDE == 0  # a vector's channels have the same ends
    whole = n_bytes if alike else 0
    if n_bits == 2:
        _SPANS_2(codes, n_bytes, whole, n, low, step, span, tile)
    elif n_bits == 4:
        _SPANS_4(codes, n_bytes, whole, n, low, step, span, tile)
    else:
        _SPANS_8(codes, n_bytes, whole, n, low, step, span, tile)


@fast_jit
def decode_channels(codes: int, n_bytes: int, n_bits: int, n: int, low: int, step: int, tile: int) -> None:
    """`decode_tokens` with low and step (head_dim,) of each channel."""
    whole = n_bytes // WIDE * WIDE
    if n_bits == 2:
        _CHANNELS_2(codes, n_bytes, whole, n, low, step, 1, tile)
    elif n_bits == 4:
        _CHANNELS_4(codes, n_bytes, whole, n, low, step, 1, tile)
    else:
        _CHANNELS_8(codes, n_bytes, whole, n, low, step, 1, tile)


@fast_jit
def widen_ends(bits: int, n: int, to: int) -> None:
    """to (n,) float32 = the float16 at an address."""
    source, target = halves(bits), floats(to)
    for i in range(n):
        put(target, i, as_float(get(source, i)))
