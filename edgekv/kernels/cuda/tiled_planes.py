"""Attention over keys in planes and interleaved values on tensor cores, with the queries' rotation inside."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgekv.kernels.contract.planes import LARGEST_FOUR
from edgekv.kernels.cuda.loops import Queries, Reader
from edgekv.kernels.cuda.program import Array, Driver, Macros

FILES = ("tiled_queries", "tiled_warp", "tiled_scores", "tiled_values", "tiled_planes")
WIDTHS, MOST_ROWS = (64, 128), 4  # of a head, as it is stored; of queries


EXACT_TILES = 3  # at most, of a block that takes exact tokens


def blocks_held(rows: int, keys: Reader, values: Reader) -> int:
    """Blocks that a multiprocessor holds: how many registers there are to a thread."""
    bits = dict((*keys.macros, *values.macros))
    return 3 if rows == 1 and max(int(bits["KEY_BITS"]), int(bits["VALUE_BITS"])) <= 2 else 2


def exact_tiles(tiles: int) -> int:
    """Of a block that takes exact tokens, where one that takes packed ones has so many: it is not to end last."""
    return max(1, min(EXACT_TILES, tiles // 8))


def takes(driver: Driver, keys: Any, values: Any, rows: int) -> bool:
    """Whether the kernel reads this pair of codecs on this device, for so many query rows."""
    if (keys.kind, values.kind) != ("centred_planes", "interleaved") or not driver.has_whole_tiles:
        return False
    return keys.width == keys.head_dim == values.head_dim and keys.width in WIDTHS and rows <= MOST_ROWS


def macros(rows: int, keys: Reader, values: Reader) -> Macros:
    """Beside those of all pairs."""
    factor = f"{np.float32(1 / np.sqrt(keys.width)):.9g}f"
    return (
        ("TILED", 1),
        ("BLOCKS_AT_ONCE", blocks_held(rows, keys, values)),
        ("TURN_FACTOR", factor),
        ("LARGEST_FOUR", LARGEST_FOUR),
    )


def queries(keys: Any, q: Array) -> Queries:
    """As they come: the kernel rotates and rounds them."""
    return Queries(q, keys.query_flips, keys.key_scale)
