"""How launches are cut: threads and tiles of a block, queries that it takes at once, strides of arrays."""

from __future__ import annotations

from edgekv.errors import CacheError
from edgekv.kernels.cuda.loops import Reader
from edgekv.kernels.cuda.program import Array

THREADS, TILE = 128, 64
MOST_ROWS = 8  # of queries that one block takes
MOST_CHANNELS = 1024


def rows_at_once(rows: int) -> int:
    """Queries that a block takes at once: a power of two, so that few variants are compiled."""
    return min(MOST_ROWS, 1 << (rows - 1).bit_length())


def tiles_at_once(rows: int, *readers: Reader) -> int:
    """Tiles that a block takes at once; of many queries the sums fill the registers."""
    return min(reader.tiles for reader in readers) if rows <= 2 else 1


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
    """CacheError where a head has more channels than a block can hold."""
    if width > MOST_CHANNELS:
        raise CacheError(
            f"head_dim {width}: device='cuda' takes at most {MOST_CHANNELS} channels; use device='cpu'"
        )
