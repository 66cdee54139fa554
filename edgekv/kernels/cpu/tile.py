"""Attention over codecs that only say how tokens are decoded: a tile of tokens is decoded to float32, then read.

A tile stays in the first-level cache while all query rows of the group read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import fast_jit
from edgekv.kernels.cpu.emit import at
from edgekv.kernels.cpu.loops import (
    TOKENS_PER_CALL,
    CpuCodec,
    Loop,
    add_loop,
    call,
    floats,
    halves,
    int64s,
    score_loop,
)
from edgekv.kernels.cpu.rows import WIDTH, add_singles, score_singles
from edgekv.kernels.cpu.scalar import as_float, get, put

TILE = 32  # tokens: 16 KiB at 128 channels
decode_loop = Loop
HEADER = 8 * 2  # bytes before the arguments that ``decode`` gets: the decode loop's address, head_dim


def tiled(
    args: Callable[[Any], tuple[int, ...]],
    decode: Loop,
    scratch: Callable[[Any], int] = lambda codec: 0,
    **more: Any,
) -> CpuCodec:
    """Returns the kernels of a codec that is read by way of decoded tiles.

    args: (codec) -> the arguments that ``decode`` gets. scratch: (codec) -> bytes of scratch that it gets.
    """

    def all_args(codec: Any) -> tuple[int, ...]:
        return decode.address, codec.head_dim, *args(codec)

    def scratch_bytes(codec: Any, rows: int) -> int:
        return 4 * TILE * int(codec.head_dim) + scratch(codec)

    return CpuCodec(
        all_args, tile_scores, tile_sums, decode=decode, scratch=scratch_bytes, at_once=TOKENS_PER_CALL, **more
    )


@score_loop
def tile_scores(args: int, q: int, rows: int, g: int, t: int, n: int, s: int, stride: int, tile: int) -> None:
    """s (rows, n) = scores of queries (rows, head_dim) with tokens t..t + n; stride: float32 between rows of s."""
    decode, head_dim = get(int64s(args), 0), get(int64s(args), 1)
    for i in range(0, n, TILE):
        n_tokens, scores = min(TILE, n - i), s + 4 * i
        call(decode, (args + HEADER, g, t + i, n_tokens, tile, tile + 4 * TILE * head_dim))
        score_singles(q, rows, tile, head_dim, n_tokens, scores, stride)


@add_loop
def tile_sums(args: int, p: int, stride: int, rows: int, g: int, t: int, n: int, out: int, tile: int) -> None:
    """out (rows, head_dim) += p (rows, n) times tokens t..t + n; rows of p are ``stride`` float32 apart."""
    decode, head_dim = get(int64s(args), 0), get(int64s(args), 1)
    for i in range(0, n, TILE):
        n_tokens, weights = min(TILE, n - i), p + 4 * i
        call(decode, (args + HEADER, g, t + i, n_tokens, tile, tile + 4 * TILE * head_dim))
        add_singles(weights, stride, rows, tile, head_dim, n_tokens, out)


BITS = 2, 4, 8
WIDE = max(8, WIDTH)  # channels decoded side by side


@emit.procedure
def decode_tokens(
    b: Any, codes: Any, n_bytes: Any, n_bits: Any, n: Any, low: Any, step: Any, span: Any, tile: Any
) -> None:
    """tile (n, head_dim) = low + step * code, of n tokens in codes of 8, 4 or 2 bits.

    codes (n, n_bytes): byte j of a token has the channels j, j + n_bytes, ... from its low bits up. low, step
    (spans, TILE) float32: of each token. span: channels that share them, head_dim or a part of it.
    """
    several = b.icmp_signed("<", b.mul(span, n_bits), b.mul(n_bytes, emit.I64(8)))
    with b.if_else(several) as (spans, tokens):
        for per, way in (("spans", spans), ("tokens", tokens)):
            with way:
                _switch_bits(b, n_bits, per, (codes, n_bytes, n, low, step, span, tile))


@emit.procedure
def decode_channels(b: Any, codes: Any, n_bytes: Any, n_bits: Any, n: Any, low: Any, step: Any, tile: Any) -> None:
    """tile (n, head_dim) = low + step * code, as `decode_tokens`, with low and step (head_dim,) of channels."""
    _switch_bits(b, n_bits, "channels", (codes, n_bytes, n, low, step, n_bytes, tile))


def _switch_bits(b: Any, n_bits: Any, per: str, args: tuple[Any, ...]) -> None:
    """Decodes codes of n_bits (of BITS, known when it runs); per: what has its own low and step."""
    for bits in BITS:
        with b.if_then(b.icmp_signed("==", n_bits, emit.I64(bits))):
            emit.call_internal(b, f"decode_{per}_{bits}", functools.partial(_decode, bits, per), *args)


def _decode(
    n_bits: int, per: str, b: Any, codes: Any, n_bytes: Any, n: Any, low: Any, step: Any, span: Any, tile: Any
) -> None:
    """Decodes WIDE bytes of all tokens at a time, then those left over one by one.

    per: "tokens" (low, step (TILE,)), "spans" ((spans, TILE)) or "channels" ((head_dim,)).
    """
    parts, done = range(8 // n_bits), emit.I64(0)  # codes of a byte
    whole = b.sub(n_bytes, b.urem(n_bytes, emit.I64(WIDE)))
    if per == "spans":  # a vector's channels share low and step, or there are none
        left = b.or_(b.urem(span, emit.I64(WIDE)), b.urem(n_bytes, emit.I64(WIDE)))
        whole = b.select(b.icmp_signed("==", left, emit.I64(0)), n_bytes, emit.I64(0))
    for width, stop in ((WIDE, whole), (1, n_bytes)):
        byte = emit.vector(emit.I8, width) if width > 1 else emit.I8
        with emit.loop(b, done, stop, width) as loop:
            channels = [at(b, loop.i, (n_bytes, part)) for part in parts]
            affine = [channel_affine(b, low, step, channel, width) for channel in channels if per == "channels"]
            rows = [b.mul(b.udiv(channel, span), emit.I64(TILE)) for channel in channels if per == "spans"]
            with emit.loop(b, 0, n, 1) as token:
                raw = emit.load(b, byte, at(b, codes, loop.i, (token.i, n_bytes)))
                word = b.zext(raw, emit.like(raw, emit.I32))
                if per == "tokens":
                    affine = [token_affine(b, low, step, token.i, width)] * len(parts)
                elif per == "spans":
                    affine = [token_affine(b, low, step, b.add(row, token.i), width) for row in rows]
                row_at = at(b, tile, (token.i, n_bytes, 4 * len(parts)))
                for part, (channel, (least, size)) in enumerate(zip(channels, affine, strict=True)):
                    code = b.lshr(word, emit.constant(word.type, part * n_bits)) if part else word
                    if part < len(parts) - 1:
                        code = b.and_(code, emit.constant(word.type, (1 << n_bits) - 1))
                    x = emit.multiply_add(b, b.sitofp(code, least.type), size, least)
                    emit.store(b, x, at(b, row_at, (channel, 4)))
        done = loop.i


def channel_affine(b: Any, low: Any, step: Any, start: Any, width: int) -> tuple[Any, Any]:
    """Returns low and step (head_dim,) float32 of ``width`` channels from ``start`` on, inside a kernel."""
    kind = emit.vector(emit.F32, width) if width > 1 else emit.F32
    return emit.load(b, kind, at(b, low, (start, 4))), emit.load(b, kind, at(b, step, (start, 4)))


def token_affine(b: Any, low: Any, step: Any, i: Any, width: int) -> tuple[Any, Any]:
    """Returns low[i] and step[i], float32, in each of ``width`` lanes, inside a kernel."""
    least, size = (emit.load(b, emit.F32, at(b, end, (i, 4))) for end in (low, step))
    return (emit.splat(b, least, width), emit.splat(b, size, width)) if width > 1 else (least, size)


@fast_jit
def load_halves(bits: int, n: int, to: int) -> None:
    """to (n,) float32 = n float16 at an address."""
    source, target = halves(bits), floats(to)
    for i in range(n):
        put(target, i, as_float(get(source, i)))
