"""Rows of activations times float32 weights: what a row becomes does not depend on the few rows beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgekv.kernels import threads
from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.loops import address_of, floats, numbers
from edgekv.kernels.cpu.row_products import score_rows
from edgekv.kernels.cpu.rows import WIDTH, score_rest
from edgekv.kernels.cpu.scalar import get
from edgekv.machine import blas_threads
from edgekv.types import F32, Threads

OUTPUTS = 4  # that are added up side by side
PANEL = 1 << 16  # weights that stay in the second cache while all rows pass
MOST_ROWS = 64  # up to which the kernel is as fast as BLAS, or faster
BLOCK = 512  # outputs that a thread multiplies at a time by BLAS


class FloatProducts:
    """Products on the threads of a token or of a prompt."""

    def __init__(self, own_threads: Threads) -> None:
        self._threads = own_threads
        self._pool = ThreadPoolExecutor(own_threads.prompt, thread_name_prefix="edgekv-products")

    def __call__(self, x: F32, weights: F32) -> F32:
        """x (n, columns) times the transpose of weights (outputs, columns), contiguous: (n, outputs).

        Up to MOST_ROWS rows by `multiply_rows`. More by NumPy, in blocks of outputs of a thread each: threads of
        BLAS that share a product wait for one another. The blocks do not depend on how many threads there are.
        """
        if len(x) <= MOST_ROWS:
            return multiply_rows(x, weights, self._threads.decode)
        y = np.empty((len(x), len(weights)), np.float32)
        with blas_threads(1):
            blocks = (slice(a, a + BLOCK) for a in range(0, len(weights), BLOCK))
            for job in [self._pool.submit(np.matmul, x, weights[own].T, y[:, own]) for own in blocks]:
                job.result()
        return y


def multiply_rows(x: F32, weights: F32, n_threads: int | None = None) -> F32:
    """x (n, columns) times the transpose of weights (outputs, columns), both float32: (n, outputs).

    Each number is one sum over the columns, in the same order for any n and any number of threads (None: of
    `threads.count()`). Raises ValueError for weights that are not contiguous.
    """
    x = np.ascontiguousarray(x, np.float32)
    (n, columns), outputs = x.shape, len(weights)
    n_threads = n_threads or threads.count()
    y = np.empty((n, outputs), np.float32)
    size = max(1, min(PANEL // max(1, columns), outputs // n_threads) // OUTPUTS) * OUTPUTS  # of a panel
    given = np.array((address_of(x), n, columns, address_of(weights), outputs, address_of(y), size), np.int64)
    n_panels = -(-outputs // size)
    if n_threads == 1 or n * outputs * columns < launch.MIN_PARALLEL_WORK:
        _PANELS.run(n_panels, given)
    else:
        _PANELS.run_parallel(n_panels, given, n_threads)
    return y


def warm_up() -> None:
    """Compiles `multiply_rows`."""
    multiply_rows(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32))
    _PANELS.run_parallel(0, np.ones(7, np.int64))


def _multiply_panels(first: int, last: int, part: int, place: int) -> None:
    given = numbers(place)
    x, n, columns, weights = get(given, 0), get(given, 1), get(given, 2), get(given, 3)
    outputs, y, size = get(given, 4), get(given, 5), get(given, 6)
    for output in range(first * size, min(last * size, outputs), size):
        panel, target, width = weights + 4 * output * columns, y + 4 * output, min(size, outputs - output)
        _multiply(x, n, panel, columns, width, target, outputs)
        if columns % WIDTH:
            score_rest(floats(x), n, floats(panel), columns, width, floats(target), outputs)


_multiply = score_rows(4, alike=True)
_PANELS = launch.Stage(_multiply_panels)
