"""Softmax over a range of columns per row."""

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
