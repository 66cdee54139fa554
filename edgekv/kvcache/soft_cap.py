"""Attention whose scores are bounded softly, as in Gemma 2: cap * tanh(score / cap) before the softmax.

It takes the backends' separate steps, as `Kernels.attend` knows no cap: slower, for the schemes that say
`KVCache.caps_scores`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgekv.kernels import Kernels
from edgekv.kernels.contract.segment import Segment, Visible
from edgekv.types import F32


def attend_capped(
    kernels: Kernels,
    scratch: Callable[[str, tuple[int, ...]], F32],
    queries: F32,
    segments: Sequence[Segment],
    visible: Visible,
    cap: float,
    out: F32,
) -> None:
    """As `Kernels.attend`; the segments follow one another without gaps, and none has ``chosen`` tokens."""
    n_heads, n, head_dim = queries.shape
    n_kv_heads = segments[0].keys.n_kv_heads
    rows = n_heads // n_kv_heads * n
    q, result = (x.reshape(n_kv_heads, rows, head_dim) for x in (queries, out))
    ends = np.cumsum([segment.stop - segment.first for segment in segments]).tolist()
    columns = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
    s = scratch("capped.scores", (n_kv_heads, rows, ends[-1]))
    for segment, part in zip(segments, columns, strict=True):
        kernels.scores(segment.keys, q, segment.first, segment.stop, s[:, :, part])
    cap_scores(s, cap)
    lo, hi = (np.tile(positions - segments[0].position, n_heads // n_kv_heads) for positions in visible)
    kernels.softmax(s, np.maximum(lo, 0), hi)
    result[:] = 0
    for segment, part in zip(segments, columns, strict=True):
        kernels.sums(segment.values, s[:, :, part], segment.first, segment.stop, result)


def cap_scores(s: F32, cap: float) -> None:
    """s = cap * tanh(s / cap), in place."""
    s *= np.float32(1 / cap)
    np.tanh(s, out=s)
    s *= np.float32(cap)
