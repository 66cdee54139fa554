"""Products with float32 weights: NumPy's in float64 within rounding, and each row as it is alone."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.matmul import MOST_ROWS, float_matmul, multiply_rows
from edgekv.types import Threads
from edgekv.weights.ops import LowRank, add_changes

SHAPES = [(1, 1), (3, 15), (4, 16), (130, 300), (515, 299), (1030, 64), (7, 70_000)]  # outputs, columns


def drawn(outputs: int, columns: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([outputs, columns, n])
    return rng.standard_normal((n, columns), np.float32), rng.standard_normal((outputs, columns), np.float32)


def error(y: np.ndarray, x: np.ndarray, weights: np.ndarray) -> float:
    """The largest, in relation to what the magnitudes add up to."""
    exact, most = (a.astype(float) @ b.astype(float).T for a, b in ((x, weights), (abs(x), abs(weights))))
    return float((np.abs(y - exact) / np.maximum(most, 1e-30)).max())


@pytest.mark.parametrize("n", [1, 3, 8, MOST_ROWS, MOST_ROWS + 1, 200])
@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_products(outputs: int, columns: int, n: int) -> None:
    x, weights = drawn(outputs, columns, n)
    y = float_matmul(x, weights, Threads(1, 2))
    assert error(y, x, weights) < 6e-7  # measured: 1e-7, of 64 columns and fewer 3e-7
    assert np.array_equal(float_matmul(x, weights, Threads(2, 3)), y)
    assert np.array_equal(float_matmul(x[::-1], weights, Threads(2, 2)), y[::-1]) or n > MOST_ROWS


@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_a_row_does_not_depend_on_the_others_nor_on_the_threads(
    outputs: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weights = drawn(outputs, columns, 21)
    whole = multiply_rows(x, weights, 1)
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", 0)
    for n_threads in (1, 2, 3):
        for a, b in ((0, 1), (1, 3), (2, 7), (5, 21)):
            assert np.array_equal(multiply_rows(x[a:b], weights, n_threads), whole[a:b])


def test_a_lora_of_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(0)
    parts = tuple(
        LowRank(rng.standard_normal((r, 300), np.float32), rng.standard_normal((m, r), np.float32))
        for r, m in ((5, 70), (0, 33), (16, 130))
    )
    x = rng.standard_normal((8, 300), np.float32)
    multiply = functools.partial(float_matmul, n_threads=Threads(1, 1))
    whole = np.zeros((8, 233), np.float32)
    add_changes(x, whole, parts, multiply)
    dense = np.concatenate([up @ down for down, up in parts])
    assert error(whole, x, dense) < 1e-5
    for m in range(8):
        alone = np.zeros((1, 233), np.float32)
        add_changes(x[m : m + 1], alone, parts, multiply)
        assert np.array_equal(alone[0], whole[m])


def test_what_is_no_number_stays_in_its_row() -> None:
    x, weights = drawn(40, 50, 3)
    x[1, 7] = np.nan
    y = multiply_rows(x, weights)
    assert np.isnan(y).tolist() == [[False] * 40, [True] * 40, [False] * 40]
