"""What computes the exact attention of a prompt, whatever it runs on."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from edgekv.types import F32, I64


class Scoring(NamedTuple):
    """What a layer does to the scores of its queries; by default nothing.

    window: tokens that a query sees, up to its own; None: all. cap: the soft bound of scores.
    sinks (n_heads,): a score of each head that belongs to no token.
    """

    window: int | None = None
    cap: float | None = None
    sinks: F32 | None = None


class PromptAttention(Protocol):
    """Exact causal attention over a prompt."""

    def __call__(self, queries: F32, keys: F32, values: F32, scoring: Scoring) -> None:
        """Replaces queries (n_heads, n, head_dim), already scaled, by their attention over keys and values.

        keys, values (n_kv_heads, m, head_dim) with m >= n; the queries are those of the last n tokens. That of
        token t sees keys max(0, t + 1 - scoring.window)..t.
        """


def seen(t0: int, t1: int, window: int | None) -> tuple[int, I64, I64]:
    """The first token that any of the tokens t0..t1 sees; counted from it, what each sees: lo..hi (t1 - t0,)."""
    first = 0 if window is None else max(0, t0 + 1 - window)
    hi = np.arange(t0 + 1, t1 + 1, dtype=np.int64) - first
    return first, np.zeros_like(hi) if window is None else np.maximum(hi - window, 0), hi
