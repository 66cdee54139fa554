"""The machine's own speed limit: reading memory once, in order, on all threads."""

import time

import numpy as np
from numba import prange

from edgekv.kernels import threads
from edgekv.kernels.aligned import zeros
from edgekv.kernels.numba_.jit import parallel_jit
from edgekv.kernels.spec import U64

PROBE_BYTES = 256 << 20  # far beyond any cache


class Bandwidth:
    """Bytes per second that all threads together stream from memory: the best pass so far.

    Passes taken between a benchmark's rounds see the machine in the state that the benchmark sees.
    """

    def __init__(self) -> None:
        self._words = zeros((PROBE_BYTES // 8,), np.uint64)
        self._words.fill(1)
        self._sums = np.zeros((threads.count(), 8), np.uint64)  # a cache line each
        self.best = 0.0
        self.sample()
        self.sample()  # the first one compiled

    def sample(self) -> None:
        begin = time.perf_counter()
        threads.run_parallel(_sum_parallel, self._words, self._sums)
        self.best = max(self.best, PROBE_BYTES / (time.perf_counter() - begin))


@parallel_jit
def _sum_parallel(words: U64, sums: U64) -> None:
    parts = len(sums)
    for part in prange(parts):
        total = np.uint64(0)
        for i in range(len(words) * part // parts, len(words) * (part + 1) // parts):
            total += words[i]
        sums[part, 0] = total
