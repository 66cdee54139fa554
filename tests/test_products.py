"""Products of activations with packed weights, against NumPy: formats, odd sizes, few rows and panels, threads."""

import numpy as np
import numpy.typing as npt
import pytest

from edgekv.checkpoint.shipped import load_shape
from edgekv.kernels import threads
from edgekv.kernels.cpu import launch, layers
from edgekv.kernels.cpu.gemm import OUTPUTS, PANEL, PRODUCTS, STRETCH, CodeLayout, Product
from edgekv.kernels.cpu.loops import address_of
from edgekv.kernels.cpu.matmul import FEW_ROWS, QuantizedMatmul, QuantizedWeights, stages
from edgekv.models import architecture
from edgekv.types import F32, U8, Threads
from edgekv.weights.cpu import CpuOps
from edgekv.weights.formats import per_linear_format
from edgekv.weights.ops import ACTIVATIONS, NumpyOps, clamped_gate
from edgekv.weights.quantize import dequantize, n_blocks, quantize_numpy
from edgekv.weights.random import random_store

TOLERANCE = 2e-6  # of the sum of absolute products; the largest of these cases is 8e-7


def multiply(x: F32, codes: U8, scales: F32, layout: CodeLayout, n_threads: int | None = None) -> F32:
    return QuantizedMatmul(QuantizedWeights(codes, scales, layout))(x, n_threads)


def rounded(x: F32, block: int) -> F32:
    """x (n, columns) as bytes with a scale for each block, and back again."""
    n, columns = x.shape
    blocks = np.pad(x, ((0, 0), (0, -columns % block))).reshape(n, -1, block)
    peak = np.abs(blocks).max(axis=2, keepdims=True)
    factor = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    codes = np.rint(blocks * factor)
    return (codes * (peak / np.float32(127))).reshape(n, -1)[:, :columns].astype(np.float32)


def drawn(rng: np.random.Generator, layout: CodeLayout, rows: int, columns: int) -> tuple[U8, F32]:
    """Codes and scales of weights (rows, columns)."""
    codes = rng.integers(0, 256, (rows, n_blocks(columns, layout.block), layout.block_bytes), np.uint8)
    return codes, rng.uniform(0.5, 1.5, codes.shape[:2]).astype(np.float32)


def shifted(rng: np.random.Generator, layout: CodeLayout, rows: int, columns: int, kind: str) -> QuantizedWeights:
    """Weights with zero points or offsets of the size of the others."""
    codes, scales = drawn(rng, layout, rows, columns)
    if kind == "zeros":
        return QuantizedWeights(
            codes, scales, layout, zeros=rng.integers(0, 256, (rows, -(-scales.shape[1] // 2)), np.uint8)
        )
    return QuantizedWeights(codes, scales, layout, offsets=rng.uniform(-8, 8, scales.shape).astype(np.float32))


def meaning(weights: QuantizedWeights, columns: int) -> npt.NDArray[np.float64]:
    """What they stand for, (rows, columns)."""
    codes, scales, layout, offsets, zeros = weights
    shift = {"offsets": offsets, "zeros": zeros}
    return dequantize(codes, scales, layout.bits, layout.block, columns, e2m1=layout.e2m1, **shift).astype(
        np.float64
    )


SIZES = pytest.mark.parametrize(
    ("n", "rows", "columns"),
    [
        (1, OUTPUTS, 32),
        (1, 7, 288),
        (3, 13, 100),
        (FEW_ROWS, 41, 515),
        (FEW_ROWS + 1, PANEL - 1, 96),  # too few outputs for a panel
        (FEW_ROWS + 1, PANEL, 128),
        (13, PANEL + 5, STRETCH),
        (17, 3 * PANEL + 1, STRETCH + 160),
        (70, 2 * PANEL, 2 * STRETCH + 33),
    ],
)
SHIFTED = [layout for layout in PRODUCTS if layout.has_corrections]
KINDS = ["zeros", "offsets"]


@pytest.mark.parametrize("layout", PRODUCTS, ids=str)
@SIZES
def test_products(layout: CodeLayout, n: int, rows: int, columns: int) -> None:
    rng = np.random.default_rng(n * rows)
    codes, scales = drawn(rng, layout, rows, columns)
    x = rng.standard_normal((n, columns)).astype(np.float32)
    x[0, : min(columns, 40)] = 0
    check(x, QuantizedWeights(codes, scales, layout))


def check(x: F32, weights: QuantizedWeights) -> None:
    meant = meaning(weights, x.shape[1])
    activations = rounded(x, weights.layout.block).astype(np.float64)
    size = np.abs(activations) @ np.abs(meant).T
    got = QuantizedMatmul(weights)(x)
    assert got.shape == (len(x), len(meant))
    assert (np.abs(got - activations @ meant.T) <= TOLERANCE * size).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", SHIFTED, ids=str)
@SIZES
def test_zero_points_and_offsets(layout: CodeLayout, kind: str, n: int, rows: int, columns: int) -> None:
    rng = np.random.default_rng(n * rows + 1)
    x = rng.standard_normal((n, columns)).astype(np.float32) + 1
    x[0, : min(columns, 40)] = 0
    check(x, shifted(rng, layout, rows, columns, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", SHIFTED, ids=str)
def test_shifts_do_not_depend_on_other_rows_nor_on_the_threads(
    layout: CodeLayout, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", 0)
    rng = np.random.default_rng(4)
    x = rng.standard_normal((40, 2 * STRETCH + 40)).astype(np.float32)
    product = QuantizedMatmul(shifted(rng, layout, PANEL + 3, x.shape[1], kind))
    for few in (x[:FEW_ROWS], x):
        alone = product(few, 1)
        for _ in range(20):
            assert np.array_equal(product(few, 2), alone)
            assert np.array_equal(product(few, 3), alone)
        size = 1 if len(few) == FEW_ROWS else FEW_ROWS + 2
        assert np.array_equal(product(few[3 : 3 + size], 1), alone[3 : 3 + size])


def test_formats_without_shifts_refuse_them() -> None:
    codes, scales = drawn(np.random.default_rng(5), CodeLayout(8, 32), OUTPUTS, 64)
    with pytest.raises(ValueError, match="accepted: whole numbers of 4 bits"):
        QuantizedMatmul(QuantizedWeights(codes, scales, CodeLayout(8, 32), offsets=scales))


@pytest.mark.parametrize("layout", PRODUCTS, ids=str)
@pytest.mark.parametrize("n", [3, FEW_ROWS + 1])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_no_number_makes_its_row_nan(layout: CodeLayout, n: int, value: float) -> None:
    rng, columns = np.random.default_rng(6), 300
    x = rng.standard_normal((n, columns)).astype(np.float32)
    kinds = KINDS if layout.has_corrections else []
    every = [QuantizedWeights(*drawn(rng, layout, PANEL + 1, columns), layout)]
    every += [shifted(rng, layout, PANEL + 1, columns, kind) for kind in kinds]
    for weights in every:
        weights.scales[5] = 0
        for column in (0, 130, columns - 1):
            bad = x.copy()
            bad[1, column] = value
            got, others = QuantizedMatmul(weights)(bad), np.arange(n) != 1
            assert np.isnan(got[1]).all()
            assert np.array_equal(got[others], QuantizedMatmul(weights)(x)[others])


def test_what_does_not_fit_the_weights_is_refused() -> None:
    """Kernels read by address: they would take other bytes for numbers, or leave outputs as they were."""
    rng, layout = np.random.default_rng(8), CodeLayout(4, 32)
    with pytest.raises(ValueError, match=f"3 rows; accepted: {OUTPUTS} or more"):
        QuantizedMatmul(QuantizedWeights(*drawn(rng, layout, OUTPUTS - 1, 64), layout))
    product = QuantizedMatmul(QuantizedWeights(*drawn(rng, layout, OUTPUTS, 64), layout))
    for x in (np.zeros((1, 64)), *(np.zeros((1, columns), np.float32) for columns in (32, 65))):
        with pytest.raises(ValueError, match="accepted: float32, 33 to 64 columns"):
            product(x)
    assert [product(np.zeros((1, columns), np.float32)).shape for columns in (33, 64)] == [(1, OUTPUTS)] * 2


def test_activations_that_nobody_may_write_to() -> None:
    rng, layout = np.random.default_rng(7), CodeLayout(4, 32)
    product = QuantizedMatmul(QuantizedWeights(*drawn(rng, layout, OUTPUTS, 64), layout))
    x = rng.standard_normal((2, 64)).astype(np.float32)
    expected = product(x)
    x.flags.writeable = False
    assert np.array_equal(product(x), expected)
    assert np.array_equal(product(x[::-1]), expected[::-1])
    assert product(x[:0]).shape == (0, OUTPUTS)


@pytest.mark.parametrize("layout", PRODUCTS, ids=str)
def test_a_row_does_not_depend_on_the_others_nor_on_the_threads(
    layout: CodeLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", 0)
    rng = np.random.default_rng(1)
    rows, columns = 3 * PANEL + 2, 700
    codes, scales = drawn(rng, layout, rows, columns)
    x = rng.standard_normal((64, columns)).astype(np.float32)
    for few in (x[:FEW_ROWS], x):
        whole = multiply(few, codes, scales, layout, 1)
        for n_threads in (2, 3):
            assert np.array_equal(multiply(few, codes, scales, layout, n_threads), whole)
        for part in (few[:1], few[1:4], few[2:FEW_ROWS]) if len(few) <= FEW_ROWS else (few[3:20], few[30:]):
            first = int(np.flatnonzero((few == part[0]).all(axis=1))[0])
            alone = multiply(part, codes, scales, layout)
            assert np.array_equal(alone, whole[first : first + len(part)])


@pytest.mark.parametrize("n_threads", [2, 3])
def test_outputs_behind_the_last_whole_panel_on_several_threads(n_threads: int) -> None:
    """They are added up in stretches, with outputs of the panel before."""
    rng = np.random.default_rng(2)
    rows, columns = PANEL + 5, 4 * STRETCH
    weight, x = (rng.standard_normal((n, columns)).astype(np.float32) for n in (rows, 64))
    codes, scales = quantize_numpy(weight, 4, 32)
    alone = multiply(x, codes, scales, CodeLayout(4, 32), 1)
    for _ in range(50):
        assert np.array_equal(multiply(x, codes, scales, CodeLayout(4, 32), n_threads), alone)


def test_an_output_belongs_to_one_tile_of_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What two threads added to at once would be wrong."""
    rng, layout, rows, n = np.random.default_rng(3), CodeLayout(4, 32), 2 * PANEL + 5, FEW_ROWS + 1
    codes, scales = drawn(rng, layout, rows, 2 * STRETCH)
    tiles, written = stages(layout)[1], np.zeros((n, rows), np.int64)

    def one_by_one(stage: launch.Stage, n_items: int, numbers: np.ndarray, n_threads: int) -> None:
        if stage is not tiles:
            return stage.run(n_items, numbers)
        for i in range(n_items):
            y = np.full((n, rows), np.nan, np.float32)
            numbers[Product._fields.index("y")] = address_of(y)
            stage._loop.call(i, i + 1, 0, address_of(numbers))
            written[...] += ~np.isnan(y)
        return None

    monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", 0)
    monkeypatch.setattr(launch.Stage, "run_parallel", one_by_one)
    multiply(rng.standard_normal((n, 2 * STRETCH)).astype(np.float32), codes, scales, layout, 2)
    assert (written == 1).all()


@pytest.mark.parametrize("x", [0.0, 1e-38, 1e36, -1e36])
def test_extreme_activations(x: float) -> None:
    codes, scales = quantize_numpy(np.ones((OUTPUTS, 64), np.float32), 4, 32)
    row = np.zeros((1, 64), np.float32)
    row[0, 5] = x
    assert np.allclose(multiply(row, codes, scales, CodeLayout(4, 32)), x, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("n", [1, 5, 300])
def test_norms_and_activations(n: int) -> None:
    rng = np.random.default_rng(n)
    x, weight, bias = rng.standard_normal((n, 514)).astype(np.float32) * 3, *rng.random((2, 514), np.float32)
    exact = x.astype(np.float64)
    meant = exact / np.sqrt(np.mean(np.square(exact), axis=1, keepdims=True) + 1e-5) * weight
    assert np.allclose(layers.rms_norm(x, weight, 1e-5), meant, rtol=2e-6, atol=1e-7)
    meant = (exact - exact.mean(axis=1, keepdims=True)) / np.sqrt(exact.var(axis=1, keepdims=True) + 1e-5)
    assert np.allclose(layers.layer_norm(x, weight, bias, 1e-5), meant * weight + bias, rtol=2e-6, atol=2e-6)
    x[0, :6] = -200, 200, -1e-30, 0, 1e20, -1e20
    gate, up = np.split(x, 2, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):  # NumPy cubes 1e20
        for kind in layers.SIGMOIDS:
            meant = np.where(np.abs(gate) < 1e10, ACTIVATIONS[kind](gate), np.maximum(gate, 0))
            assert np.allclose(layers.gated(x, kind), meant * up, rtol=1e-5, atol=2e-6)
            assert np.allclose(layers.activation(gate, kind), meant, rtol=1e-5, atol=2e-6)
    assert np.allclose(layers.activation(x, "gelu"), ACTIVATIONS["gelu"](x), rtol=2e-6, atol=2e-6)
    gate[0, 4] = up[0, 5] = np.nan
    assert np.allclose(
        layers.clamped_gate(x, 1.702, 2.5),
        clamped_gate(gate, up, 1.702, 2.5),
        rtol=1e-5,
        atol=2e-6,
        equal_nan=True,
    )


@pytest.mark.parametrize("n", [1, 3, 50])
def test_norms_and_activations_do_not_depend_on_the_threads(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(n)
    x, weight = rng.standard_normal((n, 514)).astype(np.float32), rng.random(514, np.float32)
    calls = [
        lambda: layers.rms_norm(x, weight, 1e-5),
        lambda: layers.layer_norm(x, weight, weight, 1e-5),
        lambda: layers.gated(x, "gelu_tanh"),
        lambda: layers.activation(x, "silu"),
        lambda: layers.activation(x, "gelu"),
        lambda: layers.clamped_gate(x, 1.702, 2.5),
    ]
    alone = []
    for n_threads in (1, 2, 3):
        monkeypatch.setattr(threads, "count", lambda n_threads=n_threads: n_threads)
        monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", 0 if n_threads > 1 else 1 << 62)
        found = [call() for call in calls]
        alone = alone or found
        assert all(map(np.array_equal, found, alone))


def test_dense_layers_of_floating_point_codes() -> None:
    config = load_shape("tiny", 1)
    store = random_store(
        config, per_linear_format("mxfp4", dict.fromkeys(architecture(config).linears(), "fp4-32"))
    )
    ours, reference = CpuOps(store, Threads(1, 2)), NumpyOps(store)
    for n in (1, 2 * FEW_ROWS):
        x = np.random.default_rng(n).standard_normal((n, store.arch.config.hidden_size), np.float32)
        for block in (
            lambda ops, x=x: store.arch.attention_in(ops, 0, x),
            lambda ops, x=x: store.arch.head(ops, x),
        ):
            got, meant = block(ours), block(reference)
            assert np.linalg.norm(got - meant) < 0.02 * np.linalg.norm(meant)
