"""Uniform levels between given ends, in bit planes."""

from typing import Any

import numpy as np

from edgekv.kernels.cpu.compile import Args, Scalar, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import address_of, floats, halves, numbers
from edgekv.kernels.cpu.scalar import as_float, clamp, get, round_to_even
from edgekv.kernels.cpu.softmax import fill
from edgekv.kernels.cpu.tile import TILE, decode_channel_planes, decode_loop, decode_planes, tiled, widen_ends
from edgekv.types import F32, U8, U16

ENCODE_WORK = 4  # of an element, in multiply-adds
BYTE_BITS = 8
ZERO = np.float32(0)


def encode_levels(x: F32, low: U16, step: U16, planes: U8, t0: int) -> None:
    args = np.ascontiguousarray(x), low, step, planes, t0
    run(_encode_tokens, x.shape[0] * x.shape[1], ENCODE_WORK * x.size, args)


@jit
def _encode_tokens(first: int, last: int, args: Args) -> None:
    x, low, step, planes, t0 = args
    (_, n_tokens, head_dim), (n_bits, n_bytes) = x.shape, planes.shape[2:]
    x = x.reshape(-1)
    highest = np.float32((1 << n_bits) - 1)
    for item in range(first, last):
        g, i = item // n_tokens, item % n_tokens
        lo, size = _ends(low, step, g, t0 + i)
        token = planes[g, t0 + i].reshape(-1)
        token[:] = 0
        for d in range(head_dim):
            code = _level(get(x, item * head_dim + d), lo, size, highest)
            for j in range(n_bits):
                bit = (code >> np.int32(j) & np.int32(1)) << np.int32(d % BYTE_BITS)
                token[j * n_bytes + d // BYTE_BITS] |= np.uint8(bit)


@jit
def _level(x: Scalar, low: Scalar, size: Scalar, highest: Scalar) -> Scalar:
    if size == ZERO:
        return np.int32(0)
    position = clamp((x - low) / size, ZERO, highest)
    return np.int32(round_to_even(position))


@jit
def _ends(low: U16, step: U16, g: int, t: int) -> tuple[Scalar, Scalar]:
    """low and step of head g's token t, where all heads or all tokens may share one."""
    row, column = min(g, low.shape[0] - 1), min(t, low.shape[1] - 1)
    return as_float(low[row, column]), as_float(step[row, column])


@decode_loop
def _decode(store: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    """low + step * code: the ends of a token, of all tokens, or of each channel."""
    x = numbers(store)
    head_dim, n_bits, capacity = get(x, 0), get(x, 1), get(x, 2)
    gap_head, gap_token, per_channel = get(x, 6), get(x, 7), get(x, 8)
    planes = get(x, 3) + (g * capacity + t) * n_bits * ((head_dim + BYTE_BITS - 1) // BYTE_BITS)
    n_ends, first = head_dim if per_channel else TILE, g * gap_head + t * gap_token
    low, step = scratch, scratch + 4 * n_ends
    if per_channel or gap_token:
        n_read = head_dim if per_channel else n
        widen_ends(get(x, 4) + 2 * first, n_read, low)
        widen_ends(get(x, 5) + 2 * first, n_read, step)
    else:
        fill(floats(low), 0, n, as_float(get(halves(get(x, 4)), first)))
        fill(floats(step), 0, n, as_float(get(halves(get(x, 5)), first)))
    if per_channel:
        decode_channel_planes(planes, n_bits, head_dim, n, low, step, tile)
    else:
        decode_planes(planes, n_bits, head_dim, n, low, step, tile)


def _store(codec: Any) -> tuple[int, ...]:
    """Where all heads or all tokens share their ends, these lie 0 apart."""
    planes, low, step = (codec.arrays[name] for name in ("planes", "low", "step"))
    heads, n = low.shape
    gaps = (n, 0, 1) if codec.group == "channel" else (n if heads > 1 else 0, 1 if n > 1 else 0, 0)
    ends = address_of(low), address_of(step)
    return codec.head_dim, planes.shape[2], planes.shape[1], address_of(planes), *ends, *gaps


LOOPS = {"levels": tiled(_store, _decode, lambda codec: 8 * max(TILE, int(codec.head_dim)))}
