"""Attention over segments: in one launch for each pair of codecs where that can be, else through the scores.

A launch of attend.cu keeps no scores: blocks share the tokens, each with a running softmax. It takes one pair of
any codecs and two of exact tokens. Several launches, of mixed pairs, are merged by the sums of their weights.
Prompts, probabilities that are asked for, and tokens that stand anywhere take a buffer of scores.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from edgekv.kernels.contract.segment import Segment, Visible
from edgekv.kernels.cuda import planes as tiled_planes
from edgekv.kernels.cuda.backend import MOST_SHARES
from edgekv.kernels.cuda.counter import RECORDED_TOKENS, Counter, place
from edgekv.kernels.cuda.loops import Queries, Reader, loops_of, read_keys, read_values
from edgekv.kernels.cuda.planes import PlaneKernels
from edgekv.kernels.cuda.program import Array, Launch, Program
from edgekv.kernels.cuda.ranges import RangeKernels
from edgekv.kernels.cuda.tiles import MOST_ROWS, THREADS, n_rounds, tiles_at_once

ATTEND_BLOCKS = {1: 4}  # of attend.cu that a multiprocessor holds, by queries; else 2
MOST_EXACT = 2  # pairs of exact tokens that a launch takes beside the first one
MOST_EXACT_TOKENS = 2048  # of each; more make a first pair


class Part(NamedTuple):
    """A segment as the kernels take it, for queries ``q``."""

    segment: Segment
    keys: Reader
    q: Array
    values: Reader

    @property
    def joins(self) -> bool:
        """Whether attend.cu can take it."""
        s = self.segment
        return s.positions is None and self.keys.joins and self.values.joins

    @property
    def is_short(self) -> bool:
        """Exact tokens, so few that another pair's launch can take them along."""
        kinds = {self.segment.keys.kind, self.segment.values.kind}
        return kinds == {"f16"} and self.columns <= MOST_EXACT_TOKENS

    @property
    def most(self) -> int:
        """Where the tokens end at the latest, while a recording is replayed."""
        stop = self.segment.stop
        spare = RECORDED_TOKENS if isinstance(stop, Counter) else 0
        return min(int(stop) + spare, max(self.keys.capacity, int(stop)))

    @property
    def columns(self) -> int:
        """Of the scores."""
        return self.most - self.segment.first


class AttendKernels(PlaneKernels, RangeKernels):
    """Three functions that take codecs of `edgekv.kvcache`; the fourth is in append.py."""

    def attend(
        self,
        queries: Array,
        segments: Sequence[Segment],
        visible: Visible,
        out: Array,
        weights: Array | None = None,
        sinks: Array | None = None,
        cap: float | None = None,
    ) -> None:
        if sinks is not None:
            raise ValueError("sinks are not known to the kernels of CUDA: leave `sinks` out")
        n_heads, n, head_dim = queries.shape
        n_kv_heads = segments[0].keys.n_kv_heads
        shape = n_kv_heads, n_heads // n_kv_heads * n, head_dim
        q, result = queries.reshape(shape), out.reshape(shape)
        parts = [self._part(segment, q, cap) for segment in segments if segment.stop > segment.first]
        if not parts:
            out.fill(0)
        elif n == 1 and shape[1] <= MOST_ROWS and weights is None and all(part.joins for part in parts):
            self._attend_at_once(parts, visible, result)
        else:
            self._attend_through_scores(parts, visible, result, weights)

    def scores(self, codec: Any, queries: Array, t0: int, t1: int, s: Array) -> None:
        self.launch_scores(read_keys(codec), self._prepared(codec, queries), t0, t1, s)

    def sums(self, codec: Any, p: Array, t0: int, t1: int, out: Array) -> None:
        self.launch_values(read_values(codec), p, t0, t1, out)

    def _part(self, segment: Segment, q: Array, cap: float | None) -> Part:
        keys = read_keys(segment.keys)
        if cap is not None:
            keys = dataclasses.replace(keys, macros=(*keys.macros, ("SCORE_CAP", f"{np.float32(cap):.8e}f")))
        return Part(segment, keys, q, read_values(segment.values))

    def _prepared(self, keys: Any, q: Array) -> Queries:
        """The queries as the scores of these keys want them."""
        return loops_of(keys).queries(self, keys, q)

    def _attend_at_once(self, parts: list[Part], visible: Visible, out: Array) -> None:
        long, short = [part for part in parts if not part.is_short], [part for part in parts if part.is_short]
        launches = []
        while long or short:
            main = long.pop(0) if long else short.pop(0)
            launches.append((main, short[:MOST_EXACT]))
            short = short[MOST_EXACT:]
        n_kv_heads, rows, head_dim = out.shape
        ends = self.scratch("attend.whole", (len(launches), n_kv_heads, rows, 2))
        if len(launches) == 1:
            self._launch_attend(*launches[0], visible, out, ends[0])
            return
        several = self.scratch("attend.several", (len(launches), *out.shape))
        for (main, exact), each, end in zip(launches, several, ends, strict=True):
            self._launch_attend(main, exact, visible, each, end)
        launch = Launch(Program(("merge",)), "merge", (n_kv_heads * rows,), THREADS)
        self.driver.launch(launch, several, ends, len(launches), head_dim, out)

    def _launch_attend(self, main: Part, exact: list[Part], visible: Visible, out: Array, end: Array) -> None:
        """out (G, M, D) = attention over these parts alone; end (G, M, 2) = the maximum and the sum of weights."""
        n_kv_heads, rows, head_dim = out.shape
        keys, values = main.keys, main.values
        is_tiled = tiled_planes.takes(self.driver, main.segment.keys, main.segment.values, rows)
        held = tiled_planes.blocks_held(rows, keys, values) if is_tiled else ATTEND_BLOCKS.get(rows, 2)
        rounds = n_rounds(main.segment.first, main.segment.stop, tiles_at_once(rows, keys, values))
        n_tiles = n_rounds(main.segment.first, main.segment.stop, 1)
        exact_tiles = (
            tiled_planes.exact_tiles(n_tiles // self.splits(n_tiles, n_kv_heads, held)) if is_tiled else 1
        )
        exact_shares = [n_rounds(part.segment.first, part.most, exact_tiles) for part in exact]
        beside = sum(exact_shares)
        shares = min(self.splits(rounds, n_kv_heads, held, beside if is_tiled else 0), MOST_SHARES - beside)
        n_shares = shares + sum(exact_shares)
        ends = self.scratch("attend.ends", (n_kv_heads, n_shares, rows, 2))
        sums = self.scratch("attend.sums", (n_kv_heads, n_shares, rows, head_dim))
        stored = keys.capacity, values.capacity, *self._place(main.segment), shares
        seen = int(visible[0][0]), int(visible[1][0]), self.driver.shift
        program = attend_program(keys, values, rows, bool(exact), is_tiled)
        if is_tiled:
            rotated, queries = out, tiled_planes.queries(main.segment.keys, main.q)
            values = dataclasses.replace(values, arrays=(*values.arrays, values.rotation.flips), rotation=None)
        else:
            rotated = out if values.rotation is None else self.scratch("attend.rotated", out.shape)
            queries = self._prepared(main.segment.keys, main.q)
        arrays = (
            *self.query_arguments(queries),
            *self.store_arguments(keys, 5),
            *self.store_arguments(values, 4),
        )
        results = ends, sums, self._done(n_kv_heads), end, rotated, out
        launch = Launch(program, "attend", (n_shares, n_kv_heads), THREADS, early=True)
        self.driver.launch(launch, *arrays, *stored, *self._exact_arguments(exact, exact_shares), *seen, *results)
        if values.rotation is not None:
            self.rotate_back(values.rotation, rotated, out)

    def _exact_arguments(self, parts: list[Part], shares: list[int]) -> list[Any]:
        nothing = self.driver.still
        arguments = [parts[0].q if parts else nothing]
        for part in parts:
            s = part.segment
            arguments += [s.keys.arrays["half"], s.values.arrays["half"], part.keys.capacity, *self._place(s)]
        missing = nothing, nothing, 0, 0, 0, nothing, 0, nothing
        return [*arguments, *missing * (MOST_EXACT - len(parts)), shares[0] if shares else 0]

    def _place(self, segment: Segment) -> tuple[Any, ...]:
        """The first token; where they end, and their position, each with how far that moves."""
        return segment.first, *place(self.driver, segment.stop), *place(self.driver, segment.position)

    def _done(self, n_kv_heads: int) -> Array:
        """Zeros, left as zeros by every launch."""
        if "attend.done" not in self._scratch or self._scratch["attend.done"].size < n_kv_heads:
            self._scratch["attend.done"] = self.driver.zeros((n_kv_heads,), np.uint32)
        return self._scratch["attend.done"]

    def _attend_through_scores(
        self, parts: list[Part], visible: Visible, out: Array, weights: Array | None
    ) -> None:
        n_kv_heads, rows, _ = out.shape
        prepared = [self._prepared(part.segment.keys, part.q) for part in parts]
        ends = list(itertools.accumulate((part.columns for part in parts), initial=0))
        shape = n_kv_heads, rows, ends[-1]
        buffer = self.scratch("attend.scores", shape) if weights is None else weights
        columns = [buffer[:, :, a:b] for a, b in itertools.pairwise(ends)]
        for part, queries, s in zip(parts, prepared, columns, strict=True):
            self.launch_scores(part.keys, queries, part.segment.first, part.most, s, part.segment, visible)
        self.softmax(buffer, np.zeros(rows, np.int64), np.full(rows, shape[2]))
        out.fill(0)
        for part, p in zip(parts, columns, strict=True):
            self.launch_values(part.values, p, part.segment.first, part.most, out)


def attend_program(keys: Reader, values: Reader, rows: int, with_exact: bool, is_tiled: bool = False) -> Program:
    """attend.cu for a pair, beside exact tokens or not; is_tiled: on tensor cores."""
    pair = tiled_planes.FILES if is_tiled else (keys.file, values.file)
    files = dict.fromkeys((*pair, *(["rows"] if with_exact else []), "attend"))
    tiles = 1 if is_tiled else tiles_at_once(rows, keys, values)
    types = ("KEYS", keys.name), ("VALUES", values.name), ("KEY_DIM", keys.width), ("HEAD_DIM", values.width)
    sizes = ("ROWS", rows), ("TILES", tiles), ("MOST_SHARES", MOST_SHARES)
    exact = (("EXACT", 1),) if with_exact else ()
    more = tiled_planes.macros(rows, keys, values) if is_tiled else ()
    return Program(tuple(files), (*types, *sizes, *exact, *keys.macros, *values.macros, *more))
