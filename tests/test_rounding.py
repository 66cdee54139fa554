"""Weights in 4 and 8 bits: the kernels against NumPy, rounding with a text, formats of the head."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import golden_cases
import numpy as np
import pytest
import safetensors.numpy
from helpers import raises
from kernel_cases import quantize_numpy

from edgekv import Session
from edgekv.checkpoint.hub import load_shape
from edgekv.cli import main
from edgekv.engine import calibration
from edgekv.engine.model import Model
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.types import F32, F64, U8
from edgekv.weights.formats import FORMATS, WeightFormat, n_blocks, quantize
from edgekv.weights.rounding import (
    DAMPING,
    SAMPLE,
    SHRINK,
    Rounder,
    column_order,
    cross_products,
    hessian,
    in_column_order,
    output_correction,
)
from edgekv.weights.store import WeightStore, random_store

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "models" / "demo"
PROSE = (DEMO / "prose.txt").read_text()


def drawn(rows: int, columns: int, seed: int = 0) -> F32:
    """Draws weights with a few large ones."""
    w = np.random.default_rng(seed).standard_t(5, (rows, columns)).astype(np.float32)
    w[rows // 2] = 0
    return w


@pytest.mark.parametrize(
    ("bits", "block", "columns"), [(4, 32, 200), (4, 128, 200), (4, 128, 256), (8, 32, 32), (8, 128, 200)]
)
def test_blocks_are_numpys(bits: int, block: int, columns: int) -> None:
    w, n = drawn(12, columns), n_blocks(columns, block)
    codes, scales = np.empty((12, n, block * bits // 8), np.uint8), np.empty((12, n), np.float32)
    quantize(w, bits, block, codes, scales)
    expected = quantize_numpy(w, bits, block)
    np.testing.assert_allclose(scales, expected[1], rtol=1e-4, atol=1e-7)
    ours, theirs = (decoded(*each, bits, block, columns) for each in ((codes, scales), expected))
    errors = [np.square(values - w).sum() for values in (ours, theirs)]
    np.testing.assert_allclose(errors[0], errors[1], rtol=1e-4)
    assert np.sqrt(errors[0] / np.square(w).sum()) < (0.16 if bits == 4 else 0.01)


def decoded(codes: U8, scales: F32, bits: int, block: int, columns: int) -> F32:
    return WeightFormat("", bits, block).decode({"codes": codes, "scales": scales}, columns)


def inputs(tokens: int, columns: int) -> F32:
    """Draws inputs of a layer whose channels depend on each other and have uneven sizes."""
    rng = np.random.default_rng(3)
    mixed = rng.standard_normal((tokens, 24)) @ rng.standard_normal((24, columns))
    mixed += 0.5 * rng.standard_normal((tokens, columns))
    return (mixed * np.exp(rng.standard_normal(columns))).astype(np.float32)


def independent(x: F32) -> np.ndarray[Any, Any]:
    """Computes `hessian` by the formula, in float64, with as many independent inputs as x has columns."""
    (n, columns), x = x.shape, x.astype(np.float64)
    own = np.diag(np.square(x).mean(0))
    return (x.T @ x + columns * own) / (n + columns) + (DAMPING * own.trace() / columns or 1.0) * np.eye(columns)


def test_a_hessian_is_the_formula() -> None:
    for tokens, columns in ((400, 96), (5000, 40), (5, 64)):
        x = inputs(tokens, columns)
        np.testing.assert_allclose(hessian(x), independent(x), rtol=1e-4, atol=1e-5 * np.square(x).mean(0).max())


def round_numpy(weight: F32, output_correction: F32, hessian: F32, block: int) -> tuple[U8, F32]:
    """Rounds as `Rounder.round` specifies, in float64: row after row, and of it column after column."""
    order, blocks, ends = column_order(hessian.diagonal(), block)
    h = hessian.astype(np.float64)[np.ix_(order, order)]
    factor = np.asarray(np.linalg.cholesky(h), np.float64)
    w, b = weight[:, order].astype(np.float64), output_correction[:, order].astype(np.float64)
    added = np.linalg.solve(factor, b.T).T
    codes, scales, errors = np.zeros(w.shape, np.int8), np.zeros((len(w), len(blocks))), np.zeros_like(w)
    last_first = [(i, slice(ends[i], ends[i + 1])) for i in reversed(range(len(blocks)))]
    for i, own in last_first:
        inner = factor[own, own]
        for r in range(len(w)):
            targets = w[r, own] + (errors[r] @ factor + added[r])[own] / inner.diagonal()
            steps = targets[np.abs(targets).argmax()] * SHRINK.astype(np.float64) / -8
            tried = [tried_block(w[r, own], targets, inner, step) for step in steps]
            best = int(np.argmin([loss for _, loss in tried]))
            codes[r, own], scales[r, i] = tried[best][0], steps[best]
            errors[r, own] = w[r, own] - codes[r, own] * steps[best]
    for i, own in last_first:
        for r in range(len(w)):
            q, slopes = codes[r, own].astype(np.float64), errors[r] @ h + b[r]
            if not q.any():
                continue
            scales[r, i] += slopes[own] @ q / (q @ h[own, own] @ q)
            errors[r, own] = w[r, own] - q * scales[r, i]
            for j in range(own.start, own.stop):
                best_value = w[r, j] - errors[r, j] + (errors[r] @ h[:, j] + b[r, j]) / h[j, j]
                codes[r, j] = level(best_value, scales[r, i])
                errors[r, j] = w[r, j] - codes[r, j] * scales[r, i]
    return in_column_order(codes, scales.astype(np.float32), order, blocks, block)


def tried_block(w: F64, targets: F64, factor: F64, step: float) -> tuple[F64, float]:
    """A block's codes with a scale, and what it adds."""
    codes, errors, added = np.zeros_like(w), np.zeros_like(w), 0.0
    for j in reversed(range(len(w))):
        target = targets[j] + errors @ factor[:, j] / factor[j, j]
        codes[j] = level(target, step)
        errors[j] = w[j] - step * codes[j]
        added += (factor[j, j] * (target - step * codes[j])) ** 2
    return codes, added


def level(value: float, step: float) -> float:
    return min(max(np.rint(value / step), -8.0), 7.0) if step else 0.0


@pytest.mark.parametrize(("columns", "block"), [(96, 32), (300, 128)])
def test_rounding_is_the_formula(columns: int, block: int) -> None:
    w, x = drawn(6, columns), inputs(400, columns)
    h = hessian(x)
    change = np.float32(0.1) * np.roll(w, 1, axis=1)
    target = w + change
    n = n_blocks(columns, block)
    plain = np.empty((6, n, block // 2), np.uint8), np.empty((6, n), np.float32)
    quantize(target, 4, block, *plain)
    rounded = Rounder(h, block).round(w, change @ h), round_numpy(w, change @ h, h, block), plain
    ours, expected, alone = (decoded(*each, 4, block, columns) for each in rounded)
    lost = [np.einsum("ri,ij,rj->", target - each, h, target - each) for each in (ours, expected, alone)]
    np.testing.assert_allclose(lost[0], lost[1], rtol=0.02)  # where two levels are as near, all after differs
    assert (np.abs(ours - expected) < 1e-4).mean() > 0.9
    assert lost[0] < 0.6 * lost[2]


def test_rounding_where_the_text_says_little() -> None:
    """Fewer inputs than columns, channels that are always 0, none at all: rounded all the same."""
    w = drawn(4, 64)
    for x in (inputs(5, 64), inputs(50, 64) * (np.arange(64) % 2), np.zeros((3, 64), np.float32)):
        codes, scales = Rounder(hessian(x.astype(np.float32)), 32).round(w, np.zeros_like(w))
        assert np.square(w - decoded(codes, scales, 4, 32, 64)).sum() < 0.1 * np.square(w).sum()
    with pytest.raises(EdgeKVError, match="not finite"):
        hessian(np.full((2, 64), np.inf, np.float32))


def aim(rows: F32, lost: F32, own: F32) -> np.ndarray[Any, Any]:
    """Returns what is rounded in place of rows."""
    h = hessian(own)
    change = output_correction(Rounder(h, 32), rows, *cross_products(lost, own))
    return rows + change @ np.linalg.inv(h.astype(np.float64))


def formula(rows: F32, lost: F32, own: F32) -> np.ndarray[Any, Any]:
    """Computes `aim` in float64."""
    inverse = np.linalg.inv(independent(own))
    missing = lost.astype(np.float64) @ rows.T
    first, second = (missing[part].T @ own[part] for part in np.split(np.arange(len(own)), [len(own) // 2]))
    sizes = [
        np.trace(part @ inverse @ part.T) for part in ((first - second)[::SAMPLE], (first + second)[::SAMPLE])
    ]
    return rows + max(0, 1 - sizes[0] / sizes[1]) / len(own) * (first + second) @ inverse


@pytest.mark.parametrize(("tokens", "columns", "rows"), [(4000, 48, 100), (301, 96, 12)])
def test_a_linear_term_is_the_formula(tokens: int, columns: int, rows: int) -> None:
    own, w, rng = inputs(tokens, columns), drawn(rows, columns), np.random.default_rng(1)
    lost = (own @ (0.1 * rng.standard_normal((columns, columns))).astype(np.float32)).astype(np.float32)
    expected = formula(w, lost, own)
    change = np.abs(expected - w).max()
    assert change > 0.1
    np.testing.assert_allclose(aim(w, lost, own), expected, atol=1e-3 * change)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "WINDOW", 256)
    monkeypatch.setattr(calibration, "MAX_TOKENS", 512)


@pytest.fixture
def text(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "text.txt"
    path.write_text(PROSE[: len(PROSE) // 2])
    return path


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The demo model's first layer."""
    folder = tmp_path_factory.mktemp("cut") / "m"
    shutil.copytree(DEMO, folder)
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    tensors = safetensors.numpy.load_file(DEMO / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers." not in name or "layers.0." in name}
    safetensors.numpy.save_file(kept, folder / "model.safetensors")
    return folder


@pytest.mark.usefixtures("short")
def test_a_calibrated_store(cut: pathlib.Path, text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """On a text that it was not rounded with it is nearer to the exact model, in as many bytes."""
    plain, rounded = tmp_path / "plain", tmp_path / "rounded"
    for folder, options in ((plain, []), (rounded, ["--calibrate", str(text)])):
        command = ["quantize", "--model", str(cut), "--weights", "int4,head=int8", *options]
        assert main([*command, "--output", str(folder)]) == 0
    stores = [WeightStore(folder) for folder in (plain, rounded)]
    assert stores[0].nbytes == stores[1].nbytes
    assert (stores[0].calibration, "512 tokens" in str(stores[1].calibration)) == (None, True)
    assert stores[0].identity == Model.open(cut).identity != stores[1].identity
    np.testing.assert_array_equal(stores[0].matrix("head"), stores[1].matrix("head"))
    following = Session.load(cut, ctx=1024).encode(PROSE[len(PROSE) // 2 :])[:256]
    exact, *others = (
        Session.load(path, kv="dense:dtype=f32", ctx=1024, weights=name).logits(following)
        for path, name in ((cut, "f32"), (plain, "auto"), (rounded, "auto"))
    )
    losses = [divergence(exact, logits) for logits in others]
    assert losses[1] < 0.75 * losses[0], losses


def divergence(exact: F32, other: F32) -> float:
    """Returns the mean KL of two sets of logits."""
    p, q = (x - np.log(np.exp(x.astype(np.float64)).sum(1, keepdims=True)) for x in (exact, other))
    return float((np.exp(p) * (p - q)).sum(1).mean())


def test_what_can_not_be_calibrated(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    texts = {"short": b"Too short.", "bytes": b"\xff\xfe" * 9000, "long": PROSE.encode()}
    for name, data in texts.items():
        (tmp_path / name).write_bytes(data)
    store = random_store(load_shape("tiny", 1), FORMATS["int4"]).folder
    for name, model, weights, part in (
        ("short", DEMO, "int4", "fewer than 2048 tokens"),
        ("bytes", DEMO, "int4", "not UTF-8"),
        ("long", DEMO, "int8", "these are to be int8"),
        ("long", store, "auto", "is a store"),
    ):
        arguments = ["--model", str(model), "--weights", weights, "--calibrate", str(tmp_path / name)]
        assert main(["quantize", *arguments, "--output", str(output)]) == 2
        error = capsys.readouterr().err
        assert part in error
        assert "--calibrate" in error or model == store
        assert error.count("\n") == 1
        assert not output.exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return golden_cases.write_checkpoint("llama31", tmp_path_factory.mktemp("head") / "m")


@pytest.mark.parametrize("weights", ["int4,head=int8", "auto,head=int8-32"])
def test_the_head_has_bits_of_its_own(weights: str, model: pathlib.Path) -> None:
    opened = Model.open(model)
    form = opened.weight_format(weights)
    base, head = form.name.split(",head=")
    assert (form.of("0.qkv").name, form.of("head").name) == (base, head)
    store = opened.store(form)
    assert store.form == form
    sizes = [opened.weights_bytes(opened.weight_format(name)) for name in (base, head)]
    assert min(sizes) < opened.weights_bytes(form) == store.nbytes < max(sizes)
    np.testing.assert_array_equal(store.matrix("head"), opened.store(opened.weight_format(head)).matrix("head"))
    logits, reference = (
        Session.load(model, weights=weights, device=device).logits([1, 2, 3]) for device in ("cpu", "numpy")
    )
    assert np.sqrt(np.mean(np.square(logits - reference))) < 0.05 * reference.std()
    for refused in ("int4,head=int5", "int4,head=", "int4,tail=int8"):
        with raises(ConfigError, field="weights", match="accepted"):
            opened.weight_format(refused)
