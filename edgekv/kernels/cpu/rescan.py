"""The scan of two stages: estimates of all tokens' scores say which blocks can matter, and only those are scored.

Estimates (`estimates`) are of 16 tokens each. Those of all shares of a head together bound the sum of weights; a
token matters whose weight can be the threshold's part of it. See `reference.gather`.
"""

from typing import Any

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.planes import CENTRE, MOST_SAMPLES
from edgekv.kernels.cpu.calls import call_block
from edgekv.kernels.cpu.estimates import PER_BLOCK
from edgekv.kernels.cpu.jit import Scalar, fast_jit, inline_jit
from edgekv.kernels.cpu.loops import floats, ints, numbers
from edgekv.kernels.cpu.scalar import get, maximum, put
from edgekv.kernels.cpu.softmax import (
    END,
    ESTIMATED,
    KEPT_PEAK,
    MINUS_INFINITY,
    PEAK,
    SHRINK,
    TOTAL,
    exp_of_negative,
    fill,
    largest,
)
from edgekv.types import F32

ZERO, ONE, INFINITY = np.array([0, 1, np.inf], np.float32)


@inline_jit
def estimates_of(block: int, g: int, plan: Any, runs: Any, i: int) -> Scalar:
    """The address of what is estimated of a block of run i, for the head's first row."""
    p, run = plan[0], runs[i]
    column = run.estimates + PER_BLOCK * (block - run.first // BLOCK)
    return p.estimates + 4 * (g * p.rows * p.estimates_gap + column)


@fast_jit
def share_of(split: int, i: int, plan: Any, runs: Any) -> tuple[int, int]:
    """First and last + 1 of the blocks of run i that a share of a head's blocks has."""
    p, run, passed = plan[0], runs[i], 0
    for k in range(i):
        passed += (runs[k].stop + runs[k].block - 1) // runs[k].block - runs[k].first // runs[k].block
    base, after = run.first // run.block, (run.stop + run.block - 1) // run.block
    start, end = p.n_units * split // p.splits, p.n_units * (split + 1) // p.splits
    return max(base + start - passed, base), min(base + end - passed, after)


@fast_jit
def estimate(t: int, n: int, g: int, prepared: int, memory: int, plan: Any, runs: Any, i: int) -> None:
    """Estimates of tokens t..t + n; the largest raises a row's peak, its ends as `softmax.weigh` leaves them."""
    p, run = plan[0], runs[i]
    target, ends, first = estimates_of(t // BLOCK, g, plan, runs, i), floats(memory), t // BLOCK * BLOCK // CENTRE
    call_block(
        *(run.estimate, run.key_store, prepared, p.rows, g, t, n, target, p.estimates_gap),
        memory + p.scratch_at,
    )
    for m in range(p.rows):
        row, end, peak = floats(target + 4 * m * p.estimates_gap), END * m, get(ends, END * m + PEAK)
        a, b = _in_sight(t, n, m, plan, runs, i)
        for c in range(a // CENTRE, (b + CENTRE - 1) // CENTRE if a < b else 0):
            peak = maximum(peak, get(row, 2 * (c - first)))
        shrink = ONE if peak == get(ends, end + PEAK) else exp_of_negative(get(ends, end + PEAK) - peak)
        put(ends, end + PEAK, peak)
        put(ends, end + TOTAL, get(ends, end + TOTAL) * shrink)
        put(ends, end + SHRINK, shrink)


@fast_jit
def add_estimates(t: int, n: int, g: int, memory: int, plan: Any, runs: Any, i: int) -> None:
    """The weights of tokens t..t + n, as they are estimated, to those of the rows."""
    p = plan[0]
    target, ends, first = estimates_of(t // BLOCK, g, plan, runs, i), floats(memory), t // BLOCK * BLOCK // CENTRE
    for m in range(p.rows):
        row, total = floats(target + 4 * m * p.estimates_gap), ZERO
        a, b = _in_sight(t, n, m, plan, runs, i)
        for c in range(a // CENTRE, (b + CENTRE - 1) // CENTRE if a < b else 0):
            n_seen = min(b, (c + 1) * CENTRE) - max(a, c * CENTRE)
            total += np.float32(n_seen) * exp_of_negative(get(row, 2 * (c - first)) - get(ends, END * m + PEAK))
        put(ends, END * m + ESTIMATED, get(ends, END * m + ESTIMATED) + total)


@inline_jit
def _in_sight(t: int, n: int, m: int, plan: Any, runs: Any, i: int) -> tuple[int, int]:
    """Of tokens t..t + n those that row m sees; none: the end is not above the start."""
    p, run = plan[0], runs[i]
    j, shift = m % p.n_tokens, run.first - run.position
    return max(t, get(numbers(p.lo), j) + shift), min(t + n, get(numbers(p.hi), j) + shift)


@fast_jit
def _put_limits(g: int, limits: F32, plan: Any, threshold: Scalar) -> None:
    """limits[m] = the score whose weight is the threshold's part of all of row m's, as far as is known."""
    p = plan[0]
    for m in range(p.rows):
        peak, total = MINUS_INFINITY, ZERO
        for split in range(p.splits):
            peak = maximum(peak, get(floats(p.memory + (g * p.splits + split) * p.item_bytes), END * m + PEAK))
        if peak == MINUS_INFINITY:
            put(limits, m, INFINITY)
            continue
        for split in range(p.splits):
            ends = floats(p.memory + (g * p.splits + split) * p.item_bytes)
            weights = get(ends, END * m + TOTAL) + get(ends, END * m + ESTIMATED)
            total += weights * exp_of_negative(get(ends, END * m + PEAK) - peak)
        put(limits, m, peak + np.float32(np.log(threshold * total)))


@fast_jit
def rescan_items(first: int, last: int, plan: Any, runs: Any) -> None:
    """Each share's scores of what can matter, by the estimates of all shares."""
    p = plan[0]
    for item in range(first, last):
        g, split = item // p.splits, item % p.splits
        memory = p.memory + item * p.item_bytes
        limits, counts = floats(memory + p.limits_at), ints(memory + p.limits_at + 4 * p.rows)
        for m in range(p.rows):
            put(floats(memory), END * m + KEPT_PEAK, MINUS_INFINITY)
        for i in range(len(runs)):
            run, scanned = runs[i], 0
            if run.second_stage:
                _put_limits(g, limits, plan, np.int32(run.threshold).view(np.float32))
                start, end = share_of(split, i, plan, runs)
                for block in range(start, end):
                    t = max(run.first, block * run.block)
                    n = min(run.stop, (block + 1) * run.block) - t
                    scanned += _rescan(t, n, g, limits, memory, plan, runs, i)
                scanned += _samples(start, end, g, limits, plan, runs, i)
            put(counts, i, np.int32(scanned))


@fast_jit
def raise_to_kept(m: int, memory: int, plan: Any) -> None:
    """Takes the largest kept score of a head's shares into row m of the first, which starts at ``memory``."""
    p, ends = plan[0], floats(memory)
    peak = get(ends, END * m + PEAK)
    for split in range(p.splits):
        peak = maximum(peak, get(floats(memory + split * p.item_bytes), END * m + KEPT_PEAK))
    if peak != get(ends, END * m + PEAK):
        shrink, out = exp_of_negative(get(ends, END * m + PEAK) - peak), floats(memory + p.out_at)
        put(ends, END * m + PEAK, peak)
        put(ends, END * m + TOTAL, get(ends, END * m + TOTAL) * shrink)
        for d in range(m * p.head_dim, (m + 1) * p.head_dim):
            put(out, d, get(out, d) * shrink)


@fast_jit
def count_scanned(g: int, memory: int, plan: Any, runs: Any, i: int) -> None:
    """The blocks that a head's shares have scanned of run i, beside what its second stage counts."""
    p, total = plan[0], 0
    for split in range(p.splits):
        total += get(ints(memory + split * p.item_bytes + p.limits_at + 4 * p.rows), i)
    put(numbers(runs[i].counts), 3 * g + 2, np.int64(total))


@inline_jit
def _rescan(t: int, n: int, g: int, limits: F32, memory: int, plan: Any, runs: Any, i: int) -> int:
    """Scores of tokens t..t + n, a block of the walk, to where they are kept: scanned, or as they were estimated.

    Returns for how many blocks and query tokens they were scanned.
    """
    p, run = plan[0], runs[i]
    start, scanned = t, 0
    while start < t + n:  # neighbours together
        end = min(t + n, (start // BLOCK + 1) * BLOCK)
        if _any_reaches(start // BLOCK, g, limits, plan, runs, i):
            while end < t + n and _any_reaches(end // BLOCK, g, limits, plan, runs, i):
                end = min(t + n, end + BLOCK)
            call_block(
                *(run.score, run.key_store, memory + run.prepared_at, p.rows, g, start, end - start),
                *(memory + p.scores_at + 4 * (start - t), run.block, memory + p.scratch_at),
            )
        start = end
    for block in range(t // BLOCK, (t + n + BLOCK - 1) // BLOCK):
        start, end = max(t, block * BLOCK), min(t + n, (block + 1) * BLOCK)
        for j in range(p.n_tokens):
            reaches = _reaches(j, block, g, limits, plan, runs, i)
            scanned += reaches
            for m in range(j, p.rows, p.n_tokens):
                scores = floats(memory + p.scores_at + 4 * (m * run.block + start - t))
                _keep(m, start, end, reaches, scores, g, memory, plan, runs, i)
    return scanned


@fast_jit
def _samples(start: int, end: int, g: int, limits: F32, plan: Any, runs: Any, i: int) -> int:
    """Of the share's blocks of the walk: for how many blocks and query tokens a sample alone was scanned."""
    run, found = runs[i], 0
    first = (run.first + BLOCK - 1) // BLOCK
    n_whole = run.stop // BLOCK - first
    n = min(MOST_SAMPLES, n_whole)
    for k in range(n):
        block = first + k * n_whole // n  # as `sampled_blocks` has it
        if start <= block * BLOCK // run.block < end:
            for j in range(plan[0].n_tokens):
                found += not _reaches(j, block, g, limits, plan, runs, i)
    return found


@inline_jit
def _any_reaches(block: int, g: int, limits: F32, plan: Any, runs: Any, i: int) -> bool:
    for j in range(plan[0].n_tokens):  # noqa: SIM110 - Numba knows no generators
        if _reaches(j, block, g, limits, plan, runs, i):
            return True
    return False


@inline_jit
def _reaches(j: int, block: int, g: int, limits: F32, plan: Any, runs: Any, i: int) -> bool:
    """Whether a token of the block can matter for a head of query token j."""
    p, run = plan[0], runs[i]
    estimates = estimates_of(block, g, plan, runs, i)
    start, end = max(run.first, block * BLOCK), min(run.stop, (block + 1) * BLOCK)
    for m in range(j, p.rows, p.n_tokens):
        row = floats(estimates + 4 * m * p.estimates_gap)
        a, b = _in_sight(start, end - start, m, plan, runs, i)
        for c in range(a // CENTRE, (b + CENTRE - 1) // CENTRE if a < b else 0):
            if get(row, 2 * (c - block * (BLOCK // CENTRE)) + 1) >= get(limits, m):
                return True
    return False


@inline_jit
def _keep(
    m: int, start: int, end: int, is_scanned: bool, scores: F32, g: int, memory: int, plan: Any, runs: Any, i: int
) -> None:
    """Row m's scores with tokens start..end of a block; the largest of them raises that of the row."""
    p, run = plan[0], runs[i]
    kept, column = floats(p.kept), (g * p.rows + m) * p.kept_gap + run.column - run.first
    if is_scanned:
        for k in range(start, end):
            put(kept, column + k, get(scores, k - start))
    else:
        row = floats(estimates_of(start // BLOCK, g, plan, runs, i) + 4 * m * p.estimates_gap)
        for c in range(start // CENTRE, (end + CENTRE - 1) // CENTRE):
            estimate = get(row, 2 * (c % (BLOCK // CENTRE)))
            fill(kept, column + max(start, c * CENTRE), column + min(end, (c + 1) * CENTRE), estimate)
    a, b = _in_sight(start, end - start, m, plan, runs, i)
    fill(kept, column + start, column + min(max(a, start), end), MINUS_INFINITY)
    fill(kept, column + max(min(b, end), start), column + end, MINUS_INFINITY)
    place, ends = END * m + KEPT_PEAK, floats(memory)
    put(ends, place, maximum(get(ends, place), largest(kept, column + start, end - start)))
