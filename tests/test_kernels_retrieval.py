"""Selection, tokens side by side, and the indexes of FIER and Quest: Numba against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import EITHER_PATH, assert_close, bound, pairs

from edgekv.kernels import cpu, reference
from edgekv.kernels.cpu import launch
from edgekv.papers.fier import SignIndex
from edgekv.papers.quest import PageIndex
from edgekv.papers.retrieval import largest

SHAPES = [(1, 1, 1, 8), (2, 3, 1, 12), (1, 2, 5, 17), (3, 4, 2, 64), (2, 1, 3, 80), (2, 8, 1, 128)]  # G, R, n, D
pytestmark = EITHER_PATH


@pytest.fixture(autouse=True)
def path(min_parallel_work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", min_parallel_work)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)


@pytest.mark.parametrize("k", [1, 7, 16, 100])
@pytest.mark.parametrize("columns", [1, 15, 64, 333])
def test_the_largest_are_taken(k: int, columns: int) -> None:
    """By a stable sort: ties go to the lower columns, and NaN of either sign comes behind -inf."""
    rng = np.random.default_rng([k, columns])
    pool = np.array([np.nan, -np.float32(np.nan), np.inf, -np.inf, 0, -0.0, 1, -1], np.float32)
    s = [rng.choice(pool, columns, p=p) for p in rng.dirichlet(np.full(len(pool), 0.3), 40)]
    s += [np.full(columns, x) for x in pool]
    s += [*normal(k, 4, columns).round(1), *(normal(k, 4, columns) * 10.0 ** rng.integers(-40, 30, (4, 1)))]
    k = min(k, columns)
    found = largest(np.array(s, np.float32), k)
    for row, got in zip(np.array(s, np.float32), found, strict=True):
        order = np.lexsort((-row, np.isnan(row)))
        assert got.tolist() == sorted(order[:k].tolist())


@pytest.mark.parametrize(
    ("shape", "group", "minmax"), pairs(shape=SHAPES, group=[32, 64, 256], minmax=[False, True])
)
def test_fier_index(shape: tuple[int, int, int, int], group: int, minmax: bool) -> None:
    """Bits and levels to the bit, scores to rounding; only the groups asked for."""
    (g, r, n, d), n_groups, b0, b1 = shape, 5, 1, 4
    keys = half(normal(1, g, n_groups * group + 9, d) + 4 * normal(2, g, 1, d))
    q = normal(3, g, r * n, d)
    signs = np.full((g, n_groups * group // 32, d), 0xABCD1234, np.uint32)
    levels = np.full((g, n_groups, 2, d), 0x7E00, np.uint16)
    index = bound(
        SignIndex(g, n_groups * group, d, group, "minmax" if minmax else "mad"), signs=signs, levels=levels
    )
    index.encode(keys, b0, b0 + 1)
    index.encode(keys, b0 + 1, b1)
    assert (signs[:, np.r_[: b0 * group // 32, b1 * group // 32 : n_groups * group // 32]] == 0xABCD1234).all()
    assert (levels[:, [0, 4]] == 0x7E00).all()
    results = []
    for module in (cpu, reference):
        s = np.full((g, r * n + 1, 3 * group + 7), np.nan, np.float32)[:, : r * n, 1:-1]
        module.scores(index, q, (b0 + 1) * group, b1 * group, s[:, :, 2 : 2 + 2 * group])
        results.append(s)
    assert_close(*results)
    assert np.isfinite(results[0]).sum() == g * r * n * 2 * group


def test_fier_keys_are_two_levels_per_channel_and_group() -> None:
    """The definition in float64: the mean plus or minus the mean absolute deviation, by the side of the mean."""
    keys = half(normal(7, 1, 64, 8))
    x = keys.view(np.float16).astype(float).reshape(2, 32, 8)
    mean = x.mean(1, keepdims=True)
    deviation = np.abs(x - mean).mean(1, keepdims=True)
    expected = np.where(x >= mean, mean + deviation, mean - deviation).reshape(64, 8)
    signs, levels = np.zeros((1, 2, 8), np.uint32), np.zeros((1, 2, 2, 8), np.uint16)
    s = np.empty((1, 8, 64), np.float32)
    index = bound(SignIndex(1, 64, 8, 32, "mad"), signs=signs, levels=levels)
    index.encode(keys, 0, 2)
    cpu.scores(index, np.eye(8, dtype=np.float32)[None], 0, 64, s)
    np.testing.assert_allclose(s[0].T, expected, atol=2e-3)


@pytest.mark.parametrize(("shape", "page"), [*zip(SHAPES, [8, 16, 32] * 2, strict=True)])
def test_quest_pages(shape: tuple[int, int, int, int], page: int) -> None:
    g, r, n, d = shape
    keys = half(normal(1, g, 6 * page + 3, d))
    bounds = np.full((g, 6, 2 * d), 0x7E00, np.uint16)
    index = bound(PageIndex(g, 6 * page, d, page), bounds=bounds)
    index.encode(keys, 2, 5)
    x = keys.view(np.float16)[:, 2 * page : 5 * page].reshape(g, 3, page, d)
    np.testing.assert_array_equal(bounds[:, 2:5, :d].view(np.float16), x.max(2))
    assert (bounds[:, [0, 1, 5]] == 0x7E00).all()
    q = normal(3, g, r * n, d)
    for module in (cpu, reference):
        s = np.full((g, r * n + 1, 9), np.nan, np.float32)[:, : r * n, 1:-1]
        module.scores(index, q, 2, 5, s[:, :, 2:5])
        larger = np.maximum(q[:, :, None] * x.max(2)[:, None], q[:, :, None] * x.min(2)[:, None])
        assert_close(s[:, :, 2:5], larger.sum(3))
        assert np.isfinite(s).sum() == g * r * n * 3
