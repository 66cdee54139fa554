"""Decoding of uniform levels in bit planes on the CPU."""

from typing import Any

import numpy as np
from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import intrinsic
from edgekv.kernels.cpu.loops import address_of, floats, halves, int64s
from edgekv.kernels.cpu.scalar import as_float, get
from edgekv.kernels.cpu.softmax import fill
from edgekv.kernels.cpu.tile import TILE, WIDE, channel_affine, decode_loop, load_halves, tiled, token_affine

BYTE_BITS = 8
ZERO = np.float32(0)


def _plane_decoder(per_channel: bool) -> Any:
    """Returns the loop that decodes bit planes with low and step per channel, or per token."""

    @intrinsic
    def decode(
        context: Any, planes: Any, n_bits: Any, head_dim: Any, n: Any, low: Any, step: Any, tile: Any
    ) -> Any:
        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            planes, n_bits, head_dim, n, low, step, tile = args
            n_bytes, done = b.udiv(b.add(head_dim, emit.I64(7)), emit.I64(8)), emit.I64(0)
            for width in (WIDE, 1):
                code = emit.vector(emit.I32, width) if width > 1 else emit.I32
                with emit.loop(b, done, head_dim, width) as loop:
                    affine = channel_affine(b, low, step, loop.i, width) if per_channel else None
                    byte = b.add(planes, b.udiv(loop.i, emit.I64(8)))
                    with emit.loop(b, emit.I64(0), n, 1) as token:
                        first = b.add(byte, b.mul(token.i, b.mul(n_bits, n_bytes)))
                        with emit.loop(b, emit.I64(0), n_bits, 1, [emit.constant(code, 0)]) as plane:
                            bits = _bits(b, b.add(first, b.mul(plane.i, n_bytes)), loop.i, width)
                            shift = b.trunc(plane.i, emit.I32)
                            weight = b.shl(b.zext(bits, code), emit.splat(b, shift, width) if width > 1 else shift)
                            plane.next = [b.or_(plane.values[0], weight)]
                        least, size = affine or token_affine(b, low, step, token.i, width)
                        x = emit.multiply_add(b, b.sitofp(plane.values[0], least.type), size, least)
                        element = b.add(b.mul(token.i, head_dim), loop.i)
                        emit.store(b, x, b.add(tile, b.mul(element, emit.I64(4))))
                done = loop.i
            return context.get_dummy_value()

        return types.none(*[types.intp] * 7), build

    return decode


def _bits(b: Any, address: Any, channel: Any, width: int) -> Any:
    """Returns the bits of ``width`` channels, or of one channel, whose byte is at an address."""
    if width > 1:
        return b.bitcast(emit.load(b, emit.integer(width), address), emit.vector(emit.integer(1), width))
    bit = b.and_(b.trunc(channel, emit.I8), emit.I8(7))
    return b.trunc(b.lshr(emit.load(b, emit.I8, address), bit), emit.integer(1))


_decode_planes, _decode_channel_planes = _plane_decoder(per_channel=False), _plane_decoder(per_channel=True)


@decode_loop
def _decode(args: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    """Decodes low + step * code, with low and step of each token, of all tokens, or of each channel."""
    x = int64s(args)
    head_dim, n_bits, capacity = get(x, 0), get(x, 1), get(x, 2)
    head_stride, token_stride, per_channel = get(x, 6), get(x, 7), get(x, 8)
    planes = get(x, 3) + (g * capacity + t) * n_bits * ((head_dim + BYTE_BITS - 1) // BYTE_BITS)
    n_ends, first = head_dim if per_channel else TILE, g * head_stride + t * token_stride
    low, step = scratch, scratch + 4 * n_ends
    if per_channel or token_stride:
        n_read = head_dim if per_channel else n
        load_halves(get(x, 4) + 2 * first, n_read, low)
        load_halves(get(x, 5) + 2 * first, n_read, step)
    else:
        fill(floats(low), 0, n, as_float(get(halves(get(x, 4)), first)))
        fill(floats(step), 0, n, as_float(get(halves(get(x, 5)), first)))
    if per_channel:
        _decode_channel_planes(planes, n_bits, head_dim, n, low, step, tile)
    else:
        _decode_planes(planes, n_bits, head_dim, n, low, step, tile)


def _args(codec: Any) -> tuple[int, ...]:
    """Returns the arguments of a codec; where heads or tokens share low and step, the distance of these is 0."""
    planes, low, step = (codec.arrays[name] for name in ("planes", "low", "step"))
    heads, n = low.shape
    strides = (n, 0, 1) if codec.group == "channel" else (n if heads > 1 else 0, 1 if n > 1 else 0, 0)
    affine = address_of(low), address_of(step)
    return codec.head_dim, planes.shape[2], planes.shape[1], address_of(planes), *affine, *strides


KERNELS = {"levels": tiled(_args, _decode, lambda codec: 8 * max(TILE, int(codec.head_dim)))}
