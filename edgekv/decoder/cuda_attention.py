"""Exact causal attention over a prompt, in blocks of matrix products."""

from __future__ import annotations

import numpy as np

from edgekv.decoder.prompt_attention import Scoring, seen
from edgekv.kernels.contract.attention import bound_scores
from edgekv.kernels.cuda.kernels import CudaKernels
from edgekv.kernels.cuda.program import Array

SCORES = 1 << 24  # float32 alive at once


class CudaAttention:
    """Blocks of query rows, all heads at once."""

    def __init__(self, kernels: CudaKernels) -> None:
        self.kernels = kernels

    def __call__(self, queries: Array, keys: Array, values: Array, scoring: Scoring) -> None:
        """See `PromptAttention` (prompt_attention.py); without sinks. Scratch: up to SCORES float32 scores."""
        if scoring.sinks is not None:
            raise ValueError("sinks are not known here: leave `sinks` out")
        n_heads, n, head_dim = queries.shape
        earlier = keys.shape[1] - n
        n_kv_heads = keys.shape[0]
        n_rep = n_heads // n_kv_heads
        step = max(1, SCORES // (n_heads * keys.shape[1]))
        for a in range(0, n, step):
            b = min(a + step, n)
            t0, t1 = earlier + a, earlier + b
            first, *ranges = seen(t0, t1, scoring.window)
            lo, hi = (np.tile(each, n_rep) for each in ranges)
            q = queries[:, a:b].copy().reshape(n_kv_heads, n_rep * (b - a), head_dim)
            s = q @ keys[:, first:t1].transpose(0, 2, 1)
            bound_scores(s, scoring.cap)
            self.kernels.softmax(s, lo, hi)
            queries[:, a:b] = (s @ values[:, first:t1]).reshape(n_heads, b - a, head_dim)
