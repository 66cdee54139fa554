"""Attention: each head's blocks of tokens pass through scores, running softmax and value sum while in cache.

A work item is a KV head, or one of ``splits`` parts of its tokens. It takes the blocks of all segments and leaves
for each row (query head and token) the largest score m, the sum l of weights and the weighted sum of values; the
splits of a head are then combined. Blocks are read by the codecs' loops (`edgekv.kernels.cpu.loops`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgekv.kernels import threads
from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.compile import Scalar, fast_jit
from edgekv.kernels.cpu.launch import RangeKernel, exact_kernel
from edgekv.kernels.cpu.loops import (
    TOKENS_PER_CALL,
    BoundCodec,
    address_of,
    aligned_size,
    bind,
    bits_of,
    call,
    float_of,
    floats,
    int64s,
    ints,
    kernels_of,
    load_arguments,
    load_tuple,
    scratch_memory,
)
from edgekv.kernels.cpu.rows import DecodedTokens
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.softmax import MINUS_INFINITY, RESCALE, STATE, L, M, exp_of_negative, fill, online_softmax
from edgekv.kernels.interface import BLOCK, Segment, Visible
from edgekv.types import F32

ROWS_PER_CALL = 16  # query rows whose scores of TOKENS_PER_CALL tokens are small beside a first-level cache


class Plan(NamedTuple):
    """The arguments that all segments share: sizes, addresses, and where parts of a work item's memory begin."""

    n_groups: int
    rows: int  # of a KV head: query heads times tokens
    n_tokens: int
    head_dim: int
    splits: int
    n_blocks: int  # of all segments
    queries: int
    lo: int
    hi: int
    out: int
    sinks: int
    lo_min: int  # some rows see the positions lo_min..hi_max, all rows lo_max..hi_min
    hi_max: int
    lo_max: int
    hi_min: int
    memory: int
    item_bytes: int
    out_at: int
    scores_at: int
    scratch_at: int
    weights: int  # (n_groups, rows, weights_stride), 0: not asked for
    weights_stride: int
    cap: int  # the bits of a float32, 0: none
    segments: int
    n_segments: int


class SegmentPlan(NamedTuple):
    """The arguments of one segment."""

    key_args: int
    value_args: int
    prepare: int  # addresses of loops, 0: none
    score: int
    add: int
    finish: int
    first: int
    stop: int
    position: int
    positions: int  # address, 0: tokens follow ``position``
    positions_stride: int
    block: int
    score_step: int  # tokens of one call, at most
    add_step: int
    width: int  # 0: values are added to the result itself
    prepared_at: int
    sums_at: int
    column: int  # of ``weights``


SEGMENT_BYTES = 8 * len(SegmentPlan._fields)


class PairPlan(NamedTuple):
    """The part of a `SegmentPlan` that stays the same from token to token, for a number of query rows."""

    keys: BoundCodec
    values: npt.NDArray[np.int64]  # arguments of the codec
    rows: int
    addresses: dict[str, int]  # of the stores and the loops, and the steps, as `SegmentPlan` names them
    block: int
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
) -> tuple[Plan, tuple[Any, ...]]:
    """Returns the plan of a call of `attend`, and the arrays that its addresses point to."""
    n_heads, n, head_dim = queries.shape
    n_groups = segments[0].keys.n_kv_heads
    rows = n_heads // n_groups * n
    lo, hi = visible
    out_at = offset = aligned_size(4 * STATE * rows)  # behind each row's softmax state
    offset += aligned_size(4 * rows * head_dim)
    segment_plans = np.empty((len(segments), len(SegmentPlan._fields)), np.int64)
    pairs: list[PairPlan] = []
    n_blocks = n_tokens = longest = scratch_bytes = 0
    for i, segment in enumerate(segments):
        _, _, first, stop, position, positions = segment
        pair = _pair_plan(segment, rows)
        block, sums_at = pair.block, offset + pair.prepared_bytes
        segment_plans[i] = SegmentPlan(
            **pair.addresses,
            first=first,
            stop=stop,
            position=position,
            positions=0 if positions is None else address_of(positions),
            positions_stride=0 if positions is None else positions.shape[1],
            block=block,
            width=pair.width,
            prepared_at=offset,
            sums_at=sums_at,
            column=n_tokens,
        )
        pairs.append(pair)
        offset = sums_at + pair.sums_bytes
        n_tokens += stop - first
        n_blocks += -(-stop // block) - first // block
        longest = max(longest, block)
        scratch_bytes = max(scratch_bytes, pair.scratch_bytes)
    splits = launch.token_splits(n_groups, n_groups * rows * head_dim * n_tokens)
    scratch_at = offset + aligned_size(4 * rows * longest)
    item_bytes = scratch_at + scratch_bytes
    sink = np.full(n_heads * n, -np.inf, np.float32) if sinks is None else np.repeat(sinks, n).astype(np.float32)
    plan = Plan(
        n_groups=n_groups,
        rows=rows,
        n_tokens=n,
        head_dim=head_dim,
        splits=splits,
        n_blocks=n_blocks,
        queries=address_of(queries),
        lo=address_of(lo),
        hi=address_of(hi),
        out=address_of(out),
        sinks=address_of(sink),
        lo_min=int(lo[0]),
        hi_max=int(hi[-1]),
        lo_max=int(lo[-1]),
        hi_min=int(hi[0]),
        memory=scratch_memory("attend.items", n_groups * splits * item_bytes),
        item_bytes=item_bytes,
        out_at=out_at,
        scores_at=offset,
        scratch_at=scratch_at,
        weights=0 if weights is None else address_of(weights),
        weights_stride=0 if weights is None else n_tokens,
        cap=0 if cap is None else bits_of(cap),
        segments=address_of(segment_plans),
        n_segments=len(segments),
    )
    return plan, (segment_plans, pairs, queries, visible, sink)


def _pair_plan(segment: Segment, rows: int) -> PairPlan:
    """Returns the pair's plan, remembered with the values until their arrays or the keys' change."""
    keys, values = bind(segment.keys), bind(segment.values)
    plan: PairPlan | None = values.pair
    if plan is None or plan.rows != rows or plan.keys is not keys:
        plan = values.pair = _make_pair_plan(keys, values, segment, rows)
    return plan


def _make_pair_plan(keys: BoundCodec, values: BoundCodec, segment: Segment, rows: int) -> PairPlan:
    k, v = keys.loops, values.loops
    loops = {"prepare": k.prepare, "score": k.score, "add": v.add, "finish": v.finish}
    width = v.width(segment.values) if v.finish else 0
    scratch_bytes = max(k.scratch(segment.keys, rows), v.scratch(segment.values, rows))
    least = max(k.block(segment.keys), v.block(segment.values))
    return PairPlan(
        keys=keys,
        values=values.args,
        rows=rows,
        addresses={
            "key_args": address_of(keys.args),
            "value_args": address_of(values.args),
            **{name: loop.address if loop else 0 for name, loop in loops.items()},
            "score_step": max(k.block(segment.keys), k.at_once),
            "add_step": max(v.block(segment.values), v.at_once),
        },
        block=max(least, TOKENS_PER_CALL) if rows <= ROWS_PER_CALL else least,
        width=width,
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
    segments = [_readable_segment(segment) for segment in segments]
    plan, alive = make_plan(queries, segments, visible, out, weights, sinks, cap)
    arguments, n_items = np.array(plan, np.int64), plan.n_groups * plan.splits
    work = queries.size * sum(segment.stop - segment.first for segment in segments)
    _attend_items.run(n_items, address_of(arguments), threads.count(), work)
    # Without weights a microsecond: less than waking threads again.
    _combine_splits.run(plan.n_groups, address_of(arguments), threads.count() if plan.weights else 1, work)
    del alive


@RangeKernel
def _attend_items(first: int, last: int, thread: int, arguments: int) -> None:
    p = load_tuple(Plan, arguments)
    for item in range(first, last):
        g, split = item // p.splits, item % p.splits
        memory = p.memory + item * p.item_bytes
        state = floats(memory)
        for row in range(p.rows):  # a sink is the first score, of the first split
            put(state, STATE * row + M, MINUS_INFINITY if split else get(floats(p.sinks), g * p.rows + row))
            put(state, STATE * row + L, ONE)
        fill(floats(memory + p.out_at), 0, p.rows * p.head_dim, ZERO)
        passed = 0
        for i in range(p.n_segments):
            s = load_tuple(SegmentPlan, p.segments + i * SEGMENT_BYTES)
            fill(floats(memory + s.sums_at), 0, p.rows * s.width, ZERO)
        for i in range(p.n_segments):
            s = load_tuple(SegmentPlan, p.segments + i * SEGMENT_BYTES)
            base, end = s.first // s.block, (s.stop + s.block - 1) // s.block
            first_block = max(base + p.n_blocks * split // p.splits - passed, base)
            last_block = min(base + p.n_blocks * (split + 1) // p.splits - passed, end)
            passed += end - base
            if first_block < last_block:
                _attend_blocks(first_block, last_block, g, memory, arguments, i)
                if s.width:
                    call(s.finish, (s.value_args, memory + s.sums_at, memory + p.out_at, p.rows))


@fast_jit
def _attend_blocks(block: int, last: int, g: int, memory: int, arguments: int, i: int) -> None:
    """Takes blocks block..last of segment i through scores, running softmax and value sum."""
    p = load_tuple(Plan, arguments)
    s = load_tuple(SegmentPlan, p.segments + i * SEGMENT_BYTES)
    prepared = p.queries + 4 * g * p.rows * p.head_dim
    if s.prepare:
        call(s.prepare, (s.key_args, prepared, p.rows, g, memory + s.prepared_at))
        prepared = memory + s.prepared_at
    scores, scratch = memory + p.scores_at, memory + p.scratch_at
    sums = memory + (s.sums_at if s.width else p.out_at)
    for at in range(block, last):
        t = max(s.first, at * s.block)
        n = min(s.stop, (at + 1) * s.block) - t
        position, column = s.position + t - s.first, s.column + t - s.first
        if s.positions == 0 and (position + n <= p.lo_min or position >= p.hi_max):
            for row in range(p.rows if p.weights else 0):
                start = (g * p.rows + row) * p.weights_stride + column
                fill(floats(p.weights), start, start + n, MINUS_INFINITY)
            continue
        done = 0
        while done < n:
            n_tokens = min(n - done, s.score_step - (t + done) % s.score_step)
            to = scores + 4 * done
            call(s.score, (s.key_args, prepared, p.rows, g, t + done, n_tokens, to, s.block, scratch))
            done += n_tokens
        if p.cap:
            _bound(floats(scores), s.block, n, p.rows, float_of(p.cap))
        if s.positions or position < p.lo_max or position + n > p.hi_min:
            _mask(floats(scores), g, t, n, arguments, i)
        for row in range(p.rows if p.weights else 0):
            start = (g * p.rows + row) * p.weights_stride + column
            for k in range(n):
                put(floats(p.weights), start + k, get(floats(scores), row * s.block + k))
        whole = (n + BLOCK - 1) // BLOCK * BLOCK
        for row in range(p.rows if n < whole else 0):
            fill(floats(scores), row * s.block + n, row * s.block + whole, MINUS_INFINITY)
        if online_softmax(scores, s.block, p.rows, whole, memory):
            _rescale(memory, arguments)
        done = 0
        while done < n:
            n_tokens = min(n - done, s.add_step - (t + done) % s.add_step)
            weights = scores + 4 * done
            call(s.add, (s.value_args, weights, s.block, p.rows, g, t + done, n_tokens, sums, scratch))
            done += n_tokens


@fast_jit
def _bound(s: F32, stride: int, n: int, rows: int, cap: Scalar) -> None:
    """Replaces n scores x of each row, ``stride`` elements apart, by cap * tanh(x / cap)."""
    inverse = ONE / cap
    for m in range(rows):
        for k in range(m * stride, m * stride + n):
            x = get(s, k)
            ratio = abs(x) * inverse
            small = exp_of_negative(-TWO * ratio)
            tanh = ratio - ratio * ratio * ratio * THIRD if ratio < NEAR_ZERO else (ONE - small) / (ONE + small)
            put(s, k, np.copysign(cap * tanh, x))


@fast_jit
def _mask(scores: F32, g: int, t: int, n: int, arguments: int, i: int) -> None:
    """Sets the scores of tokens t..t + n that a row's query does not see to -inf."""
    p = load_tuple(Plan, arguments)
    s = load_tuple(SegmentPlan, p.segments + i * SEGMENT_BYTES)
    for row in range(p.rows):
        lo, hi = get(int64s(p.lo), row % p.n_tokens), get(int64s(p.hi), row % p.n_tokens)
        for k in range(n):
            position = s.position + t - s.first + k
            if s.positions:
                position = np.int64(get(ints(s.positions), g * s.positions_stride + t + k))
            if position < lo or position >= hi:
                put(scores, row * s.block + k, MINUS_INFINITY)


@fast_jit
def _rescale(memory: int, arguments: int) -> None:
    """Multiplies the sums so far of rows whose running maximum was raised."""
    p, state = load_tuple(Plan, arguments), floats(memory)
    for row in range(p.rows):
        factor = get(state, STATE * row + RESCALE)
        if factor != ONE:
            _scale(floats(memory + p.out_at), row * p.head_dim, p.head_dim, factor)
            for i in range(p.n_segments):
                s = load_tuple(SegmentPlan, p.segments + i * SEGMENT_BYTES)
                _scale(floats(memory + s.sums_at), row * s.width, s.width, factor)


@fast_jit
def _scale(x: F32, start: int, n: int, factor: float) -> None:
    for d in range(start, start + n):
        put(x, d, get(x, d) * factor)


@RangeKernel
def _combine_splits(first: int, last: int, thread: int, arguments: int) -> None:
    """Combines the splits of a head, and makes weights sum to 1."""
    p = load_tuple(Plan, arguments)
    for g in range(first, last):
        memory = p.memory + g * p.splits * p.item_bytes
        state, out, result = floats(memory), floats(memory + p.out_at), floats(p.out + 4 * g * p.rows * p.head_dim)
        for row in range(p.rows):
            for split in range(1, p.splits):
                _merge(row, memory, memory + split * p.item_bytes, p.out_at, p.head_dim)
            m, total = get(state, STATE * row + M), get(state, STATE * row + L)
            factor = ONE / total if total > ZERO else ZERO
            for d in range(row * p.head_dim, (row + 1) * p.head_dim):
                put(result, d, get(out, d) * factor)
            if p.weights:
                weights = floats(p.weights + 4 * (g * p.rows + row) * p.weights_stride)
                for k in range(p.weights_stride):
                    weight = ZERO if m == MINUS_INFINITY else exp_of_negative(get(weights, k) - m)
                    put(weights, k, weight * factor)


@fast_jit
def _merge(row: int, memory: int, other: int, out_at: int, head_dim: int) -> None:
    """Adds a row's sums of another split of its head's tokens to those of the first."""
    state, other_state = floats(memory), floats(other)
    m, other_m = get(state, STATE * row + M), get(other_state, STATE * row + M)
    largest = max(m, other_m)
    if largest == MINUS_INFINITY:
        return
    factor, other_factor = exp_of_negative(m - largest), exp_of_negative(other_m - largest)
    put(state, STATE * row + M, largest)
    total = get(state, STATE * row + L) * factor + get(other_state, STATE * row + L) * other_factor
    put(state, STATE * row + L, total)
    out, sums = floats(memory + out_at), floats(other + out_at)
    for d in range(row * head_dim, (row + 1) * head_dim):
        put(out, d, get(out, d) * factor + get(sums, d) * other_factor)


def _readable_segment(segment: Segment) -> Segment:
    keys, values = segment.keys, segment.values
    if "cpu" in keys.backends and "cpu" in values.backends:
        return segment
    span = segment.first, segment.stop
    return segment._replace(keys=readable(keys, *span), values=readable(values, *span))


def readable(codec: Any, t0: int, t1: int) -> Any:
    """Returns a codec that has loops: itself, or its decoded tokens t0..t1."""
    return codec if "cpu" in codec.backends else DecodedTokens(codec, t0, t1)


def scores(codec: Any, queries: F32, t0: int, t1: int, s: F32) -> None:
    """Fills s (G, M, t1 - t0) with scores of queries (G, M, D) and tokens t0..t1."""
    codec = readable(codec, t0, t1)
    state = bind(codec)
    loops = state.loops
    assert loops.score is not None
    queries = np.ascontiguousarray(queries)
    n_groups, rows, head_dim = queries.shape
    prepared = aligned_size(loops.prepared(codec, rows))
    item_bytes = prepared + aligned_size(loops.scratch(codec, rows))
    args, block = state.args, loops.block(codec)
    pieces = -(-t1 // block) - t0 // block
    work = queries.size * (t1 - t0)
    splits = min(threads.count(), max(pieces, 1)) if work >= launch.MIN_PARALLEL_WORK else 1
    memory = scratch_memory("ranges.scores", n_groups * splits * item_bytes)
    loop_addresses = loops.prepare.address if loops.prepare else 0, loops.score.address
    _score_items(
        *(n_groups * splits, work, rows, head_dim, splits, t0, t1, block, args, queries, *loop_addresses),
        *(address_of(s[0, 0]), s.strides[0] // 4, s.strides[1] // 4, memory, item_bytes, prepared),
    )


@RangeKernel
def _score_items(first: int, last: int, thread: int, arguments: int) -> None:
    rows, head_dim, splits, t0, t1, block, args, queries = load_arguments(arguments, 8)
    prepare, score, s, head_stride, row_stride, memory, item_bytes, n_bytes = load_arguments(arguments + 8 * 8, 8)
    for item in range(first, last):
        g, split = item // splits, item % splits
        item_memory = memory + item * item_bytes
        prepared = queries + 4 * g * rows * head_dim
        if prepare:
            call(prepare, (args, prepared, rows, g, item_memory))
            prepared = item_memory
        base = t0 // block
        n_blocks = (t1 + block - 1) // block - base
        for b in range(base + n_blocks * split // splits, base + n_blocks * (split + 1) // splits):
            t = max(t0, b * block)
            n = min(t1, (b + 1) * block) - t
            at = s + 4 * (g * head_stride + t - t0)
            call(score, (args, prepared, rows, g, t, n, at, row_stride, item_memory + n_bytes))


APPENDED_TOKENS = 8  # up to which one call encodes keys and values
ENCODED_TOKENS = 64  # tokens of a head per work item


def append(keys: Any, values: Any, k: F32, v: F32, t0: int) -> None:
    """Stores k and v (G, n, D) as tokens t0.. of two codecs."""
    if k.shape[1] > APPENDED_TOKENS or not kernels_of(keys).put or not kernels_of(values).put:
        encode(keys, k, t0)
        encode(values, v, t0)
        return
    k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
    n_groups, n, head_dim = k.shape
    bound_keys, bound_values = bind(keys), bind(values)
    put_key, put_value = bound_keys.loops.put, bound_values.loops.put
    assert put_key is not None
    assert put_value is not None
    n_bytes = aligned_size(max(bound_keys.loops.put_scratch(keys), bound_values.loops.put_scratch(values)))
    _append_heads(
        *(n_groups, k.size * max(1, n_bytes), bound_keys.args, bound_values.args),
        *(put_key.address, put_value.address, k, v, n, head_dim, t0),
        *(scratch_memory("append", n_groups * n_bytes), n_bytes),
    )


def encode(codec: Any, x: F32, t0: int) -> None:
    """Stores x (G, n, D) as tokens t0.. of a codec, by its loops or else its own `encode`."""
    loops = kernels_of(codec)
    if loops.encode:
        loops.encode(codec, x, t0)
    elif loops.put:
        n_groups, n, head_dim = x.shape
        n_bytes, n_parts = aligned_size(loops.put_scratch(codec)), -(-n // ENCODED_TOKENS)
        memory = scratch_memory("append", n_groups * n_parts * n_bytes)
        x = np.ascontiguousarray(x)
        arguments = bind(codec).args, loops.put.address, x, n, head_dim, t0, memory, n_bytes
        _encode_parts(n_groups * n_parts, x.size, *arguments)
    else:
        codec.encode(x, t0)


@exact_kernel
def _encode_parts(first: int, last: int, thread: int, arguments: int) -> None:
    args, put, x, n, head_dim, t0, memory, n_bytes = load_arguments(arguments, 8)
    n_parts = (n + ENCODED_TOKENS - 1) // ENCODED_TOKENS
    for item in range(first, last):
        g, t = item // n_parts, item % n_parts * ENCODED_TOKENS
        row = x + 4 * (g * n + t) * head_dim
        call(put, (args, row, min(ENCODED_TOKENS, n - t), g, t0 + t, memory + item * n_bytes))


@exact_kernel
def _append_heads(first: int, last: int, thread: int, arguments: int) -> None:
    key_args, value_args, put_key, put_value, k, v = load_arguments(arguments, 6)
    n, head_dim, t0, memory, n_bytes = load_arguments(arguments + 8 * 6, 5)
    for g in range(first, last):
        row, scratch = 4 * g * n * head_dim, memory + g * n_bytes
        call(put_key, (key_args, k + row, n, g, t0, scratch))
        call(put_value, (value_args, v + row, n, g, t0, scratch))
