"""Exact causal attention over a prompt: blocked matrix products, a few blocks of scores alive at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgekv.decoder.prompt_attention import Scoring, seen
from edgekv.kernels import Kernels
from edgekv.kernels.contract.attention import bound_scores
from edgekv.kernels.serial import serial_kernels
from edgekv.kvcache.geometry import Workspace
from edgekv.machine import blas_threads
from edgekv.types import F32

BLOCK_ROWS = 512  # query rows per block, all heads of a group together


class CpuAttention:
    """Each worker thread takes blocks of query rows and multiplies them alone.

    Workers that share one product wait for each other at its end, thousands of times per prompt; on a busy
    machine that made a prompt three times slower than blocks computed apart.
    """

    def __init__(self, kernels: Kernels, threads: int) -> None:
        self.kernels, self.threads = kernels, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="edgekv-attention")
        self._scratch = [Workspace() for _ in range(threads)]

    def __call__(self, queries: F32, keys: F32, values: F32, scoring: Scoring) -> None:
        """See `PromptAttention` (prompt_attention.py). Scratch: BLOCK_ROWS x m float32 scores per thread."""
        n_heads, n, _ = queries.shape
        n_kv_heads = keys.shape[0]
        rows = max(1, BLOCK_ROWS // (n_heads // n_kv_heads))
        starts = range((n - 1) // rows * rows, -1, -rows)  # the longest blocks first
        blocks = iter([(g, a, min(a + rows, n)) for a in starts for g in range(n_kv_heads)])
        with blas_threads(1):
            work = functools.partial(self._work, blocks, queries, keys, values, scoring)
            jobs = [self._pool.submit(work, scratch) for scratch in self._scratch]
            for job in jobs:
                job.result()

    def _work(
        self,
        blocks: Iterator[tuple[int, int, int]],
        queries: F32,
        keys: F32,
        values: F32,
        scoring: Scoring,
        scratch: Workspace,
    ) -> None:
        group = queries.shape[0] // keys.shape[0]
        with serial_kernels():
            for g, a, b in blocks:  # a list's iterator: each block goes to one worker
                heads = slice(g * group, (g + 1) * group)
                own = scoring if scoring.sinks is None else scoring._replace(sinks=scoring.sinks[heads])
                self._block(scratch, queries[heads], keys[g], values[g], a, b, own)

    def _block(
        self,
        scratch: Workspace,
        queries: F32,
        keys: F32,
        values: F32,
        a: int,
        b: int,
        scoring: Scoring,
    ) -> None:
        """Queries a..b of one group (group, n, head_dim) over its keys and values (m, head_dim)."""
        group, n, head_dim = queries.shape
        t0 = len(keys) - n + a
        t1 = t0 + b - a
        window, cap, sinks = scoring
        first, *ranges = seen(t0, t1, window)
        lo, hi = (np.tile(each, group) for each in ranges)
        rows = group * (b - a)
        q = scratch.array("rows", (rows, head_dim))
        q.reshape(group, b - a, head_dim)[:] = queries[:, a:b]
        whole = scratch.array("scores", (rows, t1 - first + (sinks is not None)))
        s = whole[:, : t1 - first]
        np.matmul(q, keys[first:t1].T, out=s)
        bound_scores(s, cap)
        if sinks is None:
            self.kernels.softmax(s[None], lo, hi)
        else:
            each = np.arange(rows)
            whole[each, hi] = np.repeat(sinks, b - a)  # behind the last token that a row sees
            self.kernels.softmax(whole[None], lo, hi + 1)
            whole[each, hi] = 0
        np.matmul(s, values[first:t1], out=q)
        queries[:, a:b] = q.reshape(group, b - a, head_dim)
