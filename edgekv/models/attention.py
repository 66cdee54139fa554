"""Exact causal attention over a prompt: blocked matrix products, one block of scores alive at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgekv.kernels import Kernels
from edgekv.kvcache.base import Workspace

F32 = npt.NDArray[np.float32]
BLOCK_ROWS = 512  # query rows per block, all heads of a group together


def exact_attention(
    queries: F32, keys: F32, values: F32, window: int | None, kernels: Kernels, workspace: Workspace
) -> None:
    """Replaces queries (n_heads, n, head_dim), already scaled, by their attention over keys and values.

    keys, values (n_kv_heads, n, head_dim); query i sees keys max(0, i + 1 - window)..i. Scratch: one
    score block of BLOCK_ROWS x n float32.
    """
    n_heads, n, head_dim = queries.shape
    group = n_heads // keys.shape[0]
    block = max(1, BLOCK_ROWS // group)
    for g in range(keys.shape[0]):
        heads = slice(g * group, (g + 1) * group)
        for a in range(0, n, block):
            b = min(a + block, n)
            first = 0 if window is None else max(0, a + 1 - window)
            rows = group * (b - a)
            q = workspace.array("prefill.rows", (rows, head_dim))
            q.reshape(group, b - a, head_dim)[:] = queries[heads, a:b]
            s = workspace.array("prefill.scores", (rows, b - first))
            np.matmul(q, keys[g, first:b].T, out=s)
            hi = np.tile(np.arange(a + 1, b + 1, dtype=np.int64) - first, group)
            lo = np.zeros_like(hi) if window is None else np.maximum(hi - window, 0)
            kernels.softmax(s[None], lo, hi)
            np.matmul(s, values[g, first:b], out=q)
            queries[heads, a:b] = q.reshape(group, b - a, head_dim)
