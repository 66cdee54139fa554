"""The number of threads of kernels, and calls of parallel kernels.

Numba runs them on a pool of the whole process: OpenMP's where libgomp is installed (the packages `libgomp1` of
Debian, `libgomp` of others), else its own "workqueue", which aborts the process if two Python threads
use it at once and therefore gets a lock here. A Python thread within `serial_kernels` uses itself alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numba

from edgekv.errors import ConfigError

_local = threading.local()


@contextmanager
def serial_kernels() -> Iterator[None]:
    """Has kernels that this Python thread calls within the block use no other threads."""
    _local.on = True
    try:
        yield
    finally:
        _local.on = False


def is_serial() -> bool:
    """Returns whether this Python thread is within `serial_kernels`."""
    return getattr(_local, "on", False)


# libgomp's idle threads spin for milliseconds before they sleep, on cores that another program may need by then:
# on a busy machine a kernel took 20 ms in place of 0.25. 5,000 rounds (0.1 ms on x86-64) outlast what Python does
# between two kernels of a token, where waking a thread takes 30 to 50 us.
GOMP_SPINCOUNT = "5000"

_start_lock = threading.Lock()
_guard: AbstractContextManager[Any] = nullcontext()
_n_threads = 0  # until the pool is started


def configure(n: int | None = None) -> None:
    """Sets the threads of this process's kernels to ``n``; None: as many as Numba has (NUMBA_NUM_THREADS).

    More than Numba has means all of them. Raises `ConfigError` if n is less than 1.
    """
    global _n_threads
    if n is not None and n < 1:
        raise ConfigError(field="threads", value=n, accepted=["1 or more", "None for all cores"])
    _start()
    available = int(numba.config.NUMBA_NUM_THREADS)
    _n_threads = min(n or available, available)


def count() -> int:
    """Returns the number of threads of a parallel kernel that this Python thread calls."""
    if is_serial():
        return 1
    if not _n_threads:
        configure()
    return _n_threads


def run_parallel(kernel: Callable[..., None], *args: Any, n_threads: int | None = None) -> None:
    """Calls a kernel with `count()` threads, or ``n_threads`` of them, from any Python thread.

    kernel: what shares its work among Numba's threads (`edgekv.kernels.cpu.launch`).
    """
    if not _n_threads:
        _start()  # makes the guard
    n_threads = min(n_threads or count(), int(numba.config.NUMBA_NUM_THREADS))
    before = numba.get_num_threads()  # Numba keeps it per Python thread
    if before != n_threads:
        numba.set_num_threads(n_threads)
    try:
        with _guard:
            kernel(*args)
    finally:
        if before != n_threads:
            numba.set_num_threads(before)


def _start() -> None:
    """Loads Numba's threading layer, with libgomp's spinning bounded unless the user has set it."""
    global _guard, _n_threads
    with _start_lock:
        if _n_threads:
            return
        ours = not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
        if ours:
            os.environ["GOMP_SPINCOUNT"] = GOMP_SPINCOUNT
        numba.set_num_threads(numba.get_num_threads())  # loads the layer, and libgomp reads its settings then
        if ours:
            del os.environ["GOMP_SPINCOUNT"]
        if numba.threading_layer() == "workqueue":
            _guard = threading.Lock()
        _n_threads = int(numba.config.NUMBA_NUM_THREADS)
