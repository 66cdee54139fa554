"""Attention over chosen tokens only: which to choose, and exact scores and value sums of those."""

import numpy as np

from edgekv.types import F32, I32, I64, U16


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


def scores_f16_at(q: F32, keys: U16, tokens: I32, counts: I64, s: F32) -> None:
    n = len(counts)
    for g in range(q.shape[0]):
        for m in range(q.shape[1]):
            at = tokens[g, m % n, : counts[m % n]]
            s[g, m, : len(at)] = _widen(keys[g, at]) @ q[g, m]


def values_f16_at(p: F32, values: U16, tokens: I32, counts: I64, out: F32) -> None:
    n = len(counts)
    for g in range(out.shape[0]):
        for m in range(out.shape[1]):
            at = tokens[g, m % n, : counts[m % n]]
            out[g, m] += p[g, m, : len(at)] @ _widen(values[g, at])


def _widen(bits: U16) -> F32:
    return bits.view(np.float16).astype(np.float32)
