"""Softmax over column ranges: NumPy against the formula, Numba against NumPy and against exp."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from kernel_cases import EITHER_WAY, assert_close, pairs

from edgekv.kernels import cpu, kernel_cache, reference
from edgekv.kernels.cpu.launch import RangeKernel
from edgekv.kernels.cpu.softmax import softmax
from edgekv.types import I64

BACKENDS = pytest.mark.parametrize("backend", [cpu, reference], ids=["numba", "numpy"])
COLUMNS = (1, 2, 15, 16, 17, 63, 64, 65, 200, 513)


def ranges(m: int, columns: int) -> tuple[I64, I64]:
    """A range per row: all columns, causal ones, an inner one, an empty one."""
    lo, hi = np.zeros(m, np.int64), np.arange(columns - m + 1, columns + 1).clip(0)
    lo[1::3] = columns // 3
    hi[2::4] = lo[2::4]
    return lo, hi


@BACKENDS
def test_is_the_softmax_inside_the_range_and_zero_outside(backend: object) -> None:
    s = np.random.default_rng(0).standard_normal((2, 5, 40), np.float32) * 5
    lo, hi = np.array([0, 3, 39, 12, 7]), np.array([40, 39, 40, 12, 20])
    expected = np.zeros(s.shape)
    for g, m in np.ndindex(2, 5):
        weights = np.exp(s[g, m, lo[m] : hi[m]].astype(np.float64))
        expected[g, m, lo[m] : hi[m]] = weights / weights.sum()
    s[:, 1, :3] = s[:, 3] = np.nan  # not in the range: must not be read
    backend.softmax(s, lo, hi)
    np.testing.assert_allclose(s, expected, rtol=2e-6, atol=1e-38)
    rows = np.full((1, 4, 70), -np.inf, np.float32)
    rows[0, 0, 5] = 3  # one finite score
    rows[0, 1, :3] = 1e30, 1e30, -1e30  # huge scores
    rows[0, 2] = 0
    rows[0, 2, ::2] = -1000  # exp underflows
    backend.softmax(rows, np.zeros(4, np.int64), np.full(4, 70))
    expected = np.zeros((4, 70))
    expected[0, 5], expected[1, :2], expected[2, 1::2] = 1, 0.5, 1 / 35
    assert_close(rows[0], expected)
    assert rows[0, 2, 0] == 0  # not merely small
    assert not rows[0, 3].any()


@pytest.mark.parametrize(
    ("columns", "contiguous", "way"), pairs(n=COLUMNS, contiguous=[True, False], way=EITHER_WAY), indirect=["way"]
)
def test_numba_equals_numpy(columns: int, contiguous: bool, way: str) -> None:
    whole = np.random.default_rng(columns).standard_normal((3, 9, columns + 5), np.float32) * 8
    expected_whole = whole.copy()
    part = np.s_[:] if contiguous else np.s_[:, 1:8, 2 : columns + 2]
    s, expected = whole[part], expected_whole[part]
    lo, hi = ranges(s.shape[1], s.shape[2])
    cpu.softmax(s, lo, hi)
    reference.softmax(expected, lo, hi)
    np.testing.assert_allclose(whole, expected_whole, rtol=4e-6, atol=1e-38)


def test_numba_exponential_is_accurate() -> None:
    """Beside one score of 0, each probability is exp(x) over the sum: all of float32's range."""
    x = np.linspace(-86.9, 0, 100_001, dtype=np.float32)
    s = x.reshape(1, 1, -1).copy()
    cpu.softmax(s, np.zeros(1, np.int64), np.array([x.size]))
    exact = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(s[0, 0], exact / exact.sum(), rtol=1e-6, atol=1e-37)


def test_compiled_and_loaded_code_has_the_same_bits(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "kernel_file", lambda function, options: tmp_path / "softmax")
    s, results = np.random.default_rng(0).standard_normal((1, 40, 777), np.float32) * 3, []
    for _ in ("compiled", "loaded"):
        kernel = RangeKernel(softmax.__globals__["_softmax_rows"].function)
        monkeypatch.setitem(softmax.__globals__, "_softmax_rows", kernel)
        results.append(s.copy())
        softmax(results[-1], *ranges(40, 777))
    assert (tmp_path / "softmax").exists()
    np.testing.assert_array_equal(*results)
