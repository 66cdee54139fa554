"""Codecs that only say what their tokens decode to: a tile of them is decoded, then read by the loops of float32.

A tile stays in the first-level cache while all query rows of the group read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edgekv.kernels.cpu.compile import fast_jit, intrinsic
from edgekv.kernels.cpu.launch import call
from edgekv.kernels.cpu.loops import AT_ONCE, Loop, Loops, add_loop, chars, floats, numbers, score_loop
from edgekv.kernels.cpu.rows import WIDTH, add_rest, add_singles, score_rest, score_singles
from edgekv.kernels.cpu.scalar import get, put

TILE = 32  # tokens: 16 KiB at 128 channels
HEADER = 8 * 2  # bytes before the numbers of a codec's own: its decode loop, its head_dim


def decode_loop(function: Callable[..., None]) -> Loop:
    """decode(store, g, t, n, tile, scratch): tile (n, head_dim) float32 = tokens t.. of head g, n <= TILE."""
    return Loop(function, 6)


def tiled(
    store: Callable[[Any], tuple[int, ...]],
    decode: Loop,
    scratch: Callable[[Any], int] = lambda codec: 0,
    **more: Any,
) -> Loops:
    """`Loops` that decode; store: (codec) -> the numbers that ``decode`` gets, scratch: (codec) -> its bytes."""

    def store_numbers(codec: Any) -> tuple[int, ...]:
        return decode.address, codec.head_dim, *store(codec)

    def scratch_bytes(codec: Any, rows: int) -> int:
        return 4 * TILE * int(codec.head_dim) + scratch(codec)

    own: dict[str, Any] = {"decode": decode, "scratch": scratch_bytes, "at_once": AT_ONCE}
    return Loops(store_numbers, TILE_SCORES, TILE_SUMS, **own, **more)


@intrinsic
def _call_decode(context: Any, loop: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """Calls the `decode_loop` at an address."""
    return call(6)


@score_loop
def TILE_SCORES(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, tile: int) -> None:
    """Scores of queries (rows, head_dim) with tokens t..t + n."""
    decode, head_dim = get(numbers(store), 0), get(numbers(store), 1)
    for i in range(0, n, TILE):
        few, to = min(TILE, n - i), s + 4 * i
        _call_decode(decode, store + HEADER, g, t + i, few, tile, tile + 4 * TILE * head_dim)
        score_singles(q, rows, tile, head_dim, few, to, gap)
        if head_dim % WIDTH:
            score_rest(floats(q), rows, floats(tile), head_dim, few, floats(to), gap)


@add_loop
def TILE_SUMS(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, tile: int) -> None:
    """out (rows, head_dim) += p times tokens t..t + n."""
    decode, head_dim = get(numbers(store), 0), get(numbers(store), 1)
    for i in range(0, n, TILE):
        few, weights = min(TILE, n - i), p + 4 * i
        _call_decode(decode, store + HEADER, g, t + i, few, tile, tile + 4 * TILE * head_dim)
        add_singles(weights, gap, rows, tile, head_dim, few, out)
        if head_dim % WIDTH:
            add_rest(floats(weights), gap, rows, floats(tile), head_dim, few, floats(out))


@fast_jit
def unpack_codes(codes: int, n_bytes: int, n_bits: int, n: int, tile: int) -> None:
    """tile (n, head_dim) = codes of 8, 4 or 2 bits of n tokens: byte j has elements j, j + n_bytes, ..."""
    packed, to, head_dim, mask = chars(codes), floats(tile), n_bytes * (8 // n_bits), (1 << n_bits) - 1
    for i in range(n):
        for part in range(8 // n_bits):
            source, target, shift = i * n_bytes, i * head_dim + part * n_bytes, np.int32(part * n_bits)
            for j in range(n_bytes):
                put(to, target + j, np.float32((np.int32(get(packed, source + j)) >> shift) & np.int32(mask)))


@fast_jit
def scale_codes(tile: int, start: int, n: int, low: Any, step: Any) -> None:
    """tile[start:][:n] = low + step * tile[start:][:n]."""
    to = floats(tile)
    for d in range(start, start + n):
        put(to, d, low + step * get(to, d))
