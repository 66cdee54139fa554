"""The speed at which the machine reads memory."""

import time

import numpy as np

from edgekv.kernels import threads
from edgekv.kernels.arrays import zeros
from edgekv.kernels.cpu.launch import RangeKernel
from edgekv.kernels.cpu.loops import floats, load_arguments
from edgekv.kernels.cpu.scalar import get, put

PROBE_BYTES = 256 << 20  # far beyond any cache
LINE = 64  # bytes of a sum's place


class Bandwidth:
    """A measurement of the bytes per second that ``n_threads`` (None: `threads.count()`) stream from memory.

    Samples taken between a benchmark's rounds see the machine in the state that the benchmark sees. ``best``: the
    most bytes per second so far.
    """

    def __init__(self, n_threads: int | None = None) -> None:
        self._n = n_threads or threads.count()
        self._elements = zeros((PROBE_BYTES // 4,), np.float32)
        self._elements.fill(1)
        self._sums = np.zeros(self._n * LINE // 4, np.float32)
        self.best = 0.0
        self.sample()
        self.sample()  # the first one compiled

    def sample(self) -> None:
        """Reads the probe once more."""
        begin = time.perf_counter()
        n_elements = PROBE_BYTES // 4
        _sum_elements(n_elements, n_elements, self._elements, self._sums, n_threads=self._n)
        self.best = max(self.best, PROBE_BYTES / (time.perf_counter() - begin))


@RangeKernel
def _sum_elements(first: int, last: int, thread: int, arguments: int) -> None:
    elements, sums = load_arguments(arguments, 2)
    total = np.float32(0)
    for i in range(first, last):
        total += get(floats(elements), i)
    put(floats(sums + LINE * thread), 0, total)
