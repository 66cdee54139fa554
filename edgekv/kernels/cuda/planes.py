"""Encoders of rotated keys and values, and queries in whole numbers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from edgekv.kernels.contract.planes import GAUSS_STEP, LARGEST_FOUR, REACH
from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.loops import Loops, Queries, Reader, Tools
from edgekv.kernels.cuda.program import Array, Launch, Program
from edgekv.kernels.cuda.tiles import MOST_CHANNELS, THREADS, TILE, check_width


class PlaneKernels(Backend):
    def encode_centres(self, x: Array, codes: Array, step: Array, t0: int) -> None:
        n_kv_heads, n, d = x.shape
        check_width(d)
        launch = Launch(encode_program(), "encode_centres", (n // TILE, n_kv_heads), THREADS)
        self.driver.launch(launch, x, d, codes, step, step.shape[1], t0 // TILE)

    def encode_keys(self, x: Array, planes: Array, scale: Array, t0: int) -> None:
        n_kv_heads, n, d = x.shape
        bits = planes.shape[2]
        launch = Launch(encode_program(bits), "encode_keys", (n, n_kv_heads), 32)
        self.driver.launch(launch, x, d, bits, planes, planes.shape[1], scale, scale.shape[1], t0)

    def round_queries(self, q: Array, whole: Array, step: Array, rounded: Array) -> None:
        """q (rows, D) as `edgekv.kernels.reference.planes.round_queries`; whole int32: twice those numbers."""
        d = q.shape[-1]
        launch = Launch(encode_program(), "round_queries", (step.size,), min(THREADS, d))
        self.driver.launch(launch, q, d, whole, step, rounded)

    def encode_interleaved(self, x: Array, codes: Array, scale: Array, t0: int) -> None:
        n_kv_heads, n, d = x.shape
        bits = codes.shape[2] // 2
        levels = self.scratch("levels", x.shape, np.uint8)
        launch = Launch(encode_program(bits), "encode_interleaved", (n // TILE, n_kv_heads), THREADS)
        store = codes, codes.shape[1], scale, scale.shape[1]
        self.driver.launch(launch, x, d, bits, levels, *store, t0 // TILE)

    def encode_planes(self, x: Array, step: Array, planes: Array, t0: int) -> None:
        n_kv_heads, n, d = x.shape
        launch = Launch(encode_program(), "encode_planes", (n, n_kv_heads), min(THREADS, d))
        self.driver.launch(launch, x, d, step, planes.shape[2], planes, planes.shape[1], t0)


@functools.cache
def encode_program(bits: int = 1) -> Program:
    """encode_planes.cu; ``bits`` of the codes of `encode_keys` and `encode_interleaved`."""
    macros = (
        ("MOST_CHANNELS", MOST_CHANNELS),
        ("GAUSS_STEP", str(GAUSS_STEP[bits])),
        ("LARGEST_FOUR", LARGEST_FOUR),
    )
    return Program(("scales", "encode_planes"), macros, exact=True)


def _read(codec: Any) -> Reader:
    a, bits = codec.arrays, int(codec.bits.max())
    arrays = a["planes"], a["scale"], a["centres"], a["centre_step"], codec.heads
    macros = ("KEY_BITS", bits), ("KEY_HEADS", int(codec.bits.min() < bits)), ("REACH", f"{REACH}f")
    return Reader("CentredKeys", "centred", arrays, a["scale"].shape[1], codec.width, macros, tiles=4 // bits)


def _whole(tools: Tools, codec: Any, q: Array) -> Queries:
    """Rotated, and in whole numbers."""
    x = tools.rotate(codec.rotation, q * tools.constant(codec.query_factors)[:, None])
    empty = tools.driver.empty
    whole, step, rounded = empty(x.shape, np.int32), empty(q.shape[:2], np.float32), empty(x.shape, np.float32)
    tools.round_queries(x, whole, step, rounded)
    return Queries(x, whole, step * tools.constant(codec.key_scale)[:, None], rounded)


CENTRED = Loops(_read, queries=_whole)
LOOPS = {"centred_planes": CENTRED}
