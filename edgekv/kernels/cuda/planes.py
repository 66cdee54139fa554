"""Rotated keys and values in bit planes: the kernels of `onebit` and `bitplane`."""

from __future__ import annotations

import functools

import numpy as np

from edgekv.kernels.contract.planes import (
    FULL_VALUES,
    GAUSS_STEP,
    KEY_STEP,
    LARGEST_CORRECTION,
    PAIR_STEP,
)
from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.codec import MOST_CHANNELS, THREADS, TILE, Codec, Queries, Scores, check_width, per_head
from edgekv.kernels.cuda.program import Array, Program

GATHER = tuple(
    (name, f"{value}f")
    for name, value in (
        ("KEY_STEP", KEY_STEP),
        ("PAIR_STEP", PAIR_STEP),
        ("LARGEST_CORRECTION", LARGEST_CORRECTION),
    )
)


class PlaneKernels(Backend):
    def hadamard(self, x: Array, flips: Array, out: Array) -> None:
        rows, n, d = x.shape
        x, stride = per_head(x)
        self._transform("hadamard", x, n, stride, d, flips, out, out.shape[2], rows * n)

    def hadamard_back(self, x: Array, flips: Array, out: Array) -> None:
        rows, n, d = out.shape
        x = x if x.flags.c_contiguous else x.copy()
        stride = out.strides[0] // out.itemsize
        self._transform("hadamard_back", x, n, stride, d, flips, out, x.shape[2], rows * n)

    def _transform(
        self, name: str, x: Array, n: int, stride: int, d: int, flips: Array, out: Array, width: int, rows: int
    ) -> None:
        check_width(width)
        program = Program(("rotate",), (("WIDTH", width),), exact=True)
        factor = float(np.float32(1 / np.sqrt(width)))
        self.driver.launch(program, name, (rows,), max(width // 2, 1), x, n, stride, d, flips, factor, out)

    def encode_centres(self, x: Array, codes: Array, step: Array, t0: int) -> None:
        groups, n, d = x.shape
        check_width(d)
        self.driver.launch(
            *(encode_program(), "encode_centres", (n // TILE, groups), THREADS, x, d),
            *(codes, step, step.shape[1], t0 // TILE),
        )

    def encode_signs(self, x: Array, signs: Array, scale: Array, t0: int) -> None:
        groups, n, d = x.shape
        self.driver.launch(encode_program(), "sign_scale", (n, groups), 32, x, d, scale, scale.shape[1], t0)
        self.pack_signs(x, signs, t0)  # type: ignore[attr-defined]

    def pack_queries(self, q: Array, planes: Array, step: Array, rounded: Array) -> None:
        d = q.shape[2]
        self.driver.launch(
            *(encode_program(), "pack_queries", (step.size,), min(THREADS, d)),
            *(q, d, planes.shape[2], planes, step, rounded),
        )

    def scores_centred(
        self,
        q: Array,
        planes: Array,
        step: Array,
        signs: Array,
        scale: Array,
        centres: Array,
        centre_step: Array,
        t0: int,
        t1: int,
        s: Array | Scores,
        s0: int,
    ) -> None:
        arrays, macros = (signs, scale, centres, centre_step), (("PLANES", planes.shape[2]),)
        keys = Codec("CentredKeys", "centred", arrays, scale.shape[1], q.shape[2], macros, tiles=4)
        self.score(keys, Queries(q, planes, step), t0, t1, s, s0)

    def encode_quads(self, x: Array, codes: Array, scale: Array, t0: int) -> None:
        groups, n, d = x.shape
        bits = codes.shape[2] // 2
        levels = self.scratch("levels", x.shape, np.uint8)
        self.driver.launch(
            *(encode_program(bits), "encode_quads", (n // TILE, groups), THREADS, x, d, bits, levels),
            *(codes, codes.shape[1], scale, scale.shape[1], t0 // TILE),
        )

    def values_quads(
        self, p: Array | Scores, s0: int, codes: Array, scale: Array, t0: int, t1: int, out: Array
    ) -> None:
        macros = (("VALUE_BITS", codes.shape[2] // 2),)
        values = Codec("QuadValues", "quads", (codes, scale), scale.shape[1], codes.shape[3], macros, tiles=4)
        self.accumulate(p, s0, values, t0, t1, out)

    def encode_planes(self, x: Array, step: Array, planes: Array, t0: int) -> None:
        groups, n, d = x.shape
        self.driver.launch(
            *(encode_program(), "encode_planes", (n, groups), min(THREADS, d), x, d),
            *(step, planes.shape[2], planes, planes.shape[1], t0),
        )

    def attend_planes(
        self,
        p: Array | Scores,
        s0: int,
        t0: int,
        t1: int,
        q: Array,
        rounded: Array,
        lam: Array,
        signs: Array,
        scale: Array,
        fine: Array,
        top: Array,
        low: Array,
        value_scale: Array,
        threshold: float,
        n: int,
        out: Array,
        tail: Array,
        change: Array,
        counts: Array,
    ) -> None:
        p = self.probabilities(p)
        groups, rows, d = q.shape
        splits = self._splits(-(-t1 // TILE) - t0 // TILE, groups * n)
        partial = self.scratch("planes.sums", (groups, splits, rows, d))
        changes = self.scratch("planes.changes", (groups, splits, rows))
        counts.fill(0)
        change.fill(0)
        macros = (("ROWS", rows // n), ("KEY_DIM", d), *GATHER)
        self.driver.launch(
            *(Program(("gather",), macros), "attend_planes", (splits, groups * n), THREADS),
            *(
                p,
                p.strides[0] // 4,
                p.strides[1] // 4,
                s0,
                t0,
                t1,
                q,
                rounded,
                self.constant(lam),
                signs,
                scale,
                fine,
                top,
            ),
            *(low, value_scale, scale.shape[1], float(threshold), float(FULL_VALUES * threshold), n),
            *(partial, changes, tail, counts),
        )
        self.add_partial(partial, out)
        self.add_partial(changes, change)


@functools.cache
def encode_program(bits: int = 1) -> Program:
    """encode_planes.cu; ``bits`` of the codes of `encode_quads`."""
    macros = ("MOST_CHANNELS", MOST_CHANNELS), ("GAUSS_STEP", str(GAUSS_STEP[bits]))
    return Program(("scales", "encode_planes"), macros, exact=True)
