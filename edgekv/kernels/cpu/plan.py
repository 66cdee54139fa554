"""What one attention will do, as records of numbers that compiled code reads: sizes and addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgekv.kernels import threads
from edgekv.kernels.contract.segment import Segment, Visible
from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.loops import AT_ONCE, Bound, Loop, address_of, aligned_size, bound, scratch_memory
from edgekv.kernels.cpu.softmax import END
from edgekv.types import F32

FEW_ROWS = 16  # whose scores of AT_ONCE tokens are small beside a first cache
PLAN = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("n_groups", "rows", "n_tokens", "head_dim", "splits", "n_units"),
            *("queries", "lo", "hi", "out", "sinks"),  # addresses
            *("lowest", "highest", "lowest_all", "highest_all"),  # positions that some, and that all, rows see
            *("memory", "item_bytes"),
            *("out_at", "scores_at", "scratch_at"),  # of a work item, from its start on
            *("kept", "kept_gap", "any_kept"),  # scores (n_groups, rows, gap) that outlive the walk
            "cap",  # the bits of a float32, 0: none
        )
    ]
)
RUN = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("key_store", "value_store"),  # addresses
            *("prepare", "score", "add", "finish"),  # addresses, 0: none
            *("first", "stop", "position", "positions", "positions_gap", "block"),
            *("score_step", "add_step"),  # tokens of one call, at most
            *("width", "prepared_at", "sums_at"),  # width 0: values are added to the result itself
            *("kept", "column"),
        )
    ]
)


class Plan(NamedTuple):
    """A plan, the run of each segment, and how to go about it; ``alive`` keeps what the addresses point to."""

    plan: npt.NDArray[Any]
    runs: npt.NDArray[Any]
    parallel: bool
    alive: tuple[Any, ...]


class PairPlan(NamedTuple):
    """How a pair of codecs is read for so many rows: all that stays the same from token to token."""

    keys: Bound
    values: npt.NDArray[np.int64]  # numbers of the store
    rows: int
    addresses: tuple[int, ...]  # of the stores, then of the loops, as RUN begins
    block: int
    steps: tuple[int, int]  # tokens that one call of score and of add takes
    width: int
    prepared_bytes: int
    sums_bytes: int
    scratch_bytes: int


def make_plan(
    queries: F32,
    segments: Sequence[Segment],
    visible: Visible,
    out: F32,
    weights: F32 | None,
    sinks: F32 | None,
    cap: float | None,
) -> Plan:
    """The plan of `attend`, whose arguments these are."""
    n_heads, n, head_dim = queries.shape
    n_groups = segments[0].keys.n_kv_heads
    rows = n_heads // n_groups * n
    lo, hi = visible
    out_at = place = aligned_size(4 * END * rows)  # behind each row's ends
    place += aligned_size(4 * rows * head_dim)
    runs = np.empty(len(segments), RUN)
    pairs: list[PairPlan] = []
    column = n_units = n_tokens = longest = scratch_bytes = 0
    for i, segment in enumerate(segments):
        _, _, first, stop, position, positions = segment
        pair = _pair_plan(segment, rows)
        kept, block, width = weights is not None, pair.block, pair.width
        sums_at = place + pair.prepared_bytes
        where = (0, 0) if positions is None else (address_of(positions), positions.shape[1])
        runs[i] = (
            *(*pair.addresses, first, stop, position, *where, block, *pair.steps),
            *(width, place, sums_at, kept, column),
        )
        pairs.append(pair)
        place = sums_at + pair.sums_bytes
        column += stop - first if kept else 0
        n_tokens += stop - first
        n_units += -(-stop // block) - first // block
        longest = max(longest, block)
        scratch_bytes = max(scratch_bytes, pair.scratch_bytes)
    work = n_groups * rows * head_dim * n_tokens
    splits = launch.token_splits(n_groups, work)
    scratch_at = place + aligned_size(4 * rows * longest)
    item_bytes = scratch_at + scratch_bytes
    sink = np.full(n_heads * n, -np.inf, np.float32) if sinks is None else np.repeat(sinks, n).astype(np.float32)
    plan = np.empty(1, PLAN)
    plan[0] = (
        *(n_groups, rows, n, head_dim, splits, n_units),
        *(address_of(queries), address_of(lo), address_of(hi), address_of(out), address_of(sink)),
        *(lo[0], hi[-1], lo[-1], hi[0]),
        *(scratch_memory("attend.items", n_groups * splits * item_bytes), item_bytes),
        *(out_at, place, scratch_at),
        *(0 if weights is None else address_of(weights), column, column > 0),
        0 if cap is None else int(np.float32(cap).view(np.int32)),
    )
    parallel = work >= launch.MIN_PARALLEL_WORK and threads.count() > 1 and n_groups * splits > 1
    return Plan(plan, runs, parallel, (pairs, queries, visible, sink))


def _pair_plan(segment: Segment, rows: int) -> PairPlan:
    """The pair's reader, remembered with the values until their arrays, or the keys', are others."""
    keys, values = bound(segment.keys), bound(segment.values)
    known: PairPlan | None = values.pair
    if known is None or known.rows != rows or known.keys is not keys:
        known = values.pair = _make_pair_plan(keys, values, segment, rows)
    return known


def _make_pair_plan(keys: Bound, values: Bound, segment: Segment, rows: int) -> PairPlan:
    k, v = keys.loops, values.loops
    loops = k.prepare, k.score, v.add, v.finish
    width = v.width(segment.values) if v.finish else 0
    scratch_bytes = max(k.scratch(segment.keys, rows), v.scratch(segment.values, rows))
    steps = max(k.block(segment.keys), k.at_once), max(v.block(segment.values), v.at_once)
    least = max(k.block(segment.keys), v.block(segment.values))
    return PairPlan(
        *(keys, values.numbers, rows),
        (address_of(keys.numbers), address_of(values.numbers), *map(_address, loops)),
        *(max(least, AT_ONCE) if rows <= FEW_ROWS else least, steps, width),
        prepared_bytes=aligned_size(k.prepared(segment.keys, rows)),
        sums_bytes=aligned_size(4 * rows * width),
        scratch_bytes=aligned_size(scratch_bytes),
    )


def _address(loop: Loop | None) -> int:
    return 0 if loop is None else loop.address
