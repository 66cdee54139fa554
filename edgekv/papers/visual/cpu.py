"""Uniform levels between given ends, in bit planes."""

from typing import Any

import numpy as np

from edgekv.kernels.cpu.loops import address_of, floats, halves, numbers
from edgekv.kernels.cpu.scalar import as_float, get
from edgekv.kernels.cpu.softmax import fill
from edgekv.kernels.cpu.tile import TILE, decode_channel_planes, decode_loop, decode_planes, tiled, widen_ends

BYTE_BITS = 8
ZERO = np.float32(0)


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


KERNELS = {"levels": tiled(_store, _decode, lambda codec: 8 * max(TILE, int(codec.head_dim)))}
