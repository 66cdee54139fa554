"""One side of attention as the kernels take it: a C++ type, the arrays that it reads, and the queries for it."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgekv.errors import CacheError
from edgekv.kernels.cuda.program import Array, Macros

THREADS, TILE = 128, 64
MOST_ROWS = 8  # of queries that one block takes
MOST_CHANNELS = 1024


@dataclasses.dataclass(frozen=True)
class Codec:
    """The C++ type ``name`` in ``file`` reads ``arrays`` of ``capacity`` tokens, ``width`` channels a token."""

    name: str
    file: str
    arrays: tuple[Array, ...]
    capacity: int
    width: int
    macros: Macros = ()
    joins: bool = True  # whether it has part in attention of one launch; then at most four arrays
    tiles: int = 1  # of 64 tokens that a block reads at once, to have enough bytes on their way
    blocks: int = 8  # of its kernels that a multiprocessor holds
    rotation: Any = None  # of the values: sums are rotated back


@dataclasses.dataclass(frozen=True)
class Queries:
    """x (G, M, width), what the codec's kernel needs beside it, and a factor (G, M)."""

    x: Array
    codes: Array | None = None
    scale: Array | None = None
    rounded: Array | None = None  # what the codes stand for


def rows_at_once(rows: int) -> int:
    """Queries that a block takes at once: a power of two, so that few variants are compiled."""
    return min(MOST_ROWS, 1 << (rows - 1).bit_length())


def tiles_at_once(rows: int, *codecs: Codec) -> int:
    """Tiles that a block takes at once; of many queries the sums fill the registers."""
    return min(codec.tiles for codec in codecs) if rows <= 2 else 1


def n_rounds(t0: int, t1: int, tiles: int) -> int:
    """Rounds of `tiles` tiles over the tokens t0..t1."""
    return -(-(-(-t1 // TILE) - t0 // TILE) // tiles)


def strides(x: Array) -> tuple[int, int]:
    """Elements between the heads and between the rows of x (G, M, S)."""
    return x.strides[0] // x.itemsize, x.strides[1] // x.itemsize


def per_head(x: Array) -> tuple[Array, int]:
    """x (G, n, D) with the rows of a head contiguous, and the elements between heads."""
    n, d = x.shape[1:]
    if x.strides[2] != x.itemsize or (n > 1 and x.strides[1] != d * x.itemsize):
        x = x.copy()
    return x, x.strides[0] // x.itemsize if x.shape[0] > 1 else n * d


def check_width(width: int) -> None:
    if width > MOST_CHANNELS:
        raise CacheError(
            f"head_dim {width}: device='cuda' takes at most {MOST_CHANNELS} channels; use device='cpu'"
        )
