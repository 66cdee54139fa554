"""Attention to chosen tokens only: exact scores, and sums of their values."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgekv.kernels.reference.loops import decoded
from edgekv.types import F32, I32, I64


def scores_of_chosen(keys: Any, q: F32, tokens: I32, counts: I64) -> F32:
    """(G, M, K): row m = r * n + j of q (G, M, D) with tokens[g, j, : counts[j]], -inf behind these."""
    n, stored = len(counts), decoded(keys, 0, keys.capacity)
    s = np.full((*q.shape[:2], tokens.shape[2]), -np.inf, np.float32)
    for g in range(q.shape[0]):
        for m in range(q.shape[1]):
            at = tokens[g, m % n, : counts[m % n]]
            s[g, m, : len(at)] = stored[g, at] @ q[g, m]
    return s


def add_chosen(values: Any, p: F32, tokens: I32, counts: I64, out: F32) -> None:
    """out (G, M, D) += p (G, M, K) times the chosen tokens."""
    n, stored = len(counts), decoded(values, 0, values.capacity)
    for g in range(out.shape[0]):
        for m in range(out.shape[1]):
            at = tokens[g, m % n, : counts[m % n]]
            out[g, m] += p[g, m, : len(at)] @ stored[g, at]
