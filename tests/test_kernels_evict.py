"""The kernels of eviction: both backends against the definition; scores of packed tokens against NumPy."""

import numpy as np
import pytest
from kernel_cases import (
    EITHER_PATH,
    HEAD_DIMS,
    Case,
    assert_close,
    bound,
    cases,
    generator,
    inside,
    normal,
    poisoned_scores,
)

from edgekv.kernels import Kernels, cpu, reference
from edgekv.kernels.cpu import launch
from edgekv.kvcache.papers.evicting import highest
from edgekv.kvcache.papers.mikv import TokenKeys

SHAPES = [(1, 1, 1), (2, 2, 70), (3, 5, 129), (32, 1, 1024)]  # KV heads, rows, slots
POISON = np.float32(np.nan)


@pytest.fixture(params=["numpy", "serial", "parallel"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The specification, and Numba's kernels called in both ways."""
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", 0 if request.param == "parallel" else 1 << 62)
    return reference if request.param == "numpy" else cpu


@pytest.mark.parametrize("head_dim", [1, 24, 128])
@pytest.mark.parametrize("n_kv_heads", [1, 3])
def test_a_token_lands_in_each_heads_own_slot(kernels: Kernels, n_kv_heads: int, head_dim: int) -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, n_kv_heads, 5, head_dim)).astype(np.float32)[:, :, 2]  # rows with gaps
    keys, values = np.full((2, n_kv_heads, 7, head_dim), 0xFFFF, np.uint16)
    positions = np.full((n_kv_heads, 7), -1, np.int32)
    slots = rng.integers(0, 7, n_kv_heads)
    kernels.store_token(k, v, 1234, slots, keys, values, positions)
    for store, x in ((keys, k), (values, v)):
        for g in range(n_kv_heads):
            np.testing.assert_array_equal(store[g, slots[g]], x[g].astype(np.float16).view(np.uint16))
    untouched = np.ones((n_kv_heads, 7), bool)
    untouched[np.arange(n_kv_heads), slots] = False
    assert (keys[untouched] == 0xFFFF).all()
    assert (values[untouched] == 0xFFFF).all()
    np.testing.assert_array_equal(positions, np.where(untouched, -1, 1234))


@pytest.mark.parametrize("keep", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_added_over_rows(kernels: Kernels, shape: tuple[int, int, int], keep: float) -> None:
    n_kv_heads, rows, n = shape
    rng = np.random.default_rng(1)
    p = np.full((n_kv_heads, rows + 1, n + 3), POISON, np.float32)[:, :rows]
    p[:, :, :n] = rng.random((n_kv_heads, rows, n))
    mass = np.full((n_kv_heads, n + 2), POISON, np.float32)
    mass[:, :n] = rng.random((n_kv_heads, n))
    expected = keep * mass[:, :n].astype(float) + p[:, :, :n].astype(float).sum(axis=1)
    kernels.add_attention(p, mass, n, keep)
    np.testing.assert_allclose(mass[:, :n], expected, rtol=1e-5)
    assert np.isnan(mass[:, n:]).all()


@pytest.mark.parametrize("visible", [-5, 0, 9])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_lowest_goes_the_oldest_of_equals(kernels: Kernels, shape: tuple[int, int, int], visible: int) -> None:
    n_kv_heads, _, n = shape
    rng = np.random.default_rng(2)
    positions = np.full((n_kv_heads, n + 2), -7, np.int32)  # lower than all, but beyond n
    positions[:, :n] = np.argsort(rng.random((n_kv_heads, n)), axis=1)
    mass = np.zeros((n_kv_heads, n + 2), np.float32)
    mass[:, :n] = rng.integers(1, 5, (n_kv_heads, n)) / 4  # many ties
    protected = max(1, n // 2)
    before, slots = mass.copy(), np.full(n_kv_heads, -1)
    kernels.evict_lowest(mass, positions, n, visible, protected, slots)
    for g in range(n_kv_heads):
        candidates = [t for t in range(n) if positions[g, t] < protected]
        expected = min(candidates, key=lambda t: (positions[g, t] >= visible and before[g, t], positions[g, t]))
        assert slots[g] == expected
    before[np.arange(n_kv_heads), slots] = 0
    np.testing.assert_array_equal(mass, before)


def test_mass_that_is_no_number_counts_as_none(kernels: Kernels) -> None:
    """As in `highest`, which says what is left; infinity is the most, and what is protected stays before it."""
    pool = np.array([np.nan, -np.float32(np.nan), np.inf, -1, 0, 0.5, 2], np.float32)
    mass = np.random.default_rng(3).choice(pool, (40, 12))
    mass[0], mass[1] = np.nan, np.inf
    positions = np.tile(np.arange(12, dtype=np.int32), (40, 1))
    slots = np.full(40, -1)
    left = highest(mass, positions, 11, 2, 9)
    kernels.evict_lowest(mass.copy(), positions, 12, 2, 9, slots)
    assert (slots < 2).all()
    for g in range(40):
        assert np.setdiff1d(np.arange(12), left[g]).tolist() == [slots[g]]
    kernels.evict_lowest(mass.copy(), positions, 12, 0, 9, slots)
    for g, row in enumerate(np.where(mass[:, :9] > 0, mass[:, :9], 0)):
        assert slots[g] == row.argmin()


def token_keys(codes: np.ndarray, step: np.ndarray, low: np.ndarray, balance: np.ndarray) -> TokenKeys:
    (g, capacity), d = step.shape, balance.shape[1]
    codec = TokenKeys(g, capacity, d, 8 * codes.shape[2] // d)
    codec.balance = balance
    return bound(codec, codes=codes, step=step.view(np.uint16), low=low.view(np.uint16))


@EITHER_PATH
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("case", cases(HEAD_DIMS), ids=str)
def test_token_scores_equal_numpys(
    case: Case, bits: int, min_parallel_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)
    rng = generator(case)
    q = normal(rng, case.g, case.m, case.d)
    codes = rng.integers(0, 256, (case.g, case.capacity // 32, case.d * bits // 8, 32), np.uint8)
    step, low = np.full((2, case.g, case.capacity), np.nan, np.float16)  # unused tokens stay poisoned
    step[:, case.t0 : case.t1] = rng.random((case.g, case.length)) * 0.1
    low[:, case.t0 : case.t1] = rng.standard_normal((case.g, case.length))
    s, expected = (poisoned_scores(case, contiguous=bool(case.t0)) for _ in range(2))
    codec = token_keys(codes, step, low, rng.uniform(0.5, 2, (case.g, case.d)).astype(np.float32))
    for backend, scores in ((reference, expected), (cpu, s)):
        backend.scores(codec, q, case.t0, case.t1, scores[:, :, inside(case)])
    assert_close(s, expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_specification_of_token_scores_is_a_product_with_decoded_keys(bits: int) -> None:
    rng = np.random.default_rng(bits)
    n_bytes, mask = 16 * bits // 8, 2**bits - 1
    codes = rng.integers(0, 256, (1, 2, n_bytes, 32), np.uint8)
    step, low = rng.random((2, 1, 40)).astype(np.float16)
    q, s = normal(rng, 1, 3, 16), np.empty((1, 3, 30), np.float32)
    balance = rng.uniform(0.5, 2, (1, 16)).astype(np.float32)
    reference.scores(token_keys(codes, step, low, balance), q, 5, 35, s)
    for t in range(5, 35):
        token = codes[0, t // 32, :, t % 32]
        key = [
            float(low[0, t]) + float(step[0, t]) * (token[d % n_bytes] >> d // n_bytes * bits & mask)
            for d in range(16)
        ]
        np.testing.assert_allclose(s[0, :, t - 5], q[0] / balance @ np.array(key), rtol=1e-4, atol=1e-4)
