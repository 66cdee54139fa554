"""Keys and values in float16 and float32: NumPy against the formulas, Numba against NumPy."""

from __future__ import annotations

import struct

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
    generator,
    inside,
    normal,
    poisoned_scores,
)

from edgekv.kernels import cpu, reference
from edgekv.kernels.cpu import launch, scalar, simd
from edgekv.kernels.cpu.scalar import as_float, float_to_half
from edgekv.kernels.reference import rows as plain

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


def test_numpy_scores_are_dot_products() -> None:
    case, rng = SMALL, generator(SMALL)
    q, keys = normal(rng, case.g, case.m, case.d), half_store(rng, case)
    s = poisoned_scores(case, contiguous=True)
    plain.scores_f16(q, keys, case.t0, case.t1, s, case.s0)
    expected = np.full(s.shape, np.nan)
    for g, m, t in np.ndindex(case.g, case.m, case.length):
        key = keys.view(np.float16)[g, case.t0 + t].astype(np.float64)
        expected[g, m, case.s0 + t] = sum(q[g, m].astype(np.float64) * key)
    assert_close(s, expected)
    from_floats = poisoned_scores(case, contiguous=True)
    plain.scores_f32(q, as_float32(keys), case.t0, case.t1, from_floats, case.s0)
    assert_close(from_floats, expected)


def test_numpy_values_are_added_with_their_weights() -> None:
    case, rng = SMALL, generator(SMALL)
    p, values = poisoned_scores(case, contiguous=True), half_store(rng, case)
    p[:, :, inside(case)] = rng.random((case.g, case.m, case.length), np.float32)
    out = normal(rng, case.g, case.m, case.d)
    expected = out.astype(np.float64)
    for g, m, t in np.ndindex(case.g, case.m, case.length):
        value = values.view(np.float16)[g, case.t0 + t].astype(np.float64)
        expected[g, m] += p[g, m, case.s0 + t] * value
    from_floats = out.copy()
    plain.values_f16(p, case.s0, values, case.t0, case.t1, out)
    assert_close(out, expected)
    plain.values_f32(p, case.s0, as_float32(values), case.t0, case.t1, from_floats)
    assert_close(from_floats, expected)


def test_numpy_encodes_to_nearest_even() -> None:
    finite = [x for x in SPECIAL + TIES if abs(x) < 65520]
    store = np.full((1, len(finite), 1), 0xABCD, np.uint16)
    reference.encode_f16(np.array(finite, np.float32).reshape(1, -1, 1), store, 0)
    assert store.ravel().tolist() == [struct.unpack("<H", struct.pack("<e", x))[0] for x in finite]


@EITHER_PATH
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numba_equals_numpy(case: Case, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    rng = generator(case)
    q, store = normal(rng, case.g, case.m, case.d), half_store(rng, case)
    s, expected = poisoned_scores(case, case.g == 1), poisoned_scores(case, True)
    plain.scores_f16(q, store, case.t0, case.t1, expected, case.s0)
    span, columns, shape = (case.t0, case.t1), inside(case), store.shape
    halves, floats = codec("f16", shape, {"half": store}), codec("f32", shape, {"single": as_float32(store)})
    cpu.scores(halves, q, *span, s[:, :, columns])
    assert_close(s, expected)
    s[...] = np.nan
    cpu.scores(floats, q, *span, s[:, :, columns])
    assert_close(s, expected)

    s[:, :, inside(case)] = rng.random((case.g, case.m, case.length), np.float32)
    out = normal(rng, case.g, case.m, case.d)
    expected, from_floats = out.copy(), out.copy()
    plain.values_f16(s, case.s0, store, case.t0, case.t1, expected)
    cpu.sums(halves, s[:, :, columns], *span, out)
    cpu.sums(floats, s[:, :, columns], *span, from_floats)
    assert_close(out, expected)
    assert_close(from_floats, expected)


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
        reference.encode_f16(x, stores[0], 5)
    cpu.encode_f16(x, stores[1], 5)
    np.testing.assert_array_equal(stores[1], stores[0])


def test_numba_encodes_nan_as_nan() -> None:
    store = np.zeros((1, 1, 8), np.uint16)
    cpu.encode_f16(np.full((1, 1, 8), np.nan, np.float32), store, 0)
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

    @numba.njit
    def widen(bits, scalars, vectors):
        for i in range(len(bits)):
            scalars[i] = as_float(bits[i])
        for i in range(0, len(bits), simd.LANES):
            simd.store(vectors, i, simd.load(bits, i))

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
