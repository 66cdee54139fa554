"""Blocks of GGUF files: their weights are the gguf library's, and products those of the weights."""

import gguf
import numpy as np
import pytest
from gguf_writer import HALVES, TYPES, set_halves
from test_products import rounded

from edgekv.checkpoint.gguf import KEPT
from edgekv.kernels.cpu.blocks import BLOCK_WEIGHTS, BLOCKS
from edgekv.kernels.cpu.gemm import BYTE_CODES, PANEL
from edgekv.kernels.cpu.matmul import QuantizedMatmul, QuantizedWeights
from edgekv.types import F32, U8

TOLERANCE = 1e-5  # of the sum of absolute products: offsets nearly cancel codes


def drawn(kind: str, rows: int, columns: int) -> U8:
    """Draws rows of blocks, any bytes, with half floats below 1."""
    rng, shape = np.random.default_rng(rows), (rows, columns // BLOCK_WEIGHTS, BLOCKS[kind].n_bytes)
    raw = rng.integers(0, 256, shape, np.uint8)
    return set_halves(raw, kind, rng.uniform(-1, 1, (*shape[:2], 1))).reshape(rows, -1)


@pytest.mark.parametrize("kind", KEPT)
def test_weights_are_the_librarys(kind: str) -> None:
    """To the bit, for any bytes; infinite scales give numbers of the same kind."""
    assert tuple(BLOCKS) == KEPT
    rng, size = np.random.default_rng(0), BLOCKS[kind].n_bytes
    raw = rng.integers(0, 256, (500, 3 * size), np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected, got = gguf.quants.dequantize(raw, TYPES[kind]), BLOCKS[kind].weights(raw)
    finite = np.isfinite(expected)
    assert 0.9 < finite.mean() < 1
    np.testing.assert_array_equal(got.view(np.uint32)[finite], expected.view(np.uint32)[finite])
    np.testing.assert_array_equal(np.isfinite(got), finite)


def product(kind: str, raw: U8, n_experts: int = 1) -> QuantizedMatmul:
    weights = QuantizedWeights(raw, None, BYTE_CODES, block_type=BLOCKS[kind])
    return QuantizedMatmul(weights, n_experts)


def require_near(got: F32, x: F32, weights: F32) -> None:
    """Requires the products of activations as they are rounded, by 16."""
    activations, meant = rounded(x, BYTE_CODES).astype(np.float64), weights.T.astype(np.float64)
    assert (np.abs(got - activations @ meant) <= TOLERANCE * (np.abs(activations) @ np.abs(meant))).all()


@pytest.mark.parametrize("kind", KEPT)
def test_products(kind: str) -> None:
    """Of odd numbers of outputs, whose last ones are a tile with others; alike on any threads, beside any rows."""
    for rows, columns in (
        (4, BLOCK_WEIGHTS),
        (37, 2 * BLOCK_WEIGHTS),
        (PANEL + 1, 3 * BLOCK_WEIGHTS),
        (4 * PANEL - 1, 5 * BLOCK_WEIGHTS),
    ):
        raw = drawn(kind, rows, columns)
        weights, multiply = BLOCKS[kind].weights(raw), product(kind, raw)
        x = np.random.default_rng(1).standard_normal((40, columns), np.float32)
        for n in (1, 8, 9, 40):
            y = multiply(x[:n], 1)
            require_near(y, x[:n], weights)
            np.testing.assert_array_equal(multiply(x[:n], 3), y)
        np.testing.assert_array_equal(multiply(x[2:3], 1), multiply(x[:8], 1)[2:3])


@pytest.mark.parametrize("kind", KEPT)
def test_products_with_chosen_experts(kind: str) -> None:
    raw, experts = drawn(kind, 5 * 37, 2 * BLOCK_WEIGHTS), np.array([0] + [2] * 12 + [4])
    x = np.random.default_rng(2).standard_normal((len(experts), 2 * BLOCK_WEIGHTS), np.float32)
    y, matrices = product(kind, raw, 5)(x, 2, experts), BLOCKS[kind].weights(raw).reshape(5, 37, -1)
    for i, expert in enumerate(experts):
        require_near(y[i : i + 1], x[i : i + 1], matrices[expert])
    for half in HALVES[kind]:
        raw.reshape(5, 37 * 2, -1)[[1, 3], :, half % BLOCKS[kind].n_bytes + np.arange(2)[:, None]] = 255  # NaN
    np.testing.assert_array_equal(product(kind, raw, 5)(x, 1, experts), y)
