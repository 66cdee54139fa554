"""Selection, attention over chosen tokens, and the indexes of FIER and Quest: Numba against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import EITHER_PATH, assert_close, bound

from edgekv.kernels import cpu, reference
from edgekv.kernels.contract.segment import Segment
from edgekv.kernels.cpu import launch
from edgekv.kvcache.codecs import F16
from edgekv.kvcache.papers.fier import SignIndex
from edgekv.kvcache.papers.quest import PageIndex

SHAPES = [(1, 1, 1, 8), (2, 3, 1, 12), (1, 2, 5, 17), (3, 4, 2, 64), (2, 1, 3, 80), (2, 8, 1, 128)]  # G, R, n, D
EMPTY = -7
pytestmark = EITHER_PATH


@pytest.fixture(autouse=True)
def path(min_parallel_work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)


def scores_with_gaps(seed: int, g: int, m: int, columns: int) -> np.ndarray:
    """Rows apart in memory, as in a slice of a larger buffer."""
    return normal(seed, g, m + 1, columns + 3)[:, :m, 1 : columns + 1]


def select(module: object, s: np.ndarray, lo: np.ndarray, hi: np.ndarray, k: int) -> np.ndarray:
    chosen = np.full((s.shape[0], len(lo), k + 2), EMPTY, np.int32)
    module.select_top(s.copy(), lo, hi, k, chosen)
    return chosen


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 64, 333])
@pytest.mark.parametrize(("g", "r", "n"), [(1, 1, 1), (2, 1, 3), (3, 4, 1), (2, 8, 5)])
@pytest.mark.parametrize("k", [1, 7, 16, 100])
def test_select_top_takes_the_largest_sums(g: int, r: int, n: int, columns: int, k: int) -> None:
    s = scores_with_gaps(k, g, r * n, columns)
    rng = np.random.default_rng(columns)
    lo = rng.integers(0, columns, n)
    hi = rng.integers(lo, columns, endpoint=True)
    chosen = select(cpu, s, lo, hi, k)
    sums = s.reshape(g, r, n, columns).astype(float).sum(1)
    for i in range(g):
        for j in range(n):
            count = min(k, hi[j] - lo[j])
            got = chosen[i, j, :count]
            assert (np.diff(got) > 0).all()
            assert ((got >= lo[j]) & (got < hi[j])).all()
            assert (chosen[i, j, count:] == EMPTY).all()
            left = np.setdiff1d(np.arange(lo[j], hi[j]), got)
            if len(left) and count:
                assert sums[i, j, got].min() > sums[i, j, left].max() - 1e-5
    if r == 1:
        np.testing.assert_array_equal(chosen, select(reference, s, lo, hi, k))


@pytest.mark.parametrize("module", [cpu, reference])
def test_select_top_breaks_ties_by_the_lower_column(module: object) -> None:
    lo, hi = np.array([0]), np.array([40])
    s = np.zeros((1, 1, 40), np.float32)
    s[..., 1::2] = -0.0
    assert select(module, s, lo, hi, 5)[0, 0, :5].tolist() == [0, 1, 2, 3, 4]
    s[..., [3, 30, 31, 39]] = [2, 1, 1, 1]
    assert select(module, s, lo, hi, 3)[0, 0, :3].tolist() == [3, 30, 31]
    s[..., 3:] = -np.inf
    assert select(module, s, lo, hi, 5)[0, 0, :5].tolist() == [0, 1, 2, 3, 4]
    s[..., 20] = np.inf
    assert select(module, s, lo, hi, 2)[0, 0, :2].tolist() == [0, 20]


@pytest.mark.parametrize("module", [cpu, reference])
@pytest.mark.parametrize("heads", [1, 3])
def test_select_top_puts_nan_behind_all_numbers(module: object, heads: int) -> None:
    """Whatever the scores are, every place that is asked for gets a column of its own, and no other is written."""
    rng, columns = np.random.default_rng(heads), 100
    pool = np.array([np.nan, -np.float32(np.nan), np.inf, -np.inf, 0, 1, -1], np.float32)
    rows = [rng.choice(pool, columns, p=p) for p in rng.dirichlet(np.full(len(pool), 0.3), 40)]
    s = np.repeat(np.stack([*rows, *(np.full(columns, x) for x in pool)])[:, None], heads, axis=1)
    lo, hi = np.array([3]), np.array([columns - 2])
    for k in (1, 16, 94, 95, 200):
        for row, got in zip(s[:, 0], select(module, s, lo, hi, k)[:, 0], strict=True):
            order = np.lexsort((-row[3:-2], np.isnan(row[3:-2]))) + 3
            count = min(k, 95)
            assert got[:count].tolist() == sorted(order[:count].tolist())
            assert (got[count:] == EMPTY).all()


def test_select_top_is_exact_over_all_magnitudes() -> None:
    rng = np.random.default_rng(3)
    s = (rng.standard_normal((4, 2, 900)) * 10.0 ** rng.integers(-40, 30, (4, 2, 900))).astype(np.float32)
    lo, hi = np.zeros(2, np.int64), np.full(2, 900)
    for k in (1, 450, 899):
        np.testing.assert_array_equal(select(cpu, s, lo, hi, k), select(reference, s, lo, hi, k))


@pytest.mark.parametrize("length", [1, 7, 64, 65, 200])
@pytest.mark.parametrize(("g", "r", "n", "d"), SHAPES)
def test_attention_over_chosen_tokens(g: int, r: int, n: int, d: int, length: int) -> None:
    rng = np.random.default_rng([g, r, n, d, length])
    keys, values = (bound(F16(g, 300, d), half=half(normal(seed, g, 300, d))) for seed in (1, 2))
    q, visible = normal(3, g * r, n, d), (np.zeros(n, np.int64), np.full(n, 300))
    tokens = np.full((g, n, length + 3), 1 << 20, np.int32)  # beyond the counts lies rubbish
    counts = rng.integers(0, length, n, endpoint=True)
    counts[-1] = length
    tokens[:, :, :length] = rng.integers(0, 300, (g, n, length))
    for j in range(n):
        tokens[:, j, counts[j] :] = 1 << 20
    results = []
    for module in (cpu, reference):
        out = np.full(q.shape, np.nan, np.float32)
        module.attend(q, [Segment(keys, values, 0, 300, chosen=(tokens, counts))], visible, out)
        results.append(out)
    assert_close(*results)
    assert not results[0][:, counts == 0].any()


@pytest.mark.parametrize("minmax", [False, True])
@pytest.mark.parametrize("group", [32, 64, 256])
@pytest.mark.parametrize(("g", "r", "n", "d"), SHAPES)
def test_fier_index(g: int, r: int, n: int, d: int, group: int, minmax: bool) -> None:
    """Bits and levels to the bit, scores to rounding; only the groups asked for."""
    n_groups, b0, b1 = 5, 1, 4
    keys = half(normal(1, g, n_groups * group + 9, d) + 4 * normal(2, g, 1, d))
    q = normal(3, g, r * n, d)
    results = []
    for module in (cpu, reference):
        signs = np.full((g, n_groups * group // 32, d), 0xABCD1234, np.uint32)
        levels = np.full((g, n_groups, 2, d), 0x7E00, np.uint16)
        module.encode_fier(keys, group, minmax, signs, levels, b0, b0 + 1)
        module.encode_fier(keys, group, minmax, signs, levels, b0 + 1, b1)
        s = np.full((g, r * n + 1, 3 * group + 7), np.nan, np.float32)[:, : r * n, 1:-1]
        index = bound(SignIndex(g, n_groups * group, d, group, "mad"), signs=signs, levels=levels)
        module.scores(index, q, (b0 + 1) * group, b1 * group, s[:, :, 2 : 2 + 2 * group])
        results.append((signs, levels, s))
    for actual, expected in zip(results[0][:2], results[1][:2], strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert_close(results[0][2], results[1][2])
    assert np.isfinite(results[0][2]).sum() == g * r * n * 2 * group


def test_fier_keys_are_two_levels_per_channel_and_group() -> None:
    """The definition in float64: the mean plus or minus the mean absolute deviation, by the side of the mean."""
    keys = half(normal(7, 1, 64, 8))
    x = keys.view(np.float16).astype(float).reshape(2, 32, 8)
    mean = x.mean(1, keepdims=True)
    deviation = np.abs(x - mean).mean(1, keepdims=True)
    expected = np.where(x >= mean, mean + deviation, mean - deviation).reshape(64, 8)
    signs, levels = np.zeros((1, 2, 8), np.uint32), np.zeros((1, 2, 2, 8), np.uint16)
    s = np.empty((1, 8, 64), np.float32)
    cpu.encode_fier(keys, 32, False, signs, levels, 0, 2)
    index = bound(SignIndex(1, 64, 8, 32, "mad"), signs=signs, levels=levels)
    cpu.scores(index, np.eye(8, dtype=np.float32)[None], 0, 64, s)
    np.testing.assert_allclose(s[0].T, expected, atol=2e-3)


@pytest.mark.parametrize("page", [8, 16, 32])
@pytest.mark.parametrize(("g", "r", "n", "d"), SHAPES)
def test_quest_pages(g: int, r: int, n: int, d: int, page: int) -> None:
    keys = half(normal(1, g, 6 * page + 3, d))
    results = []
    for module in (cpu, reference):
        bounds = np.full((g, 6, 2 * d), 0x7E00, np.uint16)
        module.encode_pages(keys, page, bounds, 2, 5)
        results.append(bounds)
    np.testing.assert_array_equal(*results)
    x = keys.view(np.float16)[:, 2 * page : 5 * page].reshape(g, 3, page, d)
    np.testing.assert_array_equal(results[0][:, 2:5, :d].view(np.float16), x.max(2))
    assert (results[0][:, [0, 1, 5]] == 0x7E00).all()
    q, index = normal(3, g, r * n, d), bound(PageIndex(g, 6 * page, d, page), bounds=results[0])
    for module in (cpu, reference):
        s = np.full((g, r * n + 1, 9), np.nan, np.float32)[:, : r * n, 1:-1]
        module.scores(index, q, 2, 5, s[:, :, 2:5])
        larger = np.maximum(q[:, :, None] * x.max(2)[:, None], q[:, :, None] * x.min(2)[:, None])
        assert_close(s[:, :, 2:5], larger.sum(3))
        assert np.isfinite(s).sum() == g * r * n * 3
