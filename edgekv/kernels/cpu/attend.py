"""Attention in one call: each head's blocks pass through scores, running softmax and value sum while in cache.

A work item is a KV head, or one of ``splits`` shares of its tokens. It walks the blocks of all segments and leaves
for each row (query head and token) the largest score, the sum of weights and the weighted values; the shares of a
head are then put together. What a block's codes mean is the codecs' affair: their loops are called by address
(`edgekv.kernels.cpu.loops`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgekv.kernels import threads
from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.segment import Segment, Visible
from edgekv.kernels.cpu.compile import Scalar, entry_jit, fast_jit
from edgekv.kernels.cpu.launch import TEAM, call_block, call_finish, call_prepare, share
from edgekv.kernels.cpu.loops import floats, ints, numbers
from edgekv.kernels.cpu.plan import make_plan
from edgekv.kernels.cpu.ranges import with_numbers
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.softmax import END, MINUS_INFINITY, PEAK, SHRINK, TOTAL, exp_of_negative, fill, weigh
from edgekv.types import F32

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
    segments = [with_numbers(segment) for segment in segments]
    made = make_plan(queries, segments, visible, out, weights, sinks, cap)
    if made.parallel:
        threads.run_parallel(_attend, TEAM.address, threads.count(), made.plan, made.runs)
    else:
        _attend(0, 1, made.plan, made.runs)


@entry_jit
def _attend(team: int, n_parts: int, plan: Any, runs: Any) -> None:
    p = plan[0]
    share(team, n_parts, p.n_groups * p.splits, _attend_items, (plan, runs))
    few = n_parts if p.any_kept else 1  # without kept scores a microsecond: less than waking threads again
    share(team, few, p.n_groups, _finish_groups, (plan, runs))


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
                    call_finish(run.finish, run.value_store, memory + run.sums_at, memory + p.out_at, p.rows)


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
            _copy(s, m * run.block, floats(p.kept), column, n)
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
        call_block(run.score, run.key_store, prepared, rows, g, t + done, few, s + 4 * done, gap, scratch)
        done += few


@fast_jit
def _add(run: Any, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    """Tokens t..t + n in as many calls as the values' loop needs."""
    done = 0
    while done < n:
        few = min(n - done, run.add_step - (t + done) % run.add_step)
        call_block(run.add, run.value_store, p + 4 * done, gap, rows, g, t + done, few, out, scratch)
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
def _copy(source: F32, i: int, target: F32, j: int, n: int) -> None:
    for k in range(n):
        put(target, j + k, get(source, i + k))


@fast_jit
def _prepare(g: int, memory: int, plan: Any, runs: Any, i: int) -> Scalar:
    """The address of the queries of head g as run i's keys want them."""
    p, run = plan[0], runs[i]
    q = p.queries + 4 * g * p.rows * p.head_dim
    if not run.prepare:
        return q
    call_prepare(run.prepare, run.key_store, q, p.rows, g, memory + run.prepared_at)
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
