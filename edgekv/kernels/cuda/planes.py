"""Keys in planes and interleaved values on a GPU: encoders, what reads them, and tiled attention over a pair.

Tiled attention runs on tensor cores with the queries' rotation inside."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from edgekv.kernels.cuda.driver import Array, Driver, Launch, Macros, Program, place
from edgekv.kernels.cuda.loops import (
    MOST_CHANNELS,
    THREADS,
    TILE,
    Backend,
    Loops,
    Queries,
    Reader,
    Tools,
    check_width,
)
from edgekv.kernels.interface import GAUSS_STEP, LARGEST_FOUR


class PlaneKernels(Backend):
    def encode_centres(self, x: Array, codes: Array, step: Array, t0: int) -> None:
        """Stores the means of x (G, n, D) from token t0 on and takes them off x."""
        n_kv_heads, n, d = x.shape
        check_width(d)
        launch = Launch(encode_program(), "encode_centres", (n // TILE, n_kv_heads), THREADS)
        self.driver.launch(launch, x, d, codes, step, step.shape[1], *place(self.driver, t0))

    def encode_keys(self, x: Array, planes: Array, scale: Array, t0: int) -> None:
        """Stores x (G, n, D) in planes (G, blocks, bits, 4, D / 8, 16) from token t0 on."""
        n_kv_heads, n, d = x.shape
        bits = planes.shape[2]
        launch = Launch(encode_program(bits), "encode_keys", (n, n_kv_heads), 32)
        store = planes, planes.shape[1], scale, scale.shape[1]
        self.driver.launch(launch, x, d, bits, *store, *place(self.driver, t0))

    def encode_interleaved(self, x: Array, codes: Array, scale: Array, t0: int) -> None:
        """Stores x (G, n, D) in codes (G, blocks, 2 * bits, D, 4) from token t0 on."""
        n_kv_heads, n, d = x.shape
        bits = codes.shape[2] // 2
        levels = self.scratch("levels", x.shape, np.uint8)
        launch = Launch(encode_program(bits), "encode_interleaved", (n // TILE, n_kv_heads), THREADS)
        store = codes, codes.shape[1], scale, scale.shape[1]
        self.driver.launch(launch, x, d, bits, levels, *store, *place(self.driver, t0))


@functools.cache
def encode_program(bits: int = 1) -> Program:
    """encode_planes.cu; ``bits`` of the codes of `encode_keys` and `encode_interleaved`."""
    macros = (
        ("MOST_CHANNELS", MOST_CHANNELS),
        ("GAUSS_STEP", str(GAUSS_STEP[bits])),
        ("LARGEST_FOUR", LARGEST_FOUR),
    )
    return Program(("exact", "encode_planes"), macros, exact=True)


def _read_keys(codec: Any) -> Reader:
    a, bits = codec.arrays, int(codec.bits.max())
    arrays = a["planes"], a["scale"], a["centres"], a["centre_step"], codec.heads
    macros = ("KEY_BITS", bits), ("KEY_HEADS", int(codec.bits.min() < bits))
    return Reader("RowKeys<PlaneRow, 16>", "planes", arrays, a["scale"].shape[1], codec.width, macros)


def _rounded(tools: Tools, codec: Any, q: Array) -> Queries:
    """q (G, M, D) rotated, as it is and in whole numbers: (G, M, 2 * width)."""
    x = tools.rotate(codec.rotation, q * tools.constant(codec.query_factors)[:, None])
    out = tools.driver.empty((*q.shape[:2], 2 * codec.width), np.float32)
    launch = Launch(encode_program(), "round_queries", (x.shape[0] * x.shape[1],), min(THREADS, codec.width))
    tools.driver.launch(launch, x, codec.width, tools.constant(codec.key_scale), x.shape[1], out)
    return Queries(out)


def _read_values(codec: Any) -> Reader:
    codes, scale = codec.arrays["codes"], codec.arrays["scale"]
    bits = int(codec.bits.max())
    macros = ("VALUE_BITS", bits), ("VALUE_HEADS", int(codec.bits.min() < bits))
    store = (codes, scale, codec.heads), scale.shape[1], codes.shape[3], macros
    return Reader("RowValues<InterleavedRow, 16>", "planes", *store, rotation=codec.rotation)


LOOPS = {"centred_planes": Loops(_read_keys, queries=_rounded), "interleaved": Loops(values=_read_values)}


FILES = ("tiled",)
WIDTHS, MOST_ROWS = (64, 128), 4  # of a head, as it is stored; of queries


EXACT_TILES = 3  # at most, of a block that takes exact tokens


def blocks_held(rows: int, keys: Reader, values: Reader) -> int:
    """Blocks that a multiprocessor holds: how many registers there are to a thread."""
    bits = dict((*keys.macros, *values.macros))
    return 3 if rows == 1 and max(int(bits["KEY_BITS"]), int(bits["VALUE_BITS"])) <= 2 else 2


def exact_tiles(tiles: int) -> int:
    """Of a block that takes exact tokens, where one that takes packed ones has so many: it is not to end last."""
    return max(1, min(EXACT_TILES, tiles // 8))


def takes(driver: Driver, keys: Any, values: Any) -> bool:
    """Whether the kernel reads this pair of codecs on this device, for up to MOST_ROWS query rows."""
    if (keys.kind, values.kind) != ("centred_planes", "interleaved") or not driver.has_whole_tiles:
        return False
    return keys.width == keys.head_dim == values.head_dim and keys.width in WIDTHS


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
