"""Division of a kernel's work over threads, and of its arrays into flat ones."""

from collections.abc import Callable
from math import gcd
from typing import Any

import numpy as np

from edgekv.kernels import threads
from edgekv.kernels.numba_.jit import jit
from edgekv.kernels.spec import BLOCK, F32

# Multiply-adds (about 15 per nanosecond and core here) below which waking threads takes longer than the work.
MIN_PARALLEL_WORK = 1 << 18


def run(serial: Callable[..., None], parallel: Callable[..., None], n_items: int, work: float, *args: Any) -> None:
    """serial(0, n_items, *args), or parallel(n_parts, n_items, *args) if the work is worth it.

    work: the cost in multiply-adds, roughly.
    """
    if work < MIN_PARALLEL_WORK or n_items == 1 or threads.count() == 1:
        serial(0, n_items, *args)
    else:
        threads.run_parallel(parallel, threads.count(), n_items, *args)


def token_splits(n_kv_heads: int, work: float) -> int:
    """Pieces to cut each head's tokens into so that heads times pieces divide evenly over the threads."""
    if work < MIN_PARALLEL_WORK:
        return 1
    return threads.count() // gcd(n_kv_heads, threads.count())


@jit
def token_span(t0: int, t1: int, n_splits: int, split: int) -> tuple[int, int]:
    """Tokens of one piece of t0..t1: pieces meet at block borders."""
    base = t0 // BLOCK
    n_blocks = (t1 + BLOCK - 1) // BLOCK - base
    first = base + n_blocks * split // n_splits
    last = base + n_blocks * (split + 1) // n_splits
    return max(t0, first * BLOCK), min(t1, last * BLOCK)


def flat(x: F32) -> tuple[F32, int, int]:
    """x (A, B, C), rows contiguous, as one flat array, and the distances between its elements along A and B.

    A flat array has one type whatever x's gaps between rows, so that a kernel is compiled once.
    """
    stride_a, stride_b, _ = x.strides
    if x.flags.c_contiguous:
        rows = x.reshape(-1)
    else:
        n_elements = sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)) // 4 + 1
        rows = np.lib.stride_tricks.as_strided(x, (n_elements,), (4,))
    return rows, stride_a // 4, stride_b // 4
