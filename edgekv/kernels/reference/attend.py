"""Attention over segments, written for reading: all scores, one softmax, then each segment's sum of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgekv.kernels.contract.attention import bound_scores
from edgekv.kernels.contract.segment import Segment, Visible, refuse_weights_of_chosen
from edgekv.kernels.reference.loops import decoded, loops_of
from edgekv.kernels.reference.softmax import log_sum, softmax
from edgekv.kernels.reference.sparse_attention import add_chosen, scores_of_chosen
from edgekv.types import F32


def attend(
    queries: F32,
    segments: Sequence[Segment],
    visible: Visible,
    out: F32,
    weights: F32 | None = None,
    sinks: F32 | None = None,
    cap: float | None = None,
) -> None:
    n_heads, n, head_dim = queries.shape
    refuse_weights_of_chosen(segments, weights)
    n_kv_heads = segments[0].keys.n_kv_heads
    q = queries.reshape(n_kv_heads, n_heads // n_kv_heads * n, head_dim)
    columns = [segment_scores(segment, q, n, visible, cap) for segment in segments]
    sink = np.repeat(np.full(n_heads, -np.inf, np.float32) if sinks is None else sinks, n)
    p = np.concatenate([*columns, sink.reshape(n_kv_heads, -1, 1)], axis=2)
    ends = np.cumsum([0, *(s.shape[2] for s in columns)])
    total = log_sum(p)
    for i, segment in enumerate(segments):
        rescan = loops_of(segment.values.kind).rescan
        if rescan is not None:
            rescan(segment, q, n, total, p[:, :, ends[i] : ends[i + 1]])
    softmax(p, np.zeros(p.shape[1], np.int64), np.full(p.shape[1], p.shape[2]))
    result, change = np.zeros_like(q), np.zeros(q.shape[:2], np.float32)
    for i, segment in enumerate(segments):
        add_values(segment, q, p[:, :, ends[i] : ends[i + 1]], n, result, change)
    out[...] = (result / (1 + change[..., None])).reshape(out.shape)
    if weights is not None:
        weights[...] = p[:, :, :-1]


def segment_scores(segment: Segment, q: F32, n: int, visible: Visible, cap: float | None) -> F32:
    """(G, M, tokens of the segment), -inf where a query does not see the token."""
    keys, values, first, stop, position, positions, chosen = segment
    n_kv_heads, rows, _ = q.shape
    if chosen is not None:
        s = scores_of_chosen(keys, q, *chosen)
        hidden = np.isneginf(s)
        bound_scores(s, cap)
        s[hidden] = -np.inf
        return s
    s = np.empty((n_kv_heads, rows, stop - first), np.float32)
    estimate = loops_of(keys.kind).estimate if loops_of(values.kind).rescan else None
    (estimate or scores)(keys, q, first, stop, s)
    bound_scores(s, cap)
    at = np.arange(position, position + stop - first) if positions is None else positions[:, None, first:stop]
    lo, hi = (np.tile(x, rows // n)[:, None] for x in visible)
    return np.where((at >= lo) & (at < hi), s, np.float32(-np.inf))


def add_values(segment: Segment, q: F32, p: F32, n: int, out: F32, change: F32) -> None:
    """out (G, M, D) += p (G, M, tokens) times the segment's values; change += what a second stage adds to p."""
    _, values, first, stop, _, _, chosen = segment
    if chosen is not None:
        add_chosen(values, p, *chosen, out)
        return
    second_stage = loops_of(values.kind).second_stage
    if second_stage is None:
        sums(values, p, first, stop, out)
    else:
        second_stage(segment, q, p, n, out, change)


def scores(codec: Any, queries: F32, t0: int, t1: int, s: F32) -> None:
    loops = loops_of(codec.kind)
    if loops.scores:
        loops.scores(codec, queries, t0, t1, s)
    else:
        s[...] = queries @ decoded(codec, t0, t1).transpose(0, 2, 1)


def sums(codec: Any, p: F32, t0: int, t1: int, out: F32) -> None:
    loops = loops_of(codec.kind)
    if loops.sums:
        loops.sums(codec, p, t0, t1, out)
    else:
        out += p @ decoded(codec, t0, t1)


def append(keys: Any, values: Any, k: F32, v: F32, t0: int) -> None:
    keys.encode(k, t0)
    values.encode(v, t0)


def encode(codec: Any, x: F32, t0: int) -> None:
    store = loops_of(codec.kind).encode
    assert store is not None, codec.kind
    store(codec, x, t0)
