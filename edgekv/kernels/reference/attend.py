"""Attention over segments, written for reading: all scores, one softmax, then each segment's sum of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgekv.kernels.interface import Segment, Visible, bound_scores
from edgekv.types import F32, I64


def softmax(s: F32, lo: I64, hi: I64) -> None:
    """Takes the softmax over columns lo[m]..hi[m] of row m of each group in place, 0 in the other columns of s.

    Scores of -inf get probability 0; a range that is empty or all -inf becomes zeros. lo, hi (M,).
    """
    columns = np.arange(s.shape[2])
    inside = (columns >= lo[:, None]) & (columns < hi[:, None])  # (M, S)
    x = np.where(inside, s, -np.inf)
    m = x.max(axis=2, keepdims=True, initial=-np.inf)
    weights = np.exp(x - np.where(m == -np.inf, 0.0, m))
    total = weights.sum(axis=2, keepdims=True)
    s[...] = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


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
    n_heads, n, head_dim = queries.shape
    n_kv_heads = segments[0].keys.n_kv_heads
    q = queries.reshape(n_kv_heads, n_heads // n_kv_heads * n, head_dim)
    columns = [segment_scores(segment, q, n, visible, cap) for segment in segments]
    sink = np.repeat(np.full(n_heads, -np.inf, np.float32) if sinks is None else sinks, n)
    p = np.concatenate([*columns, sink.reshape(n_kv_heads, -1, 1)], axis=2)
    ends = np.cumsum([0, *(s.shape[2] for s in columns)])
    softmax(p, np.zeros(p.shape[1], np.int64), np.full(p.shape[1], p.shape[2]))
    result = np.zeros_like(q)
    for i, segment in enumerate(segments):
        result += segment.values.sums(p[:, :, ends[i] : ends[i + 1]], segment.first, segment.stop)
    out[...] = result.reshape(out.shape)
    if weights is not None:
        weights[...] = p[:, :, :-1]


def segment_scores(segment: Segment, q: F32, n: int, visible: Visible, cap: float | None) -> F32:
    """Returns scores (G, M, tokens of the segment), -inf where a query does not see the token."""
    keys, _, first, stop, position, positions = segment
    n_kv_heads, rows, _ = q.shape
    s = np.empty((n_kv_heads, rows, stop - first), np.float32)
    scores(keys, q, first, stop, s)
    bound_scores(s, cap)
    at = np.arange(position, position + stop - first) if positions is None else positions[:, None, first:stop]
    lo, hi = (np.tile(x, rows // n)[:, None] for x in visible)
    return np.where((at >= lo) & (at < hi), s, np.float32(-np.inf))


def scores(codec: Any, queries: F32, t0: int, t1: int, s: F32) -> None:
    """Fills s (G, M, t1 - t0) with scores of queries (G, M, D) and tokens t0..t1 of a codec of keys.

    For an index of keys (Quest's pages, for example) t0 and t1 count its entries.
    """
    s[...] = codec.scores(queries, t0, t1)


def append(keys: Any, values: Any, k: F32, v: F32, t0: int) -> None:
    """Encodes k and v (G, n, D) as tokens t0.. of two codecs."""
    keys.encode(k, t0)
    values.encode(v, t0)


def encode(codec: Any, x: F32, t0: int) -> None:
    """Stores x (G, n, D) as tokens t0.. of a codec."""
    codec.encode(x, t0)
