"""Which tokens to attend to."""

import numpy as np

from edgekv.types import F32, I32, I64


def select_top(s: F32, lo: I64, hi: I64, k: int, chosen: I32) -> None:
    n_kv_heads, n = s.shape[0], len(lo)
    importance = s[:, :n].copy()
    for m in range(n, s.shape[1], n):  # one head after the other
        importance += s[:, m : m + n]
    for g in range(n_kv_heads):
        for j in range(n):
            row = importance[g, j, lo[j] : hi[j]]
            top = np.sort(np.argsort(-row, kind="stable")[:k])
            chosen[g, j, : len(top)] = lo[j] + top
