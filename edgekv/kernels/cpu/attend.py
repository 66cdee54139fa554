"""Attention in one call: each head's blocks pass through scores, running softmax and value sum while in cache.

A work item is a KV head, or one of ``splits`` shares of its tokens. It walks the blocks of all segments and leaves
for each row (query head and token) the largest score, the sum of weights and the weighted values; the shares of a
head are then put together. What a block's codes mean is the codecs' affair: their loops are called by address
(`edgekv.kernels.cpu.loops`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgekv.kernels import threads
from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.compile import Args, Scalar, entry_jit, fast_jit, jit
from edgekv.kernels.cpu.launch import PARALLEL_FOR, parallel_for
from edgekv.kernels.cpu.loops import (
    AT_ONCE,
    Bound,
    address_of,
    aligned_size,
    bound,
    call,
    floats,
    ints,
    kernels_of,
    numbers,
    scratch_memory,
)
from edgekv.kernels.cpu.rows import Decoded
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.softmax import END, MINUS_INFINITY, PEAK, SHRINK, TOTAL, exp_of_negative, fill, weigh
from edgekv.kernels.interface import BLOCK, Segment, Visible
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
    """Returns the plan of `attend`, whose arguments these are: queries and out (H, n, D)."""
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
        (address_of(keys.numbers), address_of(values.numbers), *(loop.address if loop else 0 for loop in loops)),
        *(max(least, AT_ONCE) if rows <= FEW_ROWS else least, steps, width),
        prepared_bytes=aligned_size(k.prepared(segment.keys, rows)),
        sums_bytes=aligned_size(4 * rows * width),
        scratch_bytes=aligned_size(scratch_bytes),
    )


ZERO, ONE, TWO, THIRD = np.array([0, 1, 2, 1 / 3], np.float32)
NEAR_ZERO = np.float32(0.05)  # below, tanh(x) = x - x ** 3 / 3 to a millionth


def attend(
    queries: F32,
    segments: Sequence[Segment],
    visible: Visible,
    out: F32,
    weights: F32 | None = None,
    sinks: F32 | None = None,
    cap: float | None = None,
) -> None:
    """Attends: queries and out (H, n, D), weights (G, R * n, tokens); see `interface.Kernels.attend`."""
    segments = [with_numbers(segment) for segment in segments]
    made = make_plan(queries, segments, visible, out, weights, sinks, cap)
    if made.parallel:
        threads.run_parallel(_attend, PARALLEL_FOR.address, threads.count(), made.plan, made.runs)
    else:
        _attend(0, 1, made.plan, made.runs)


@entry_jit
def _attend(team: int, n_parts: int, plan: Any, runs: Any) -> None:
    p = plan[0]
    parallel_for(team, n_parts, p.n_groups * p.splits, _attend_items, (plan, runs))
    few = n_parts if p.any_kept else 1  # without kept scores a microsecond: less than waking threads again
    parallel_for(team, few, p.n_groups, _finish_groups, (plan, runs))


@fast_jit
def _attend_items(first: int, last: int, plan: Any, runs: Any) -> None:
    p = plan[0]
    for item in range(first, last):
        g, split = item // p.splits, item % p.splits
        memory = p.memory + item * p.item_bytes
        ends, out = floats(memory), floats(memory + p.out_at)
        for m in range(p.rows):  # a sink is the first score, of the first share
            put(ends, END * m + PEAK, MINUS_INFINITY if split else get(floats(p.sinks), g * p.rows + m))
            put(ends, END * m + TOTAL, ONE)
        fill(out, 0, p.rows * p.head_dim, ZERO)
        for i in range(len(runs)):
            run = runs[i]
            if run.width:
                fill(floats(memory + run.sums_at), 0, p.rows * run.width, ZERO)
        for i in range(len(runs)):
            run = runs[i]
            first_block, last_block = _share_of(split, i, plan, runs)
            if first_block < last_block:
                _walk(first_block, last_block, g, memory, plan, runs, i)
                if run.width:
                    call(run.finish, (run.value_store, memory + run.sums_at, memory + p.out_at, p.rows))


@fast_jit
def _share_of(split: int, i: int, plan: Any, runs: Any) -> tuple[int, int]:
    """First and last + 1 of the blocks of run i that a share of a head's blocks has."""
    p, run, passed = plan[0], runs[i], 0
    for k in range(i):
        passed += (runs[k].stop + runs[k].block - 1) // runs[k].block - runs[k].first // runs[k].block
    base, after = run.first // run.block, (run.stop + run.block - 1) // run.block
    start, end = p.n_units * split // p.splits, p.n_units * (split + 1) // p.splits
    return max(base + start - passed, base), min(base + end - passed, after)


@fast_jit
def _walk(block: int, last: int, g: int, memory: int, plan: Any, runs: Any, i: int) -> None:
    """Blocks block..last of run i through scores, running softmax and value sum."""
    p, run = plan[0], runs[i]
    prepared = _prepare(g, memory, plan, runs, i)
    ends, own, scratch = floats(memory), memory + p.scores_at, memory + p.scratch_at
    s, sums = floats(own), memory + (run.sums_at if run.width else p.out_at)
    for at in range(block, last):
        t = max(run.first, at * run.block)
        n = min(run.stop, (at + 1) * run.block) - t
        position = run.position + t - run.first
        if run.positions == 0 and (position + n <= p.lowest or position >= p.highest):
            for m in range(p.rows if run.kept else 0):
                column = (g * p.rows + m) * p.kept_gap + run.column + t - run.first
                fill(floats(p.kept), column, column + n, MINUS_INFINITY)
            continue
        # asked here: a call that passes arrays costs as much as scores do
        in_sight = run.positions == 0 and position >= p.lowest_all and position + n <= p.highest_all
        _score(run, prepared, p.rows, g, t, n, own, run.block, scratch)
        if p.cap:
            _bound(s, run.block, n, p.rows, np.int32(p.cap).view(np.float32))
        if not in_sight:
            _mask(s, run.block, g, t, n, position, plan, runs, i)
        for m in range(p.rows if run.kept else 0):
            column = (g * p.rows + m) * p.kept_gap + run.column + t - run.first
            for k in range(n):
                put(floats(p.kept), column + k, get(s, m * run.block + k))
        whole = (n + BLOCK - 1) // BLOCK * BLOCK
        for m in range(p.rows if n < whole else 0):
            fill(s, m * run.block + n, m * run.block + whole, MINUS_INFINITY)
        if weigh(own, run.block, p.rows, whole, memory):
            for m in range(p.rows):
                if get(ends, END * m + SHRINK) != ONE:
                    _rescale(m, get(ends, END * m + SHRINK), memory, plan, runs)
        _add(run, own, run.block, p.rows, g, t, n, sums, scratch)


@fast_jit
def _score(run: Any, prepared: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    """Tokens t..t + n in as many calls as the keys' loop needs."""
    done = 0
    while done < n:
        few = min(n - done, run.score_step - (t + done) % run.score_step)
        call(run.score, (run.key_store, prepared, rows, g, t + done, few, s + 4 * done, gap, scratch))
        done += few


@fast_jit
def _add(run: Any, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    """Tokens t..t + n in as many calls as the values' loop needs."""
    done = 0
    while done < n:
        few = min(n - done, run.add_step - (t + done) % run.add_step)
        call(run.add, (run.value_store, p + 4 * done, gap, rows, g, t + done, few, out, scratch))
        done += few


@fast_jit
def _bound(s: F32, gap: int, n: int, rows: int, cap: Scalar) -> None:
    """n scores of each row, gap elements apart, = cap * tanh(they / cap)."""
    inverse = ONE / cap
    for m in range(rows):
        for k in range(m * gap, m * gap + n):
            x = get(s, k)
            part = abs(x) * inverse
            small = exp_of_negative(-TWO * part)
            tanh = part - part * part * part * THIRD if part < NEAR_ZERO else (ONE - small) / (ONE + small)
            put(s, k, np.copysign(cap * tanh, x))


@fast_jit
def _prepare(g: int, memory: int, plan: Any, runs: Any, i: int) -> Scalar:
    """The address of the queries of head g as run i's keys want them."""
    p, run = plan[0], runs[i]
    q = p.queries + 4 * g * p.rows * p.head_dim
    if not run.prepare:
        return q
    call(run.prepare, (run.key_store, q, p.rows, g, memory + run.prepared_at))
    return memory + run.prepared_at


@fast_jit
def _mask(s: F32, gap: int, g: int, t: int, n: int, position: int, plan: Any, runs: Any, i: int) -> None:
    """-inf for the tokens that a row's query does not see."""
    p, run = plan[0], runs[i]
    lo, hi, where = numbers(p.lo), numbers(p.hi), ints(run.positions)
    for m in range(p.rows):
        j = m % p.n_tokens
        for k in range(n):
            at = np.int64(get(where, g * run.positions_gap + t + k)) if run.positions else position + k
            if at < get(lo, j) or at >= get(hi, j):
                put(s, m * gap + k, MINUS_INFINITY)


@fast_jit
def _rescale(m: int, factor: float, memory: int, plan: Any, runs: Any) -> None:
    """Row m's sums so far, times factor."""
    p = plan[0]
    _scale(floats(memory + p.out_at), m * p.head_dim, p.head_dim, factor)
    for i in range(len(runs)):
        if runs[i].width:
            _scale(floats(memory + runs[i].sums_at), m * runs[i].width, runs[i].width, factor)


@fast_jit
def _scale(x: F32, start: int, n: int, factor: float) -> None:
    for d in range(start, start + n):
        put(x, d, get(x, d) * factor)


@fast_jit
def _finish_groups(first: int, last: int, plan: Any, runs: Any) -> None:
    """Puts a head's shares together, and makes weights sum to 1."""
    p = plan[0]
    for g in range(first, last):
        memory = p.memory + g * p.splits * p.item_bytes
        ends, out, result = floats(memory), floats(memory + p.out_at), floats(p.out + 4 * g * p.rows * p.head_dim)
        for m in range(p.rows):
            _merge(m, memory, plan)
        for i in range(len(runs)):
            if runs[i].kept:
                _exponentiate(g, ends, plan, runs, i)
        for m in range(p.rows):
            total = get(ends, END * m + TOTAL)
            factor = ONE / total if total > ZERO else ZERO
            for d in range(m * p.head_dim, (m + 1) * p.head_dim):
                put(result, d, get(out, d) * factor)
            if p.any_kept:
                _scale(floats(p.kept), (g * p.rows + m) * p.kept_gap, p.kept_gap, factor)


@fast_jit
def _merge(m: int, memory: int, plan: Any) -> None:
    """Row m of a head's shares, added to that of the first, which starts at ``memory``."""
    p = plan[0]
    ends, out = floats(memory), floats(memory + p.out_at)
    for split in range(1, p.splits):
        other = memory + split * p.item_bytes
        theirs, peak = floats(other), get(ends, END * m + PEAK)
        their_peak = get(theirs, END * m + PEAK)
        top = max(peak, their_peak)
        if top == MINUS_INFINITY:
            continue
        ours, other_factor = exp_of_negative(peak - top), exp_of_negative(their_peak - top)
        put(ends, END * m + PEAK, top)
        put(ends, END * m + TOTAL, get(ends, END * m + TOTAL) * ours + get(theirs, END * m + TOTAL) * other_factor)
        sums = floats(other + p.out_at)
        for d in range(m * p.head_dim, (m + 1) * p.head_dim):
            put(out, d, get(out, d) * ours + get(sums, d) * other_factor)


@fast_jit
def _exponentiate(g: int, ends: F32, plan: Any, runs: Any, i: int) -> None:
    """Kept scores become weights."""
    p, run = plan[0], runs[i]
    kept, n = floats(p.kept), run.stop - run.first
    for m in range(p.rows):
        start = (g * p.rows + m) * p.kept_gap + run.column
        peak = get(ends, END * m + PEAK)
        if peak == MINUS_INFINITY:
            fill(kept, start, start + n, ZERO)
            continue
        for k in range(start, start + n):
            put(kept, k, exp_of_negative(get(kept, k) - peak))


def with_numbers(segment: Segment) -> Segment:
    """Returns the segment, codecs without loops replaced by their tokens in float32."""
    keys, values = segment.keys, segment.values
    if "cpu" in keys.backends and "cpu" in values.backends:
        return segment
    span = segment.first, segment.stop
    return segment._replace(keys=as_numbers(keys, *span), values=as_numbers(values, *span))


def as_numbers(codec: Any, t0: int, t1: int) -> Any:
    """Returns tokens t0..t1 of a codec without loops as it decodes them; any other codec itself."""
    return codec if "cpu" in codec.backends else Decoded(codec, t0, t1)


def scores(codec: Any, queries: F32, t0: int, t1: int, s: F32) -> None:
    """Fills s (G, M, t1 - t0) with scores of queries (G, M, D) and tokens t0..t1."""
    codec = as_numbers(codec, t0, t1)
    state = bound(codec)
    loops = state.loops
    assert loops.score is not None
    queries = np.ascontiguousarray(queries)
    n_groups, rows, head_dim = queries.shape
    prepared = aligned_size(loops.prepared(codec, rows))
    item_bytes = prepared + aligned_size(loops.scratch(codec, rows))
    store, block = state.numbers, loops.block(codec)
    pieces = -(-t1 // block) - t0 // block
    work = queries.size * (t1 - t0)
    splits = min(threads.count(), max(pieces, 1)) if work >= launch.MIN_PARALLEL_WORK else 1
    args = (
        *(rows, head_dim, splits, t0, t1, block, address_of(store), address_of(queries)),
        *(loops.prepare.address if loops.prepare else 0, loops.score.address, address_of(s[0, 0])),
        *(s.strides[0] // 4, s.strides[1] // 4, scratch_memory("ranges.scores", n_groups * splits * item_bytes)),
        *(item_bytes, prepared),
    )
    launch.run(_score_items, n_groups * splits, work, args)


@fast_jit
def _score_items(first: int, last: int, args: Args) -> None:
    rows, head_dim, splits, t0, t1, block, store, queries, prepare, score, s, gap_g, gap_m = args[:13]
    memory, item_bytes, prepared_bytes = args[13:]
    for item in range(first, last):
        g, split = item // splits, item % splits
        mine = memory + item * item_bytes
        prepared = queries + 4 * g * rows * head_dim
        if prepare:
            call(prepare, (store, prepared, rows, g, mine))
            prepared = mine
        base = t0 // block
        n_blocks = (t1 + block - 1) // block - base
        for b in range(base + n_blocks * split // splits, base + n_blocks * (split + 1) // splits):
            t = max(t0, b * block)
            n = min(t1, (b + 1) * block) - t
            at = s + 4 * (g * gap_g + t - t0)
            call(score, (store, prepared, rows, g, t, n, at, gap_m, mine + prepared_bytes))


FEW_TOKENS = 8  # more are encoded codec by codec
PART = 64  # tokens of a head that are encoded together


def append(keys: Any, values: Any, k: F32, v: F32, t0: int) -> None:
    """Stores k and v (G, n, D) as tokens t0.. of two codecs."""
    if k.shape[1] > FEW_TOKENS or not kernels_of(keys).put or not kernels_of(values).put:
        encode(keys, k, t0)
        encode(values, v, t0)
        return
    k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
    n_groups, n, head_dim = k.shape
    one, other = bound(keys), bound(values)
    put_key, put_value = one.loops.put, other.loops.put
    assert put_key is not None
    assert put_value is not None
    n_bytes = aligned_size(max(one.loops.put_scratch(keys), other.loops.put_scratch(values)))
    args = (
        *(address_of(one.numbers), address_of(other.numbers), put_key.address, put_value.address),
        *(address_of(k), address_of(v), n, head_dim, t0, scratch_memory("append", n_groups * n_bytes), n_bytes),
    )
    launch.run(_append_heads, n_groups, k.size * max(1, n_bytes), args)


def encode(codec: Any, x: F32, t0: int) -> None:
    """Stores x (G, n, D) as tokens t0..: by the codec's loops, or else as its `encode` says."""
    loops = kernels_of(codec)
    if loops.encode:
        loops.encode(codec, x, t0)
    elif loops.put:
        n_groups, n, head_dim = x.shape
        n_bytes, n_parts = aligned_size(loops.put_scratch(codec)), -(-n // PART)
        memory = scratch_memory("append", n_groups * n_parts * n_bytes)
        x = np.ascontiguousarray(x)
        store = address_of(bound(codec).numbers)
        args = store, loops.put.address, address_of(x), n, head_dim, t0, memory, n_bytes
        launch.run(_encode_parts, n_groups * n_parts, x.size, args)
    else:
        codec.encode(x, t0)


@jit
def _encode_parts(first: int, last: int, args: Args) -> None:
    store, put, x, n, head_dim, t0, memory, n_bytes = args
    n_parts = (n + PART - 1) // PART
    for item in range(first, last):
        g, t = item // n_parts, item % n_parts * PART
        row = x + 4 * (g * n + t) * head_dim
        call(put, (store, row, min(PART, n - t), g, t0 + t, memory + item * n_bytes))


@jit
def _append_heads(first: int, last: int, args: Args) -> None:
    key_store, value_store, put_key, put_value, k, v, n, head_dim, t0, memory, n_bytes = args
    for g in range(first, last):
        row, scratch = 4 * g * n * head_dim, memory + g * n_bytes
        call(put_key, (key_store, k + row, n, g, t0, scratch))
        call(put_value, (value_store, v + row, n, g, t0, scratch))
