"""Products of activations with weights, against NumPy: packed ones, chosen experts' ones, and float32."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from kernel_cases import PARALLEL, pairs

from edgekv.checkpoint.tensors import BFLOAT16
from edgekv.kernels.cpu import layers, matmul
from edgekv.kernels.cpu.gemm import OUTPUTS, PANEL, PANEL_K, PRODUCTS, CodeLayout, integer_layout
from edgekv.kernels.cpu.matmul import MAX_ROWS, QuantizedMatmul, QuantizedWeights, float_matmul, multiply_rows
from edgekv.kernels.interface import GEMV_ROWS
from edgekv.kernels.reference import hadamard
from edgekv.kernels.weight_codes import FLIPS
from edgekv.types import F32, U8, Array, Threads
from edgekv.weights import gaussian
from edgekv.weights.formats import WeightFormat
from edgekv.weights.ops import ACTIVATIONS, LowRank, add_lora, clamped_gate

TOLERANCE = 2e-6  # of the sum of absolute products; the largest of these cases is 8e-7


def rounded(x: F32, layout: CodeLayout) -> F32:
    """Returns x (n, columns) as bytes with a scale for each block, and back again."""
    (n, columns), block = x.shape, layout.block
    if layout.rotated:
        blocks = np.pad(x, ((0, 0), (0, -columns % block))).reshape(1, -1, block)
        rotated = np.empty_like(blocks)
        hadamard(blocks, FLIPS, rotated)  # with its order of sums: other sums round other halves
        codes = rounded(rotated.reshape(n, -1), layout._replace(rotated=False))
        return (codes.reshape(n, -1, block) @ gaussian.rotation().T).reshape(n, -1)
    blocks = np.pad(x, ((0, 0), (0, -columns % block))).reshape(n, -1, block)
    peak = np.abs(blocks).max(axis=2, keepdims=True)
    factor = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    codes = np.rint(blocks * factor)
    return (codes * (peak / np.float32(127))).reshape(n, -1)[:, :columns].astype(np.float32)


def drawn(rng: np.random.Generator, layout: CodeLayout, rows: int, columns: int) -> tuple[U8, Array]:
    """Draws codes and scales of weights (rows, columns)."""
    codes = rng.integers(0, 256, (rows, -(-columns // layout.block), layout.block_bytes), np.uint8)
    scales = rng.uniform(0.5, 1.5, codes.shape[:2]).astype(np.float32)
    return codes, scales.astype(BFLOAT16).view(np.uint16) if layout.rotated else scales


def weights_of(
    rng: np.random.Generator, layout: CodeLayout, rows: int, columns: int, kind: str | None
) -> QuantizedWeights:
    """Draws weights (rows, columns), with zero points, or with offsets that centre them about 0."""
    codes, scales = drawn(rng, layout, rows, columns)
    zeros = rng.integers(0, 16, scales.shape, np.uint8) if kind == "zeros" else None
    middle = -rng.uniform(0.25, 0.75, scales.shape).astype(np.float32) * (1 << layout.bits)
    offsets = middle * scales if kind == "offsets" else None
    return QuantizedWeights(codes, scales, layout, offsets, zeros)


def meaning(weights: QuantizedWeights, columns: int) -> npt.NDArray[np.floating]:
    """Returns the weights (rows, columns) that codes stand for; of rotated ones with what the padding became."""
    codes, scales, layout, offsets, zeros, _ = weights
    if layout.rotated:
        return gaussian.dequantize(codes, scales.view(BFLOAT16), layout.bits, layout.block * scales.shape[1])
    shift = {part: array for part, array in (("offsets", offsets), ("zeros", zeros)) if array is not None}
    form = WeightFormat("", layout.bits, layout.block, zeros is not None, e2m1=bool(layout.levels))
    return form.dequantize({"codes": codes, "scales": scales, **shift}, columns).astype(np.float64)


SIZES = [(1, OUTPUTS, 32), (1, 7, 288), (3, 13, 100), (GEMV_ROWS, 41, 515)]
SIZES += [(GEMV_ROWS + 1, PANEL - 1, 96), (GEMV_ROWS + 1, PANEL, 128)]  # too few outputs for a panel, and enough
SIZES += [(13, PANEL + 5, PANEL_K), (17, 3 * PANEL + 1, PANEL_K + 160), (70, 2 * PANEL, 2 * PANEL_K + 33)]
SHIFTED = [(layout, "offsets") for layout in PRODUCTS if layout.has_corrections]
SHIFTED += [(layout, "zeros") for layout, _ in SHIFTED if layout.bits == 4]
KINDS = [*((layout, None) for layout in PRODUCTS), *SHIFTED]


@pytest.mark.parametrize(("kind", "size"), pairs(kind=KINDS, size=SIZES))
def test_products(kind: tuple[CodeLayout, str | None], size: tuple[int, int, int]) -> None:
    n, rows, columns = size
    rng = np.random.default_rng(n * rows)
    x = rng.standard_normal((n, columns)).astype(np.float32) + (kind[1] is not None)
    x[0, : min(columns, 40)] = 0
    weights = weights_of(rng, kind[0], rows, columns, kind[1])
    meant = meaning(weights, columns)
    activations = rounded(x, weights.layout).astype(np.float64)
    most = np.abs(activations) @ np.abs(meant).T
    got = QuantizedMatmul(weights)(x)
    assert got.shape == (len(x), len(meant))
    assert (np.abs(got - activations @ meant.T) <= TOLERANCE * most).all()


@pytest.mark.parametrize(
    ("kind", "n", "value"), pairs(kind=KINDS, n=[3, GEMV_ROWS + 1], value=[np.nan, -np.nan, np.inf, -np.inf])
)
def test_what_is_no_number_makes_its_row_nan(kind: tuple[CodeLayout, str | None], n: int, value: float) -> None:
    rng, columns = np.random.default_rng(6), 300
    x = rng.standard_normal((n, columns)).astype(np.float32)
    weights = weights_of(rng, kind[0], PANEL + 1, columns, kind[1])
    weights.scales[5] = 0
    product, others = QuantizedMatmul(weights), np.arange(n) != 1
    for column in (0, 130, columns - 1):
        bad = x.copy()
        bad[1, column] = value
        got = product(bad)
        assert np.isnan(got[1]).all()
        assert np.array_equal(got[others], product(x)[others])


def test_what_does_not_fit_the_weights_is_refused() -> None:
    """Kernels read by address: they would take other bytes for numbers, or leave outputs as they were."""
    rng, layout = np.random.default_rng(8), integer_layout(4, 32)
    with pytest.raises(ValueError, match=f"3 rows; accepted: {OUTPUTS} or more"):
        QuantizedMatmul(QuantizedWeights(*drawn(rng, layout, OUTPUTS - 1, 64), layout))
    with pytest.raises(ValueError, match="accepted: whole numbers of 4 bits"):
        QuantizedMatmul(weights_of(rng, integer_layout(8, 32), OUTPUTS, 64, "offsets"))
    product = QuantizedMatmul(QuantizedWeights(*drawn(rng, layout, OUTPUTS, 64), layout))
    for x in (np.zeros((1, 64)), *(np.zeros((1, columns), np.float32) for columns in (32, 65))):
        with pytest.raises(ValueError, match="accepted: float32, 33 to 64 columns"):
            product(x)
    assert [product(np.zeros((1, columns), np.float32)).shape for columns in (33, 64)] == [(1, OUTPUTS)] * 2


@PARALLEL
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_depends_on_no_other_and_no_threads(kind: tuple[CodeLayout, str | None], way: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 2 * PANEL_K + 40)).astype(np.float32)
    product = QuantizedMatmul(weights_of(rng, kind[0], 3 * PANEL + 2, x.shape[1], kind[1]))
    for few, parts in ((x[:GEMV_ROWS], ((0, 1), (1, 4), (2, GEMV_ROWS))), (x, ((3, 20), (30, 64)))):
        whole = product(few, 1)
        for n_threads in (2, 3, 2, 3):
            assert np.array_equal(product(few, n_threads), whole)
        for a, b in parts:
            assert np.array_equal(product(few[a:b], 1), whole[a:b])


@pytest.mark.parametrize("n", [1, 5, 50])
def test_norms_and_activations(n: int, use_threads: Callable[[int], None]) -> None:
    rng = np.random.default_rng(n)
    x, weight, bias = rng.standard_normal((n, 514)).astype(np.float32) * 3, *rng.random((2, 514), np.float32)
    exact = x.astype(np.float64)
    deviation = np.sqrt(exact.var(axis=1, keepdims=True) + 1e-5)
    special = x.copy()
    special[0, :6] = -200, 200, -1e-30, 0, 1e20, -1e20
    gate, up = np.split(special, 2, axis=1)
    bad = special.copy()
    bad[0, [4, 257 + 5]] = np.nan
    cases = [  # what is called, and what it means
        (
            lambda: layers.rms_norm(x, weight, 1e-5),
            exact / np.sqrt(np.mean(np.square(exact), axis=1, keepdims=True) + 1e-5) * weight,
        ),
        (
            lambda: layers.layer_norm(x, weight, bias, 1e-5),
            (exact - exact.mean(axis=1, keepdims=True)) / deviation * weight + bias,
        ),
        (lambda: layers.activation(x, "gelu"), ACTIVATIONS["gelu"](x)),
        (lambda: layers.clamped_gate(bad, 1.702, 2.5), clamped_gate(*np.split(bad, 2, axis=1), 1.702, 2.5)),
    ]
    with np.errstate(over="ignore", invalid="ignore"):  # NumPy cubes 1e20
        for kind in layers.SIGMOIDS:
            meant = np.where(np.abs(gate) < 1e10, ACTIVATIONS[kind](gate), np.maximum(gate, 0))
            cases.append((functools.partial(layers.apply_gate, special, kind), meant * up))
            cases.append((functools.partial(layers.activation, gate, kind), meant))
    for call, meant in cases:
        use_threads(1)
        whole = call()
        assert np.allclose(whole, meant, rtol=1e-5, atol=2e-6, equal_nan=True)
        for n_threads in (2, 3):
            use_threads(n_threads)
            assert np.array_equal(call(), whole, equal_nan=True)


EXPERTS, ROWS = 5, 37


@PARALLEL
@pytest.mark.parametrize(
    ("kind", "columns", "of"),
    pairs(kind=KINDS, columns=[32, 200, 704, 1344], of=[(3,), (0, 1, 4), (2, 2, 2, 2, 4), (1,) * 3 + (3,) * 13]),
)
def test_products_with_chosen_experts_are_those_of_the_codes(
    kind: tuple[CodeLayout, str | None],
    columns: int,
    of: tuple[int, ...],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout, rng = kind[0], np.random.default_rng(columns)
    weights = weights_of(rng, layout, EXPERTS * ROWS, columns, kind[1])
    idle = sorted(set(range(EXPERTS)) - set(of))
    for floats in (weights.scales.view(BFLOAT16) if layout.rotated else weights.scales, weights.offsets):
        if floats is not None:
            floats.reshape(EXPERTS, ROWS, -1)[idle] = np.nan  # would show wherever one was read
    x = rng.standard_normal((len(of), columns)).astype(np.float32)
    x[0, : layout.block] = 0
    out = QuantizedMatmul(weights, EXPERTS)(x, 1, np.array(of))
    monkeypatch.setattr(matmul, "MIN_PARALLEL_ELEMENTS", 0)
    for n_threads in (2, 3):
        again = QuantizedMatmul(weights, EXPERTS)(x, n_threads, np.array(of))
        assert np.array_equal(again, out)
    matrices = meaning(weights, columns).reshape(EXPERTS, ROWS, -1)
    expected = np.stack([matrices[e] @ row for e, row in zip(of, rounded(x, layout), strict=True)])
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


SHAPES = [(1, 1), (3, 15), (4, 16), (130, 300), (515, 299), (1030, 64), (7, 70_000)]  # outputs, columns


def float_drawn(outputs: int, columns: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([outputs, columns, n])
    return rng.standard_normal((n, columns), np.float32), rng.standard_normal((outputs, columns), np.float32)


def error(y: np.ndarray, x: np.ndarray, weights: np.ndarray) -> float:
    """Returns the largest error, in relation to what the magnitudes add up to."""
    exact, most = (a.astype(float) @ b.astype(float).T for a, b in ((x, weights), (abs(x), abs(weights))))
    return float((np.abs(y - exact) / np.maximum(most, 1e-30)).max())


@pytest.mark.parametrize(
    ("outputs", "columns", "n"),
    [(*shape, n) for shape, n in pairs(shape=SHAPES, n=[1, 3, 8, MAX_ROWS, MAX_ROWS + 1, 200])],
)
def test_float_products(outputs: int, columns: int, n: int) -> None:
    x, weights = float_drawn(outputs, columns, n)
    y = float_matmul(x, weights, Threads(1, 2))
    assert error(y, x, weights) < 6e-7  # measured: 1e-7, of 64 columns and fewer 3e-7
    assert np.array_equal(float_matmul(x, weights, Threads(2, 3)), y)
    assert np.array_equal(float_matmul(x[::-1], weights, Threads(2, 2)), y[::-1]) or n > MAX_ROWS


@PARALLEL
@pytest.mark.parametrize(("outputs", "columns"), SHAPES[2:5])
def test_a_float_row_depends_on_no_other_and_no_threads(outputs: int, columns: int, way: str) -> None:
    x, weights = float_drawn(outputs, columns, 21)
    x[20, 7] = np.nan
    whole = multiply_rows(x, weights, 1)
    assert np.isnan(whole).any(axis=1).tolist() == [False] * 20 + [True]
    for n_threads in (1, 2, 3):
        for a, b in ((0, 1), (1, 3), (2, 7), (5, 21)):
            assert np.array_equal(multiply_rows(x[a:b], weights, n_threads), whole[a:b], equal_nan=True)


def test_a_lora_of_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(0)
    parts = tuple(
        LowRank(rng.standard_normal((r, 300), np.float32), rng.standard_normal((m, r), np.float32))
        for r, m in ((5, 70), (0, 33), (16, 130))
    )
    x = rng.standard_normal((8, 300), np.float32)
    multiply = functools.partial(float_matmul, n_threads=Threads(1, 1))
    whole = np.zeros((8, 233), np.float32)
    add_lora(x, whole, parts, multiply)
    dense = np.concatenate([up @ down for down, up in parts])
    assert error(whole, x, dense) < 1e-5
    for m in range(8):
        alone = np.zeros((1, 233), np.float32)
        add_lora(x[m : m + 1], alone, parts, multiply)
        assert np.array_equal(alone[0], whole[m])
