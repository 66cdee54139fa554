"""The machine's own speed limit: reading memory once, in order, on all threads or on some."""

import time

import numpy as np
from numba import prange

from edgekv.kernels import threads
from edgekv.kernels.arrays import zeros
from edgekv.kernels.cpu.compile import fast_jit, parallel_jit
from edgekv.kernels.cpu.scalar import get, put
from edgekv.types import F32

PROBE_BYTES = 256 << 20  # far beyond any cache


class Bandwidth:
    """Bytes per second that ``n_threads`` (None: `threads.count()`) together stream from memory: the best so far.

    Passes taken between a benchmark's rounds see the machine in the state that the benchmark sees.
    """

    def __init__(self, n_threads: int | None = None) -> None:
        self._n = n_threads or threads.count()
        self._elements = zeros((PROBE_BYTES // 4,), np.float32)
        self._elements.fill(1)
        self._sums = np.zeros((self._n, 16), np.float32)  # a cache line each
        self.best = 0.0
        self.sample()
        self.sample()  # the first one compiled

    def sample(self) -> None:
        """Reads the probe once more; ``best`` is the most bytes per second so far."""
        begin = time.perf_counter()
        n_items, arrays = PROBE_BYTES // 4, (self._elements, self._sums)
        threads.run_parallel(_sum_parallel, self._n, n_items, *arrays, n_threads=self._n)
        self.best = max(self.best, PROBE_BYTES / (time.perf_counter() - begin))


@fast_jit
def _sum_items(first: int, last: int, elements: F32, sums: F32) -> None:
    total = np.float32(0)
    for i in range(first, last):
        total += get(elements, i)
    put(sums, 0, total)


@parallel_jit
def _sum_parallel(n_parts: int, n_items: int, elements: F32, sums: F32) -> None:
    for part in prange(n_parts):
        _sum_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, elements, sums[part])
