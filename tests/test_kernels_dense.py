"""Keys and values in float16 and float32: NumPy against the formulas, Numba against NumPy."""

from __future__ import annotations

import struct
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
from kernel_cases import (
    EITHER_PATH,
    HEAD_DIMS,
    Case,
    assert_close,
    cases,
    codec,
    either_way,
    generator,
    inside,
    normal,
    poisoned_scores,
)

from edgekv.kernels import cpu, reference
from edgekv.kernels.cpu import emit, launch, scalar
from edgekv.kernels.cpu.compile import intrinsic
from edgekv.kernels.cpu.scalar import as_float, float_to_half

CASES = cases(HEAD_DIMS)
SMALL = Case(d=12, length=70, g=2, r=3, n=2, t0=3, s0=2)
SPECIAL = [0.0, -0.0, 1.0, 65504.0, 65519.0, 65520.0, -1e6, 6e-8, 3e-8, 2.9802322e-8, 2.98e-8, -6.1e-5, 1e-30]
TIES = [2048.0 + i + 0.5 * j for i in (0, 1, 2, 3) for j in (0, 1, 2)]


def half_store(rng: np.random.Generator, case: Case) -> npt.NDArray[np.uint16]:
    """Keys or values as float16 bits, NaN in the tokens outside of the case's range."""
    store = np.full((case.g, case.capacity, case.d), np.nan, np.float16)
    store[:, case.t0 : case.t1] = normal(rng, case.g, case.length, case.d)
    return store.view(np.uint16)


def as_float32(store: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return store.view(np.float16).astype(np.float32)


def halves(half: npt.NDArray[np.uint16]) -> Any:
    return codec("f16", half.shape, {"half": half})


def stored(half: npt.NDArray[np.uint16]) -> tuple[Any, Any]:
    """Codecs of float16 and of float32 with the same tokens (G, cap, D)."""
    return halves(half), codec("f32", half.shape, {"single": as_float32(half)})


def test_numpy_scores_and_sums_are_products_with_the_numbers() -> None:
    case, rng = SMALL, generator(SMALL)
    q, half = normal(rng, case.g, case.m, case.d), half_store(rng, case)
    numbers = half.view(np.float16)[:, case.t0 : case.t1].astype(np.float64)
    p, before = rng.random((case.g, case.m, case.length), np.float32), normal(rng, case.g, case.m, case.d)
    for tokens in stored(half):
        s, out = np.empty((case.g, case.m, case.length), np.float32), before.copy()
        reference.scores(tokens, q, case.t0, case.t1, s)
        reference.sums(tokens, p, case.t0, case.t1, out)
        assert_close(s, np.einsum("gmd,gtd->gmt", q.astype(np.float64), numbers))
        assert_close(out, before + np.einsum("gmt,gtd->gmd", p.astype(np.float64), numbers))


def test_numpy_encodes_to_nearest_even() -> None:
    finite = [x for x in SPECIAL + TIES if abs(x) < 65520]
    store = np.full((1, len(finite), 1), 0xABCD, np.uint16)
    reference.encode(halves(store), np.array(finite, np.float32).reshape(1, -1, 1), 0)
    assert store.ravel().tolist() == [struct.unpack("<H", struct.pack("<e", x))[0] for x in finite]


@either_way(CASES)
def test_numba_equals_numpy(case: Case, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    rng = generator(case)
    q, half, columns = normal(rng, case.g, case.m, case.d), half_store(rng, case), inside(case)
    before = normal(rng, case.g, case.m, case.d)
    for tokens in stored(half):
        s, expected = poisoned_scores(case, case.g == 1), poisoned_scores(case, True)
        for backend, scores in ((cpu, s), (reference, expected)):
            backend.scores(tokens, q, case.t0, case.t1, scores[:, :, columns])
        assert_close(s, expected)
        s[:, :, columns] = rng.random((case.g, case.m, case.length), np.float32)
        sums = [before.copy(), before.copy()]
        for backend, out in zip((cpu, reference), sums, strict=True):
            backend.sums(tokens, s[:, :, columns], case.t0, case.t1, out)
        assert_close(*sums)


@EITHER_PATH
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 12), (3, 130, 80)])
def test_numba_encodes_as_numpy(
    shape: tuple[int, int, int], min_parallel_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    x = normal(np.random.default_rng(0), *shape) * 1000
    special = np.float32([*TIES, *SPECIAL, np.inf, -np.inf])[: x.size]
    x.reshape(-1)[: special.size] = special
    stores = [np.full((shape[0], shape[1] + 9, shape[2]), 0xABCD, np.uint16) for _ in range(2)]
    with np.errstate(over="ignore"):
        reference.encode(halves(stores[0]), x, 5)
    cpu.encode(halves(stores[1]), x, 5)
    np.testing.assert_array_equal(stores[1], stores[0])


def test_numba_encodes_nan_as_nan() -> None:
    store = np.zeros((1, 1, 8), np.uint16)
    cpu.encode(halves(store), np.full((1, 1, 8), np.nan, np.float32), 0)
    assert np.isnan(store.view(np.float16)).all()


def test_numba_reads_every_float16() -> None:
    """One token of weight 1 at a time, so that infinities and NaNs stay where they are."""
    values = np.arange(1 << 16, dtype=np.uint16).reshape(1, 256, 256)
    for t in range(256):
        out = np.zeros((1, 1, 256), np.float32)
        cpu.sums(codec("f16", values.shape, {"half": values}), np.ones((1, 1, 1), np.float32), t, t + 1, out)
        np.testing.assert_array_equal(out[0, 0], values[0, t].view(np.float16).astype(np.float32))


def test_conversions_without_processor_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an x86 without F16C runs: every float16, and float32 of every exponent."""
    monkeypatch.setattr(scalar, "HAS_INSTRUCTIONS", False)

    @intrinsic
    def widen_eight(context: Any, bits: Any, x: Any, i: Any) -> Any:
        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            source, target = (emit.address(context, b, *each) for each in ((bits, args[::2]), (x, args[1:])))
            emit.store(b, scalar.widen(b, emit.load(b, emit.vector(emit.I16, 8), source)), target)
            return context.get_dummy_value()

        return numba.types.none(bits, x, numba.types.intp), build

    @numba.njit
    def widen(bits, scalars, vectors):
        for i in range(len(bits)):
            scalars[i] = as_float(bits[i])
        for i in range(0, len(bits), 8):
            widen_eight(bits, vectors, i)

    @numba.njit
    def narrow(x, bits):
        for i in range(len(x)):
            bits[i] = float_to_half(x[i])

    bits = np.arange(1 << 16, dtype=np.uint16)
    scalars, vectors = np.zeros((2, 1 << 16), np.float32)
    widen(bits, scalars, vectors)
    np.testing.assert_array_equal(scalars, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(vectors, scalars)

    random = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    x = np.concatenate([np.float32([*TIES, *SPECIAL, np.inf, -np.inf, np.nan]), random])
    narrowed = np.zeros(x.shape, np.uint16)
    narrow(x, narrowed)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(narrowed.view(np.float16), expected)
    np.testing.assert_array_equal(np.signbit(narrowed.view(np.float16)), np.signbit(expected))
