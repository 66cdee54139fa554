"""Requirements of all kernels: two complete backends, aligned stores, threads."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numba
import numpy as np
import pytest

from edgekv import __main__, kernels
from edgekv.errors import ConfigError
from edgekv.kernels import arrays, cpu, interface, reference, threads
from edgekv.kernels.cpu import compile as jit
from edgekv.kernels.cpu import launch, scalar
from edgekv.kernels.cpu.loops import address_of

NAMES = [name for name in dir(interface.Kernels) if not name.startswith("_")]

SPINCOUNT = os.environ.get("GOMP_SPINCOUNT")

# Two Python threads in parallel kernels at once: Numba's workqueue would abort the process without the lock.
TWO_THREADS = """
import sys, threading, numba, numpy as np
from edgekv.kernels import numba_kernels, threads
from edgekv.kernels.cpu import launch
from edgekv.weights.formats import FORMATS
from edgekv.weights.rounding import Rounder

kernels = numba_kernels()
launch.MIN_PARALLEL_WORK = 0
weight, done = np.random.default_rng(0).standard_normal((256, 64), np.float32), []
rotated, rounder = np.tile(weight, 2), Rounder(np.eye(128, dtype=np.float32), 4)
def attend():
    for _ in range(200):
        s = np.zeros((2, 2, 64), np.float32)
        kernels.softmax(s, np.zeros(2, np.int64), np.full(2, 64))
        assert (s == 1 / 64).all()
        done.append(1)
def build():
    for _ in range(15):
        FORMATS["int4-32"].quantize(weight)
        rounder.round(rotated, rotated)
        done.append(1)
def serial():
    with threads.serial_kernels():
        build()
pair = [threading.Thread(target=globals()[sys.argv[1]]) for _ in range(2)]
for thread in pair: thread.start()
for thread in pair: thread.join()
print(numba.threading_layer(), threads.count(), len(done))
"""


@pytest.fixture
def all_threads() -> Iterator[None]:
    yield
    threads.configure()


@pytest.mark.parametrize("backend", [cpu, reference], ids=["numba", "numpy"])
def test_backends_provide_the_whole_specification(backend: object) -> None:
    assert {*NAMES} <= {*backend.__all__}
    for name in NAMES:
        _, *specified = inspect.signature(getattr(interface.Kernels, name)).parameters
        assert list(inspect.signature(getattr(backend, name)).parameters) == specified, name


@pytest.mark.usefixtures("all_threads")
def test_thread_count_is_bounded_by_the_machine() -> None:
    assert (kernels.numba_kernels(1), threads.count(), kernels.numpy_kernels(1)) == (cpu, 1, reference)
    threads.configure()
    available = threads.count()
    threads.configure(1000)
    assert threads.count() == available
    with pytest.raises(ConfigError, match="threads=0"):
        threads.configure(0)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_heads_times_splits_divide_evenly(n_threads: int, use_threads: Callable[[int], None]) -> None:
    use_threads(n_threads)
    for heads in range(1, 9):
        assert heads * launch.token_splits(heads, 1 << 40) % n_threads == 0


def test_settings_of_libgomp_are_not_left_in_the_environment() -> None:
    threads.configure()
    assert os.environ.get("GOMP_SPINCOUNT") == SPINCOUNT


@pytest.mark.parametrize("own", [None, "20"])
def test_the_command_line_bounds_how_long_blas_spins(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", own or "")
    if own is None:
        monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT")
    monkeypatch.setattr("edgekv.cli.main", lambda on_import: on_import() and 0)
    __main__.main()
    assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == (own or "16")
    assert np.isinf(np.float32(1e38) * np.float32(10))  # of damaged weights, without a warning


@pytest.mark.parametrize(
    ("what", "layer"),
    [("attend", "default"), *((what, "workqueue") for what in ("attend", "build", "serial"))],
)
def test_two_python_threads_may_use_kernels_at_once(what: str, layer: str) -> None:
    environment = {**os.environ, "NUMBA_THREADING_LAYER": layer, "NUMBA_NUM_THREADS": "2"}
    command = [sys.executable, "-c", TWO_THREADS, what]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    name, count, done = result.stdout.split()
    assert (count, done) == ("2", "400" if what == "attend" else "30")
    assert layer in ("default", name)


@pytest.mark.usefixtures("all_threads")
def test_each_python_thread_uses_the_configured_number() -> None:
    """Numba's own setting belongs to the Python thread that made it; and it is put back."""
    threads.configure(1)
    seen = []

    def work() -> None:
        before = numba.get_num_threads()
        threads.run_parallel(lambda: seen.append(numba.get_num_threads()))
        assert numba.get_num_threads() == before
        seen.append(0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [1, 0]


@pytest.mark.parametrize(("shape", "dtype"), [((3,), np.uint64), ((2, 5, 7), np.uint8), ((1, 1, 130), np.float32)])
def test_aligned_zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> None:
    x = arrays.zeros(shape, dtype)
    assert (x.shape, x.dtype, x.flags.c_contiguous, x.flags.writeable) == (shape, dtype, True, True)
    assert x.ctypes.data % 64 == 0
    assert not x.any()


def test_addresses_are_of_contiguous_arrays() -> None:
    x = np.zeros((3, 4), np.float32)
    fixed = x.copy()
    fixed.flags.writeable = False
    for whole in (x, x[1:], x[:1, :2], x[:0, :2], fixed, fixed[2:]):
        assert address_of(whole) == whole.ctypes.data
    for parts in (x.T, x[:, :2], x[::2], x[::-1], np.broadcast_to(x[0], (3, 4)), fixed.T):
        with pytest.raises(ValueError, match="kernels take contiguous ones"):
            address_of(parts)


def test_exact_arithmetic_stays_exact_when_a_fast_function_calls_it_first() -> None:
    rounded = jit.jit(scalar.round_to_even)

    @numba.njit(fastmath=jit.FAST)
    def calls_it(x: float) -> float:
        return rounded(x)

    @numba.njit
    def calls_it_too(x: float) -> float:
        return rounded(x)

    assert [calls_it(np.float32(x)) for x in (0.3, 0.7)] == [0, 1]
    assert [calls_it_too(np.float32(x)) for x in (0.3, 0.7)] == [0, 1]
