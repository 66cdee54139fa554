"""Sizes, poisoned buffers and comparisons shared by the kernel tests."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from helpers import HAS_PAPERS

from edgekv.codecs.codec import Codec
from edgekv.kernels import arrays, reference, threads
from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.attend import readable
from edgekv.kernels.cpu.loops import address_of, bind
from edgekv.kvcache import schemes
from edgekv.weights.integers import SHRINK

C = TypeVar("C")
BASES = (Codec, import_module("edgekv.papers.retrieval").Index) if HAS_PAPERS else (Codec,)


def _below(kind: type) -> list[type[Any]]:
    return [each for base in kind.__subclasses__() for each in (base, *_below(base))]


assert schemes()  # whose files are imported with it
CODECS: dict[str, type[Any]] = {each.kind: each for base in BASES for each in _below(base) if each.backends}
"""Those that kernels read, by their kind."""

EITHER_WAY = ["parallel", "serial"]


@pytest.fixture(params=EITHER_WAY)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes kernels run in parallel or serially at any size of their work."""
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", 0 if request.param == "parallel" else 1 << 62)
    return str(request.param)


PARALLEL = pytest.mark.parametrize("way", ["parallel"], indirect=True)


@pytest.fixture
def use_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many threads share a kernel's work, however little, and also more than the machine has."""
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", 0)
    return lambda n: monkeypatch.setattr(threads, "count", lambda: n)


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention problem: queries (g, r * n, d) against `length` tokens from t0 on, in columns from s0 on."""

    d: int
    length: int
    g: int
    r: int
    n: int
    t0: int
    s0: int

    @property
    def m(self) -> int:
        return self.r * self.n

    @property
    def t1(self) -> int:
        return self.t0 + self.length

    @property
    def capacity(self) -> int:
        return (self.t1 + 70) // 64 * 64  # a whole number of blocks, with unused tokens behind t1

    def __str__(self) -> str:
        return "-".join(f"{name}{value}" for name, value in dataclasses.asdict(self).items())


def pairs(**axes: Collection[Any]) -> list[tuple[Any, ...]]:
    """Returns a few cases, one value of each axis in each, in which every two values of two axes meet."""
    n = [len(values) for values in axes.values()]
    two = itertools.combinations(range(len(n)), 2)
    apart = {((i, a), (j, b)) for i, j in two for a in range(n[i]) for b in range(n[j])}
    cases: list[dict[int, int]] = [] if len(n) > 1 else [{0: a} for a in range(n[0])]
    while apart:
        case = dict(min(apart))
        for i in range(len(n)):
            if i not in case:  # the value that meets most others which it has not met, of equal ones the rarest
                gains = [
                    (sum(tuple(sorted([(i, a), other])) in apart for other in case.items()), -used, -a)
                    for a in range(n[i])
                    for used in [sum(done[i] == a for done in cases)]
                ]
                case[i] = -max(gains)[2]
        apart -= set(itertools.combinations(sorted(case.items()), 2))
        cases.append(case)
    values = [list(each) for each in axes.values()]
    return [tuple(values[i][case[i]] for i in range(len(n))) for case in cases]


def backend_module(backend: Any, kind: str) -> Any:
    """Returns a backend's module beside a kind of codec; NumPy's may be the codec's own."""
    package, name = CODECS[kind].backends["cpu"].rpartition(".")[0], backend.__name__.rpartition(".")[2]
    return import_module(f"{package}.{'codec' if kind == 'signs' and name == 'reference' else name}")


def add_values(backend: Any, codec: Any, p: Any, t0: int, t1: int, out: Any) -> None:
    """Adds p (G, M, t1 - t0) times the values to out (G, M, D), by the codec or by its compiled loops."""
    if backend is reference:
        out += codec.sums(p, t0, t1)
        return
    codec = readable(codec, t0, t1)
    state, (n_groups, rows, _) = bind(codec), out.shape
    loops, step = state.loops, max(state.loops.block(codec), state.loops.at_once)
    scratch, store = np.empty(loops.scratch(codec, rows) + 64, np.uint8), address_of(state.args)
    for g in range(n_groups):
        sums = np.zeros((rows, loops.width(codec)), np.float32) if loops.finish else out[g]
        for t in range(t0 // step * step, t1, step):
            first, stop = max(t, t0), min(t + step, t1)
            weights = p[g, :, first - t0 :].__array_interface__["data"][0], p.strides[1] // 4
            loops.add.call(store, *weights, rows, g, first, stop - first, *map(address_of, (sums, scratch)))
        if loops.finish:
            loops.finish.call(store, address_of(sums), address_of(out[g]), rows)


def generator(case: Case) -> np.random.Generator:
    return np.random.default_rng(dataclasses.astuple(case))


def normal(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    return rng.standard_normal(shape, dtype=np.float32)


def awkward_rows(n: int, d: int, levels: int) -> npt.NDArray[np.float32]:
    """Returns tokens (1, n, d), 16 or more, at the edges of what so many levels encode; the last are random."""
    x = normal(np.random.default_rng(d), n, d)
    x[0] = 0
    x[1] = -0.0
    x[2] = np.where(np.arange(d) % 2, 0.0, -0.0)
    x[3] = 3.25
    x[4] = np.abs(x[4])
    x[5] = -np.abs(x[5])
    x[6] = 1e-12
    x[7] *= 1e-6  # the scale is a subnormal float16
    x[8] *= 1e5
    x[9] = 1e7  # beyond what the largest scale covers
    x[10] = np.arange(d) % levels  # with a step of 1
    x[11] = np.arange(d) % (2 * levels - 1) * 0.5  # halfway between levels
    x[12, 0], x[13, 0] = 1000, -1000  # outliers
    return x[None]


def assert_close(actual: npt.ArrayLike, expected: npt.ArrayLike, tolerance: float = 2e-6) -> None:
    """Asserts equality up to `tolerance` times the largest expected magnitude, and NaNs in the same places."""
    expected = np.asarray(expected)
    finite = expected[np.isfinite(expected)]
    scale = float(np.abs(finite).max()) if finite.size else 1.0
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(scale, 1e-30))


def bound(codec: C, **arrays: npt.NDArray[Any]) -> C:
    """Returns the codec on given arrays; any kernels may read it."""
    codec.bind(arrays, reference)
    return codec


def blank(codec: C, kernels: Any = reference, memory: Any = arrays) -> C:
    """Returns the codec on arrays of zeros in this memory."""
    codec.bind({name: memory.zeros(*spec) for name, spec in codec.layout().items()}, kernels)
    return codec


def quantize_numpy(weight: np.ndarray, bits: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes as `edgekv.weights.integers.quantize` specifies."""
    rows, columns = weight.shape
    zero, top = 1 << (bits - 1), (1 << bits) - 1
    blocks = -(-columns // block)
    w = np.pad(weight, ((0, 0), (0, blocks * block - columns))).reshape(rows, blocks, block)
    peak = np.take_along_axis(w, np.abs(w).argmax(-1)[..., None], -1)[..., 0]  # signed
    best_error = np.full(peak.shape, np.inf, np.float32)
    scale = np.zeros_like(peak)
    candidates = SHRINK if bits == 4 else SHRINK[:1]
    full = np.float32(-zero if bits == 4 else zero - 1)
    for shrink in candidates:
        d = peak * shrink / full
        codes = quantized_codes(w, d, zero, top) - np.float32(zero)
        square = (codes * codes).sum(-1, dtype=np.float32)
        if bits == 4:  # least-squares scale for these codes
            d = np.where(square > 0, (codes * w).sum(-1, dtype=np.float32) / np.maximum(square, 1), 0)
        error = np.square(w - codes * d[..., None]).sum(-1, dtype=np.float32)
        better = error < best_error
        best_error, scale = np.where(better, error, best_error), np.where(better, d, scale)
    scale = scale.astype(np.float32)
    final = quantized_codes(w, scale, zero, top).astype(np.uint8)
    return (final[..., 0::2] | final[..., 1::2] * np.uint8(16) if bits == 4 else final), scale


def quantized_codes(w: np.ndarray, scale: np.ndarray, zero: int, top: int) -> np.ndarray:
    inverse = np.where(scale != 0, 1 / np.where(scale != 0, scale, 1), 0).astype(np.float32)
    codes = np.clip(np.rint(w * inverse[..., None]) + np.float32(zero), 0, top)
    return np.asarray(codes)
