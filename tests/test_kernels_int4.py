"""4-bit values: NumPy against H1B-KV's equation 4 element by element, Numba against NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from kernel_cases import (
    EITHER_PATH,
    HEAD_DIMS,
    Case,
    assert_close,
    awkward_rows,
    cases,
    codec,
    generator,
    inside,
    normal,
    own,
    poisoned_scores,
)

from edgekv.kernels import cpu, reference
from edgekv.kernels.cpu import launch
from edgekv.papers.int4 import reference as plain

CASES = cases(HEAD_DIMS)
POISON = 0xAB

Store = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16], npt.NDArray[np.uint8]]


def empty_store(g: int, capacity: int, d: int) -> Store:
    """codes, delta, zero; decoding an untouched token gives huge values."""
    return (
        np.full((g, capacity, d // 2), POISON, np.uint8),
        np.full((g, capacity), 0x7BFF, np.uint16),
        np.full((g, capacity), POISON, np.uint8),
    )


def decode(store: Store) -> npt.NDArray[np.float64]:
    codes, delta, zero = store
    levels = np.concatenate([codes & 15, codes >> 4], axis=2).astype(np.float64)
    return (levels - zero[..., None]) * delta.view(np.float16)[..., None].astype(np.float64)


def test_numpy_encodes_as_the_equation_says() -> None:
    x = awkward_rows(16, 24, 16)
    codes, delta, zero = store = empty_store(1, 18, 24)
    own(reference, "int4").encode_int4(x, *store, 1)
    for t, row in enumerate(x[0], start=1):
        step = float(delta.view(np.float16)[0, t])
        lo, hi = min(row.min(), np.float32(0)), max(row.max(), np.float32(0))
        exact = float(hi - lo) / 15
        assert step == 65504 if exact > 65504 else exact <= step <= exact * (1 + 2**-10) + 2**-24
        nibbles = np.concatenate([codes[0, t] & 15, codes[0, t] >> 4])
        if step:
            assert zero[0, t] == round(float(-lo / np.float32(step)))
            for v, level in zip(row, nibbles, strict=True):
                assert level == min(max(round(float(v / np.float32(step))) + int(zero[0, t]), 0), 15)
        else:
            assert zero[0, t] == 0
            assert not nibbles.any()
    for array, untouched in zip(store, empty_store(1, 18, 24), strict=True):
        np.testing.assert_array_equal(array[0, [0, 17]], untouched[0, [0, 17]])


@pytest.mark.parametrize("backend", [cpu, reference], ids=["numba", "numpy"])
def test_error_is_half_a_step_or_one_at_the_ends(backend: object) -> None:
    x = normal(np.random.default_rng(0), 3, 500, 64) + 0.5
    store = empty_store(3, 500, 64)
    own(backend, "int4").encode_int4(x, *store, 0)
    codes, delta, _ = store
    in_steps = np.abs(decode(store) - x) / delta.view(np.float16)[..., None]
    levels = np.concatenate([codes & 15, codes >> 4], axis=2)
    assert in_steps[(levels > 0) & (levels < 15)].max() <= 0.5001
    assert in_steps.max() <= 1.0001
    assert levels.max() == 15


@pytest.mark.parametrize("backend", [cpu, reference], ids=["numba", "numpy"])
def test_zeros_decode_to_zeros(backend: object) -> None:
    store = empty_store(1, 1, 16)
    own(backend, "int4").encode_int4(np.zeros((1, 1, 16), np.float32), *store, 0)
    assert store[1][0, 0] == 0
    assert not decode(store).any()


@EITHER_PATH
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_numba_encodes_the_same_bits(d: int, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    random = normal(np.random.default_rng(d), 2, 400, d) * 3
    for x in (random, awkward_rows(16, d, 16)):
        stores = [empty_store(len(x), 409, d) for _ in range(2)]
        own(reference, "int4").encode_int4(x, *stores[0], 7)
        own(cpu, "int4").encode_int4(x, *stores[1], 7)
        for actual, expected in zip(stores[1], stores[0], strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_numpy_values_are_added_with_their_weights() -> None:
    rng = np.random.default_rng(0)
    store = empty_store(2, 90, 12)
    own(reference, "int4").encode_int4(normal(rng, 2, 70, 12), *store, 3)
    p, out = rng.random((2, 5, 74), np.float32), normal(rng, 2, 5, 12)
    expected = out + np.einsum("gmt,gtd->gmd", p[:, :, 2:72], decode(store)[:, 3:73])
    plain.values_int4(p, 2, *store, 3, 73, out)
    assert_close(out, expected)


@EITHER_PATH
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numba_adds_the_same_values(case: Case, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    rng = generator(case)
    store = empty_store(case.g, case.capacity, case.d)
    own(reference, "int4").encode_int4(normal(rng, case.g, case.length, case.d), *store, case.t0)
    p = poisoned_scores(case, contiguous=case.g == 1)
    p[:, :, inside(case)] = rng.random((case.g, case.m, case.length), np.float32)
    out = normal(rng, case.g, case.m, case.d)
    expected = out.copy()
    plain.values_int4(p, case.s0, *store, case.t0, case.t1, expected)
    arrays = dict(zip(("codes", "delta", "zero"), store, strict=True))
    values = codec("int4", (case.g, case.capacity, case.d), arrays)
    cpu.sums(values, p[:, :, inside(case)], case.t0, case.t1, out)
    # rounding errors are relative to codes of up to 15, which the zero point then takes back
    scale = np.abs(p[:, :, inside(case)]).sum(axis=2).max() * 15 * store[1].view(np.float16).max()
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6 * float(scale))
