"""Exact causal attention over a prompt, in blocks of matrix products."""

from __future__ import annotations

import numpy as np

from edgekv.kernels.cuda.kernels import CudaKernels
from edgekv.kernels.cuda.program import Array
from edgekv.kvcache.soft_cap import cap_scores

SCORES = 1 << 24  # float32 alive at once


class CudaAttention:
    """Blocks of query rows, all heads at once."""

    def __init__(self, kernels: CudaKernels) -> None:
        self.kernels = kernels

    def __call__(
        self,
        queries: Array,
        keys: Array,
        values: Array,
        window: int | None,
        cap: float | None = None,
        sinks: Array | None = None,
    ) -> None:
        """See `PromptAttention` (prompt_attention.py); without sinks. Scratch: up to SCORES float32 scores."""
        if sinks is not None:
            raise ValueError("sinks are not known here: leave `sinks` out")
        n_heads, n, head_dim = queries.shape
        earlier = keys.shape[1] - n
        n_kv_heads = keys.shape[0]
        n_rep = n_heads // n_kv_heads
        step = max(1, SCORES // (n_heads * keys.shape[1]))
        for a in range(0, n, step):
            b = min(a + step, n)
            t0, t1 = earlier + a, earlier + b
            first = 0 if window is None else max(0, t0 + 1 - window)
            q = queries[:, a:b].copy().reshape(n_kv_heads, n_rep * (b - a), head_dim)
            s = q @ keys[:, first:t1].transpose(0, 2, 1)
            if cap is not None:
                cap_scores(s, cap)
            hi = np.tile(np.arange(t0 + 1, t1 + 1, dtype=np.int64) - first, n_rep)
            lo = np.zeros_like(hi) if window is None else np.maximum(hi - window, 0)
            self.kernels.softmax(s, lo, hi)
            queries[:, a:b] = (s @ values[:, first:t1]).reshape(n_heads, b - a, head_dim)
