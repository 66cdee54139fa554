"""Tokens of one codec outside of attention: scores, weighted sums, encoding; by the same loops.

Of codecs without loops, what they decode to is read as float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgekv.kernels import threads
from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.compile import Args, fast_jit, jit
from edgekv.kernels.cpu.launch import call_block, call_finish, call_prepare, call_put
from edgekv.kernels.cpu.loops import address_of, aligned_size, bound, floats, loops_of, scratch_memory
from edgekv.kernels.cpu.rows import Decoded
from edgekv.kernels.cpu.softmax import fill
from edgekv.kernels.interface import Segment
from edgekv.types import F32


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


ZERO = np.float32(0)


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


def sums(codec: Any, p: F32, t0: int, t1: int, out: F32) -> None:
    """Adds p (G, M, t1 - t0) times tokens t0..t1 to out (G, M, D)."""
    codec = as_numbers(codec, t0, t1)
    state = bound(codec)
    loops = state.loops
    assert loops.add is not None
    n_groups, rows, head_dim = out.shape
    width = loops.width(codec) if loops.finish else 0
    own = aligned_size(4 * rows * width)
    item_bytes = own + aligned_size(loops.scratch(codec, rows))
    store = state.numbers
    args = (
        *(rows, head_dim, t0, t1, loops.block(codec), address_of(store), address_of(p[0, 0])),
        *(p.strides[0] // 4, p.strides[1] // 4, loops.add.address, loops.finish.address if loops.finish else 0),
        *(address_of(out), width, scratch_memory("ranges.sums", n_groups * item_bytes), item_bytes, own),
    )
    launch.run(_sum_items, n_groups, out.size * (t1 - t0), args)


@fast_jit
def _score_items(first: int, last: int, args: Args) -> None:
    rows, head_dim, splits, t0, t1, block, store, queries, prepare, score, s, gap_g, gap_m = args[:13]
    memory, item_bytes, prepared_bytes = args[13:]
    for item in range(first, last):
        g, split = item // splits, item % splits
        mine = memory + item * item_bytes
        prepared = queries + 4 * g * rows * head_dim
        if prepare:
            call_prepare(prepare, store, prepared, rows, g, mine)
            prepared = mine
        base = t0 // block
        n_blocks = (t1 + block - 1) // block - base
        for b in range(base + n_blocks * split // splits, base + n_blocks * (split + 1) // splits):
            t = max(t0, b * block)
            n = min(t1, (b + 1) * block) - t
            at = s + 4 * (g * gap_g + t - t0)
            call_block(score, store, prepared, rows, g, t, n, at, gap_m, mine + prepared_bytes)


@fast_jit
def _sum_items(first: int, last: int, args: Args) -> None:
    rows, head_dim, t0, t1, block, store, p, gap_g, gap_m, add, finish, out, width = args[:13]
    memory, item_bytes, sums_bytes = args[13:]
    for g in range(first, last):
        mine, result = memory + g * item_bytes, out + 4 * g * rows * head_dim
        target = mine if width else result
        if width:
            fill(floats(mine), 0, rows * width, ZERO)
        for b in range(t0 // block, (t1 + block - 1) // block):
            t = max(t0, b * block)
            n = min(t1, (b + 1) * block) - t
            at = p + 4 * (g * gap_g + t - t0)
            call_block(add, store, at, gap_m, rows, g, t, n, target, mine + sums_bytes)
        if width:
            call_finish(finish, store, mine, result, rows)


FEW_TOKENS = 8  # more are encoded codec by codec
PART = 64  # tokens of a head that are encoded together


def append(keys: Any, values: Any, k: F32, v: F32, t0: int) -> None:
    """Stores k and v (G, n, D) as tokens t0.. of two codecs."""
    if k.shape[1] > FEW_TOKENS or not loops_of(keys).put or not loops_of(values).put:
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
    loops = loops_of(codec)
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
        call_put(put, store, row, min(PART, n - t), g, t0 + t, memory + item * n_bytes)


@jit
def _append_heads(first: int, last: int, args: Args) -> None:
    key_store, value_store, put_key, put_value, k, v, n, head_dim, t0, memory, n_bytes = args
    for g in range(first, last):
        row, scratch = 4 * g * n * head_dim, memory + g * n_bytes
        call_put(put_key, key_store, k + row, n, g, t0, scratch)
        call_put(put_value, value_store, v + row, n, g, t0, scratch)
