"""Kernels over a range of items, whose work is shared out to threads."""

from __future__ import annotations

import functools
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange

from edgekv.kernels import threads
from edgekv.kernels.cpu.compile import FAST
from edgekv.kernels.cpu.loops import Loop, address_of, bits_of, call, parallel_loop

# Multiply-adds (10 to 50 per nanosecond and core) below which waking threads costs more than it saves.
MIN_PARALLEL_WORK = 1 << 19


@parallel_loop
def parallel_for(n_threads: int, n_items: int, function: int, arguments: int) -> None:
    """Calls function(first, last, thread, arguments) with a share of the items on each of ``n_threads`` threads.

    Kernels are called by address, since Numba compiles twice whatever a parallel loop calls.
    """
    for i in prange(n_threads):
        call(function, (n_items * i // n_threads, n_items * (i + 1) // n_threads, i, arguments))


class RangeKernel(Loop):
    """A kernel function(first, last, thread, arguments) that does items first..last.

    arguments: the address of its arguments as int64, which `load_arguments` loads. thread: its number.
    """

    def __call__(self, n_items: int, work: int, *arguments: Any, n_threads: int | None = None) -> None:
        """Does items 0..n_items on ``n_threads`` (None: `threads.count()`), if ``work`` is worth waking them.

        work: multiply-adds or so. arguments: whole numbers, C-contiguous arrays, given as their addresses, and
        float32, given as their bits.
        """
        values = np.array([_int64(x) for x in arguments], np.int64)
        self.run(n_items, address_of(values), n_threads or threads.count(), work)

    def run(self, n_items: int, arguments: int, n_threads: int, work: int = MIN_PARALLEL_WORK) -> None:
        """Does items 0..n_items, with arguments that lie at an address."""
        if n_threads == 1 or n_items == 1 or work < MIN_PARALLEL_WORK:
            self.call(0, n_items, 0, arguments)
        else:
            work_items = n_threads, n_items, self.address, arguments
            threads.run_parallel(parallel_for.call, *work_items, n_threads=n_threads)


exact_kernel = functools.partial(RangeKernel, fastmath=False)
"""Makes a `RangeKernel` whose sums keep their order; those of other kernels may be reordered."""
exact_division_kernel = functools.partial(RangeKernel, fastmath=FAST - {"arcp"})
"""Makes a `RangeKernel` whose divisions are as written."""


def _int64(x: Any) -> int:
    if isinstance(x, np.ndarray):
        return address_of(x)
    return bits_of(float(x)) if isinstance(x, (float, np.float32)) else int(x)


def token_splits(n_kv_heads: int, work: int) -> int:
    """Returns the splits of each head's tokens, so that all splits divide evenly over the threads."""
    if work < MIN_PARALLEL_WORK:
        return 1
    return threads.count() // gcd(n_kv_heads, threads.count())


def rows_view(x: npt.NDArray[Any]) -> tuple[int, int, int]:
    """Returns the address of x (A, B, C), its rows contiguous, and its strides along A and B in elements."""
    address: int = x.__array_interface__["data"][0]
    return address, x.strides[0] // x.itemsize, x.strides[1] // x.itemsize
