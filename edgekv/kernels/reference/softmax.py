"""Softmax over a range of columns per row, and what it divides by."""

import numpy as np

from edgekv.types import F32, I64


def softmax(s: F32, lo: I64, hi: I64) -> None:
    columns = np.arange(s.shape[2])
    inside = (columns >= lo[:, None]) & (columns < hi[:, None])  # (M, S)
    x = np.where(inside, s, -np.inf)
    peak = x.max(axis=2, keepdims=True, initial=-np.inf)
    weights = np.exp(x - np.where(peak == -np.inf, 0.0, peak))
    total = weights.sum(axis=2, keepdims=True)
    s[...] = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


def log_sum(s: F32) -> F32:
    """The logarithm of the sum of exp(s) over the last axis; -inf where all are."""
    peak = s.max(axis=-1, keepdims=True)
    base = np.where(peak == -np.inf, 0, peak)
    with np.errstate(divide="ignore"):
        total: F32 = np.log(np.exp(s - base).sum(axis=-1)) + base[..., 0]
    return total
