"""Scores of a range of tokens, and weighted sums over one, outside of attention: by the same loops.

Of codecs without loops, what they decode to is read as float32.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from edgekv.kernels import threads
from edgekv.kernels.contract.segment import Segment
from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.compile import Args, fast_jit
from edgekv.kernels.cpu.launch import call_block, call_finish, call_prepare
from edgekv.kernels.cpu.loops import address_of, aligned_size, bound, floats, scratch_memory
from edgekv.kernels.cpu.softmax import fill
from edgekv.types import F32

ROWS = {"cpu": "edgekv.kernels.cpu.rows"}


def with_numbers(segment: Segment) -> Segment:
    """Returns the segment, codecs without loops replaced by their tokens in float32."""
    keys, values = segment.keys, segment.values
    if "cpu" in keys.backends and "cpu" in values.backends:
        return segment
    span = segment.first, segment.stop
    return segment._replace(keys=as_numbers(keys, *span), values=as_numbers(values, *span))


def as_numbers(codec: Any, t0: int, t1: int) -> Any:
    """Returns a codec of kind f32 with tokens t0..t1 of one without loops; any other codec itself."""
    if "cpu" in codec.backends:
        return codec
    single = np.empty((codec.n_kv_heads, t1, codec.head_dim), np.float32)
    single[:, t0:] = codec.decode(t0, t1)
    sizes = {"n_kv_heads": codec.n_kv_heads, "capacity": t1, "head_dim": codec.head_dim}
    return SimpleNamespace(kind="f32", backends=ROWS, arrays={"single": single}, backend_state=None, **sizes)


ZERO = np.float32(0)


def scores(codec: Any, queries: F32, t0: int, t1: int, s: F32) -> None:
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
