"""Products with chosen experts' codes: against what the codes stand for, over odd sizes and every format."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import pairs

from edgekv.kernels.cpu import launch, matmul
from edgekv.kernels.cpu.gemm import CodeLayout
from edgekv.kernels.cpu.matmul import GroupedGemm, QuantizedWeights
from edgekv.weights.quantize import dequantize, n_blocks

FORMATS = [(4, 32, False), (4, 128, False), (8, 32, False), (8, 128, False), (4, 32, True)]
SHIFTED = [(*form, shift) for form in FORMATS[:2] for shift in ("zeros", "offsets")]
EXPERTS, ROWS = 5, 37


def rounded(x: np.ndarray, block: int) -> np.ndarray:
    """x in 8 bits by blocks, as the products have it."""
    rows, columns = x.shape
    padded = np.pad(x, ((0, 0), (0, -columns % block))).reshape(rows, -1, block)
    step = np.abs(padded).max(axis=2, keepdims=True) / np.float32(127)
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
    return (np.rint(padded * inverse) * step).reshape(rows, -1)[:, :columns]


@pytest.mark.parametrize(
    ("form", "columns", "of"),
    pairs(
        form=[*((*form, None) for form in FORMATS), *SHIFTED],
        columns=[32, 200, 704, 1344],
        of=[(3,), (0, 1, 4), (2, 2, 2, 2, 4), (1,) * 3 + (3,) * 13],
    ),
)
def test_products_are_those_of_the_codes(
    form: tuple[int, int, bool, str | None], columns: int, of: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (bits, block, e2m1, shift), rng = form, np.random.default_rng(columns)
    blocks = n_blocks(columns, block)
    codes = rng.integers(0, 256, (EXPERTS * ROWS, blocks, block * bits // 8), np.uint8)
    scales = rng.uniform(0.5, 1.5, (EXPERTS * ROWS, blocks)).astype(np.float32)
    idle = sorted(set(range(EXPERTS)) - set(of))
    offsets = rng.uniform(-8, 8, scales.shape).astype(np.float32)
    for floats in (scales, offsets):
        floats.reshape(EXPERTS, ROWS, blocks)[idle] = np.nan  # would show wherever one was read
    zeros = rng.integers(0, 256, (EXPERTS * ROWS, -(-blocks // 2)), np.uint8)
    shifts = {shift: {"zeros": zeros, "offsets": offsets}[shift]} if shift else {}
    x = rng.standard_normal((len(of), columns)).astype(np.float32)
    x[0, :block] = 0
    weights = QuantizedWeights(codes, scales, CodeLayout(bits, block, e2m1), **shifts)
    out = GroupedGemm(weights, EXPERTS)(x, np.array(of), 1)
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", 0)
    monkeypatch.setattr(matmul, "MIN_PARALLEL_ELEMENTS", 0)
    for n_threads in (2, 3):
        again = GroupedGemm(weights, EXPERTS)(x, np.array(of), n_threads)
        assert np.array_equal(again, out)
    matrices = dequantize(codes, scales, bits, block, columns, e2m1=e2m1, **shifts).reshape(EXPERTS, ROWS, columns)
    expected = np.stack(
        [matrices[e].astype(np.float64) @ row for e, row in zip(of, rounded(x, block), strict=True)]
    )
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
