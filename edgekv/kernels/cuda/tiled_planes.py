"""Attention over keys in planes and interleaved values on tensor cores, with the queries' rotation inside."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from edgekv.kernels.contract.planes import LARGEST_FOUR
from edgekv.kernels.cuda.loops import Queries
from edgekv.kernels.cuda.program import Array, Driver, Macros

FILE = "tiled_planes"
WIDTHS = (64, 128)  # of a head, as it is stored


class Held(NamedTuple):
    """Blocks of the kernel that a multiprocessor holds, of one query row and of more."""

    one: int = 3
    more: int = 2

    def of(self, rows: int) -> int:
        """With ``rows`` query rows."""
        return self.one if rows == 1 else self.more


HELD = Held()


def takes(driver: Driver, keys: Any, values: Any) -> bool:
    """Whether the kernel reads this pair of codecs on this device."""
    if (keys.kind, values.kind) != ("centred_planes", "interleaved") or not driver.has_whole_tiles:
        return False
    return keys.width == keys.head_dim == values.head_dim and keys.width in WIDTHS


def macros(width: int, rows: int) -> Macros:
    """Beside those of all pairs."""
    factor = f"{np.float32(1 / np.sqrt(width)):.9g}f"
    return (
        ("TILED", 1),
        ("BLOCKS_AT_ONCE", HELD.of(rows)),
        ("TURN_FACTOR", factor),
        ("LARGEST_FOUR", LARGEST_FOUR),
    )


def queries(keys: Any, q: Array) -> Queries:
    """As they come: the kernel rotates and rounds them."""
    return Queries(q, keys.rotation.flips, keys.key_scale)
