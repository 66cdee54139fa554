"""Keys in planes and interleaved values on a GPU: encoders, what reads them, and tiled attention over a pair.

Tiled attention runs on tensor cores with the queries' rotation inside."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np

from edgekv.codecs.planes import GAUSS_STEP, LARGEST_FOUR
from edgekv.kernels.cuda.driver import Array, Driver, Launch, Macros, Program, place
from edgekv.kernels.cuda.loops import (
    MOST_CHANNELS,
    THREADS,
    TILE,
    Fused,
    Loops,
    Queries,
    Reader,
    Tools,
    check_width,
)

FOLDER = pathlib.Path(__file__).parent


def encode_centres(tools: Tools, x: Array, codes: Array, step: Array, t0: int) -> None:
    """Stores the means of x (G, n, D) from token t0 on and takes them off x."""
    n_kv_heads, n, d = x.shape
    check_width(d)
    launch = Launch(encode_program(), "encode_centres", (n // TILE, n_kv_heads), THREADS)
    tools.driver.launch(launch, x, d, codes, step, step.shape[1], *place(tools.driver, t0))


def encode_keys(tools: Tools, x: Array, planes: Array, scale: Array, t0: int) -> None:
    """Stores x (G, n, D) in planes (G, blocks, bits, 4, D / 8, 16) from token t0 on."""
    n_kv_heads, n, d = x.shape
    bits = planes.shape[2]
    launch = Launch(encode_program(bits), "encode_keys", (n, n_kv_heads), 32)
    store = planes, planes.shape[1], scale, scale.shape[1]
    tools.driver.launch(launch, x, d, bits, *store, *place(tools.driver, t0))


def encode_interleaved(tools: Tools, x: Array, codes: Array, scale: Array, t0: int) -> None:
    """Stores x (G, n, D) in codes (G, blocks, 2 * bits, D, 4) from token t0 on."""
    n_kv_heads, n, d = x.shape
    bits = codes.shape[2] // 2
    levels = tools.scratch("levels", x.shape, np.uint8)
    launch = Launch(encode_program(bits), "encode_interleaved", (n // TILE, n_kv_heads), THREADS)
    store = codes, codes.shape[1], scale, scale.shape[1]
    tools.driver.launch(launch, x, d, bits, levels, *store, *place(tools.driver, t0))


@functools.cache
def encode_program(bits: int = 1) -> Program:
    """encode.cu; ``bits`` of the codes of `encode_keys` and `encode_interleaved`."""
    macros = (
        ("MOST_CHANNELS", MOST_CHANNELS),
        ("GAUSS_STEP", str(GAUSS_STEP[bits])),
        ("LARGEST_FOUR", LARGEST_FOUR),
    )
    return Program(("exact", FOLDER / "encode"), macros, exact=True)


def _read_keys(codec: Any) -> Reader:
    a, bits = codec.arrays, int(codec.bits.max())
    arrays = a["planes"], a["scale"], a["centres"], a["centre_step"], codec.heads
    macros = ("KEY_BITS", bits), ("KEY_HEADS", int(codec.bits.min() < bits))
    return Reader("RowKeys<PlaneRow, 16>", FOLDER / "read", arrays, a["scale"].shape[1], codec.width, macros)


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
    return Reader("RowValues<InterleavedRow, 16>", FOLDER / "read", *store, rotation=codec.rotation)


WIDTHS, MOST_ROWS = (64, 128), 4  # of a head, as it is stored; of queries that tiled.cu takes
EXACT_TILES = 3  # at most, of a block that takes exact tokens


class Tiled(Fused):
    """tiled.cu."""

    file, most_rows = FOLDER / "tiled", MOST_ROWS

    def takes(self, driver: Driver, keys: Any, values: Any) -> bool:
        """On devices with whole tiles, where neither side is padded to its width."""
        if values.kind != "interleaved" or not driver.has_whole_tiles:
            return False
        return keys.width == keys.head_dim == values.head_dim and keys.width in WIDTHS

    def blocks_held(self, rows: int, keys: Reader, values: Reader) -> int:
        """How many registers there are to a thread."""
        bits = dict((*keys.macros, *values.macros))
        return 3 if rows == 1 and max(int(bits["KEY_BITS"]), int(bits["VALUE_BITS"])) <= 2 else 2

    def exact_tiles(self, tiles: int) -> int:
        """A block that takes exact tokens is not to end last."""
        return max(1, min(EXACT_TILES, tiles // 8))

    def macros(self, rows: int, keys: Reader, values: Reader) -> Macros:
        """Beside those of all pairs."""
        factor = f"{np.float32(1 / np.sqrt(keys.width)):.9g}f"
        held = self.blocks_held(rows, keys, values)
        return ("TILED", 1), ("BLOCKS_AT_ONCE", held), ("TURN_FACTOR", factor), ("LARGEST_FOUR", LARGEST_FOUR)

    def queries(self, keys: Any, q: Array) -> Queries:
        """As they come: the kernel rotates and rounds them. q (G, M, D)."""
        return Queries(q, keys.query_flips, keys.key_scale)


def _encode_keys(tools: Tools, codec: Any, x: Array, t0: int) -> None:
    codec.encode_by(functools.partial(encode_centres, tools), functools.partial(encode_keys, tools), x, t0)


def _encode_values(tools: Tools, codec: Any, x: Array, t0: int) -> None:
    codec.encode_by(functools.partial(encode_interleaved, tools), x, t0)


LOOPS = {
    "centred_planes": Loops(_read_keys, queries=_rounded, encode=_encode_keys, placed=True, fused=Tiled()),
    "interleaved": Loops(values=_read_values, encode=_encode_values, placed=True),
}
