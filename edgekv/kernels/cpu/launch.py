"""Division of a kernel's work over threads, and of its arrays into flat ones.

A kernel is a function `items(first, last, ...)` that does a range of its work items. Where it would have a dozen
more parameters, these are one tuple `args`.
"""

from collections.abc import Callable
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.kernels import threads
from edgekv.kernels.cpu.loops import Loop, address_of
from edgekv.kernels.cpu.share import TEAM, shared

# Multiply-adds (10 to 50 per nanosecond and core) below which waking threads costs more than it saves.
MIN_PARALLEL_WORK = 1 << 19


def run(items: Callable[..., None], n_items: int, work: int, *args: Any) -> None:
    """Does items 0..n_items, in parallel if their cost, `work` multiply-adds or so, is worth it."""
    if work < MIN_PARALLEL_WORK or n_items == 1 or threads.count() == 1:
        shared(items)(0, 1, n_items, args)
    else:
        threads.run_parallel(shared(items), TEAM.address, threads.count(), n_items, args)


def token_splits(n_kv_heads: int, work: int) -> int:
    """Pieces to cut each head's tokens into so that heads times pieces divide evenly over the threads."""
    if work < MIN_PARALLEL_WORK:
        return 1
    return threads.count() // gcd(n_kv_heads, threads.count())


def flat(x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], int, int]:
    """x (A, B, C), its rows contiguous, as a flat array, and the gaps between its elements along A and B.

    A flat array has one type whatever the gaps, so that a kernel is compiled once.
    """
    gap_a, gap_b = x.strides[0] // x.itemsize, x.strides[1] // x.itemsize
    if x.flags.c_contiguous:
        return x.reshape(-1), gap_a, gap_b
    n_elements = (x.shape[0] - 1) * gap_a + (x.shape[1] - 1) * gap_b + x.shape[2]
    return np.lib.stride_tricks.as_strided(x, (n_elements,), (x.itemsize,)), gap_a, gap_b


class Stage:
    """items(first, last, part, numbers), called by address: it is compiled once, for one thread and for all.

    numbers: the address of what it gets; part: which of the threads' shares of the items this is.
    """

    def __init__(self, items: Callable[[int, int, int, int], None], exact: bool = False) -> None:
        """exact: arithmetic as written, else sums in any order."""
        self._loop = Loop(items, 4, exact)

    def run(self, n_items: int, numbers: npt.NDArray[np.int64]) -> None:
        """All items, on this thread."""
        self._loop.call(0, n_items, 0, address_of(numbers))

    def run_parallel(self, n_items: int, numbers: npt.NDArray[np.int64], n_threads: int | None = None) -> None:
        """All items, a share to each of n_threads, None: of `threads.count()`."""
        n = n_threads or threads.count()
        threads.run_parallel(TEAM.call, n, n_items, self._loop.address, address_of(numbers), n_threads=n)
