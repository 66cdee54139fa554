"""What one attention will do, as records of numbers that compiled code reads: sizes and addresses."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgekv.kernels import threads
from edgekv.kernels.contract.attention import F32
from edgekv.kernels.contract.segment import Segment, Visible
from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.codecs import CHOSEN, KEYS, VALUES
from edgekv.kernels.cpu.loops import Loop, Loops, address_of, aligned_size, scratch_memory, store_numbers

PLAN = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("n_groups", "rows", "n_tokens", "head_dim", "splits", "n_units"),
            *("queries", "lo", "hi", "out"),  # addresses
            *("lowest", "highest", "lowest_all", "highest_all"),  # positions that some, and that all, rows see
            *("memory", "item_bytes", "out_at", "scores_at", "scratch_at"),  # of a work item, from its start on
            *("kept", "kept_gap", "any_kept"),  # scores (n_groups, rows, gap) that outlive the walk
        )
    ]
)
RUN = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("key_store", "value_store", "prepare", "score", "add", "finish", "again"),  # addresses, 0: none
            *("first", "stop", "position", "positions", "positions_gap", "masked", "block"),
            *("width", "prepared_at", "sums_at"),  # width 0: values are added to the result itself
            *("kept", "column"),
        )
    ]
)


class Made(NamedTuple):
    """A plan, the run of each segment, and how to go about it. ``alive`` keeps what the addresses point to."""

    plan: npt.NDArray[Any]
    runs: npt.NDArray[Any]
    n_items: int
    n_groups: int
    parallel: bool
    alive: list[Any]


def make_plan(queries: F32, segments: Sequence[Segment], visible: Visible, out: F32, weights: F32 | None) -> Made:
    n_heads, n, head_dim = queries.shape
    n_groups = segments[0].keys.n_kv_heads
    rows = n_heads // n_groups * n
    lo, hi = visible
    place = 8 * rows  # ends: the largest score and the sum of weights of each row
    out_at = place = aligned_size(place)
    place += aligned_size(4 * rows * head_dim)
    runs = np.empty(len(segments), RUN)
    alive: list[Any] = [queries, visible]
    column = n_units = n_tokens = longest = loop_scratch = 0
    for i, segment in enumerate(segments):
        keys, values = _loops(segment)
        positions, first, stop = segment.positions, segment.first, segment.stop
        if segment.chosen is not None:
            first, stop = 0, int(segment.chosen[1][0])
        block = max(keys.block(segment.keys), values.block(segment.values))
        width = values.width(segment.values) if values.finish else 0
        prepared_at, kept = place, weights is not None or values.again is not None
        place += aligned_size(keys.prepared(segment.keys, rows))
        sums_at = place
        place += aligned_size(4 * rows * width)
        stores = _store(keys, segment, segment.keys), _store(values, segment, segment.values)
        alive += stores
        runs[i] = (
            *map(address_of, stores),
            *map(_address, (keys.prepare, keys.score, values.add, values.finish, values.again)),
            *(first, stop, segment.position),
            *((0, 0) if positions is None else (address_of(positions), positions.shape[1])),
            *(segment.chosen is None, block, width, prepared_at, sums_at, kept, column),
        )
        column += stop - first if kept else 0
        n_tokens += stop - first
        n_units += -(-stop // block) - first // block
        longest = max(longest, block)
        scratches = keys.scratch(segment.keys, rows), values.scratch(segment.values, rows)
        loop_scratch = max(loop_scratch, *scratches)
    work = n_groups * rows * head_dim * n_tokens
    parallel = work >= launch.MIN_PARALLEL_WORK and threads.count() > 1
    splits = threads.count() // gcd(n_groups, threads.count()) if parallel else 1
    scores_at = place
    scratch_at = scores_at + aligned_size(4 * rows * longest)
    item_bytes = scratch_at + aligned_size(loop_scratch)
    kept_address = 0
    if weights is not None:
        kept_address = address_of(weights)
    elif column:
        kept_address = scratch_memory("scores", 4 * n_groups * rows * column)
    plan = np.empty(1, PLAN)
    plan[0] = (
        *(n_groups, rows, n, head_dim, splits, n_units),
        *(address_of(queries), address_of(lo), address_of(hi), address_of(out)),
        *(lo[0], hi[-1], lo[-1], hi[0]),
        *(scratch_memory("items", n_groups * splits * item_bytes), item_bytes, out_at, scores_at, scratch_at),
        *(kept_address, column, column > 0),
    )
    return Made(plan, runs, n_groups * splits, n_groups, parallel and n_groups * splits > 1, alive)


def _loops(segment: Segment) -> tuple[Loops, Loops]:
    if segment.chosen is not None:
        return CHOSEN[segment.keys.kind]
    return KEYS[segment.keys.kind], VALUES[segment.values.kind]


def _store(loops: Loops, segment: Segment, codec: Any) -> npt.NDArray[np.int64]:
    if segment.chosen is None:
        return store_numbers(loops, codec)
    tokens, counts = segment.chosen
    gap = tokens.strides[0] // tokens.itemsize
    return np.array((*loops.store(codec), address_of(tokens), gap, counts[0]), np.int64)


def _address(loop: Loop | None) -> int:
    return 0 if loop is None else loop.address
