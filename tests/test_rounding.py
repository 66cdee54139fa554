"""Weights in 2 to 8 bits: the kernels against NumPy, rounding with a text, formats of the head."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
import shutil
import tracemalloc
from types import SimpleNamespace

import golden_cases
import numpy as np
import pytest
import safetensors.numpy
from helpers import divergence, raises
from kernel_cases import quantize_numpy

from edgekv import Session
from edgekv.checkpoint.hub import load_shape
from edgekv.cli import main
from edgekv.engine import calibration
from edgekv.engine.loading import open_tokenizer
from edgekv.engine.model import Model
from edgekv.errors import CheckpointError, ConfigError, EdgeKVError
from edgekv.kernels.weight_codes import level_tables
from edgekv.types import F32, F64
from edgekv.weights import checkpoint_weights, gaussian, rounding
from edgekv.weights.formats import FORMATS, ModelFormat, WeightFormat, allocate_layer_bits
from edgekv.weights.gaussian import BEST_SCALES, rotate, rotation
from edgekv.weights.ops import NumpyOps
from edgekv.weights.random_weights import random_store
from edgekv.weights.rounding import CalibratingOps, Rounder, hessian, output_correction, pairs_order
from edgekv.weights.store import WeightStore, build

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "models" / "demo"
PROSE = (DEMO / "prose.txt").read_text()
ERRORS = {
    "int8": 4.1e-5, "int8-32": 2.83e-5, "int4": 9.2e-3, "int4-32": 6.5e-3,
    "q2": 0.1104, "q3": 0.0283, "q4": 0.00692, "q5": 0.00175,
}  # fmt: skip
"""Mean squared errors of a Gaussian of deviation 1, measured."""


def drawn(rows: int, columns: int, seed: int = 0) -> F32:
    """Draws weights with a few large ones."""
    w = np.random.default_rng(seed).standard_t(5, (rows, columns)).astype(np.float32)
    w[rows // 2] = 0
    return w


@pytest.mark.parametrize(
    ("bits", "block", "columns"), [(4, 32, 200), (4, 128, 200), (4, 128, 256), (8, 32, 32), (8, 128, 200)]
)
def test_blocks_are_numpys(bits: int, block: int, columns: int) -> None:
    w = drawn(12, columns)
    form = WeightFormat("", bits, block)
    expected = dict(zip(("codes", "scales"), quantize_numpy(w, bits, block), strict=True))
    found = form.quantize(w)
    np.testing.assert_allclose(found["scales"], expected["scales"], rtol=1e-4, atol=1e-7)
    errors = [np.square(form.dequantize(arrays, columns) - w).sum() for arrays in (found, expected)]
    np.testing.assert_allclose(errors[0], errors[1], rtol=1e-4)
    assert np.sqrt(errors[0] / np.square(w).sum()) < (0.16 if bits == 4 else 0.01)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_quantize_or_say_that_they_can_not(name: str) -> None:
    form, w = FORMATS[name], np.random.default_rng(0).standard_normal((100, 512), np.float32)
    if form.bits == 32 or form.kept or form.e2m1:
        with pytest.raises(ValueError, match=f"can't be quantized to {name}; accepted are int8, "):
            form.quantize(w)
        return
    decoded = form.dequantize(form.quantize(w), 512)
    np.testing.assert_allclose(np.square(decoded - w).mean(), ERRORS[re.sub("-[zo].*", "", name)], rtol=0.02)


@pytest.mark.parametrize(("bits", "most"), [(2, 1.001), (3, 1.003), (4, 1.015), (5, 1.1)])
def test_scales_are_nearly_the_best(bits: int, most: float) -> None:
    """The error is at most so many times that of the best of 100 scales, with the best of all pairs of codes."""
    w, pairs = drawn(12, 256), pairs_of(level_tables(bits).astype(np.float64), 1)
    x = rotate(w).astype(np.float64).reshape(-1, 2, 64).transpose(0, 2, 1)
    deviations, explained = np.sqrt(np.square(x).mean((1, 2), keepdims=True)), np.zeros(len(x))
    for step in deviations * np.geomspace(0.02, 0.12, 100)[:, None, None, None]:
        q = pairs[(step / 2 * np.square(pairs).sum(1) - x @ pairs.T).argmin(-1)]
        explained = np.maximum(explained, np.square((q * x).sum((1, 2))) / np.square(q).sum((1, 2)))
    error = np.square(gaussian.dequantize(*gaussian.quantize(w, bits), bits, 256) - w).sum()
    assert error < most * (np.square(x).sum() - explained.sum())


@pytest.mark.parametrize("name", ["f32", "int8-32"])
def test_storing_a_matrix_takes_its_bytes_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of weights quantized at a time, which does not change the arrays."""
    weights = Model.open(DEMO).weights
    assert isinstance(weights, checkpoint_weights.CheckpointWeights)
    whole = dict(weights.stored_arrays("head", FORMATS[name]))
    monkeypatch.setattr(checkpoint_weights, "QUANTIZED_ELEMENTS", 1000)
    tracemalloc.start()
    arrays = dict(weights.stored_arrays("head", FORMATS[name]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for part, array in arrays.items():
        np.testing.assert_array_equal(array, whole[part])
    assert peak < 1.2 * sum(array.nbytes for array in arrays.values())


def inputs(tokens: int, columns: int) -> F32:
    """Draws inputs of a layer whose channels depend on each other and have uneven sizes."""
    rng = np.random.default_rng(3)
    mixed = rng.standard_normal((tokens, 24)) @ rng.standard_normal((24, columns))
    mixed += 0.5 * rng.standard_normal((tokens, columns))
    return (mixed * np.exp(rng.standard_normal(columns))).astype(np.float32)


def hessian_numpy(x: F32) -> F64:
    """Computes `hessian` by the formula, in float64, with as many independent inputs as x has columns."""
    (n, columns), x = x.shape, x.astype(np.float64)
    own = np.diag(np.square(x).mean(0))
    damping = rounding.DAMPING * own.trace() / columns or 1.0
    return np.asarray((x.T @ x + columns * own) / (n + columns) + damping * np.eye(columns))


def test_a_hessian_is_the_formula() -> None:
    for tokens, columns in ((400, 96), (5000, 40), (5, 64)):
        x = inputs(tokens, columns)
        np.testing.assert_allclose(hessian(x), hessian_numpy(x), rtol=1e-4, atol=1e-5 * np.square(x).mean(0).max())


def round_numpy(rotated: F32, output_correction: F32, hessian: F32, bits: int) -> F64:
    """Returns the rotated weights that `Rounder.round` specifies, in float64: row after row, pair after pair."""
    (order, blocks), tables = pairs_order(hessian.diagonal()), level_tables(bits).astype(np.float64)
    h = hessian.astype(np.float64)[np.ix_(order, order)]
    factor = np.asarray(np.linalg.cholesky(h), np.float64)
    w, b = rotated[:, order].astype(np.float64), output_correction[:, order].astype(np.float64)
    added = np.linalg.solve(factor, b.T).T
    rounded, scales = np.zeros_like(w), np.zeros((len(w), len(blocks)))
    last_first = [(i, slice(128 * i, 128 * i + 128)) for i in reversed(range(len(blocks)))]
    for i, own in last_first:
        for r in range(len(w)):
            targets = w[r, own] + (((w - rounded)[r] @ factor + added[r]) / factor.diagonal())[own]
            targets -= (w - rounded)[r, own]  # which `tried_block` adds
            targets -= (w - rounded)[r, own] @ np.tril(factor[own, own] / factor[own, own].diagonal(), -1)
            steps = np.sqrt(np.square(targets).mean()) * BEST_SCALES[bits] * np.linspace(0.84, 1.12, 8)
            tried = [tried_block(w[r, own], targets, factor[own, own], step, tables) for step in steps]
            best = int(np.argmin([loss for _, loss in tried]))
            rounded[r, own], scales[r, i] = tried[best][0], steps[best]
    for i, own in last_first:
        for r in range(len(w)):
            q, slopes = rounded[r, own], (w - rounded)[r] @ h + b[r]
            if not scales[r, i]:
                continue
            factor_of_scale = 1 + slopes[own] @ q / (q @ h[own, own] @ q)
            rounded[r, own], scales[r, i] = q * factor_of_scale, scales[r, i] * factor_of_scale
            for j in range(own.start, own.stop, 2):
                pair = h[j : j + 2, j : j + 2]
                aims = rounded[r, j : j + 2] + np.linalg.solve(pair, (((w - rounded)[r] @ h) + b[r])[j : j + 2])
                found = pairs_of(tables, scales[r, i])
                lost = found - aims
                rounded[r, j : j + 2] = found[np.einsum("ni,ij,nj->n", lost, pair, lost).argmin()]
    in_order = np.empty_like(rounded)
    in_order[:, order] = rounded
    return in_order


def pairs_of(tables: F64, step: float) -> F64:
    """Returns the values (pairs, 2) that two partners can have."""
    codes = np.indices((len(tables[0]),) * 2).reshape(2, -1)
    return step * np.stack([tables[codes[1] & 1, codes[0]], tables[codes[0] & 1, codes[1]]], axis=1)


def tried_block(w: F64, targets: F64, factor: F64, step: float, tables: F64) -> tuple[F64, float]:
    """A block's values with a scale, and what it adds. Of each two codes' parities the nearest second is taken."""
    rounded, errors, added = np.zeros_like(w), np.zeros_like(w), 0.0
    found = pairs_of(tables, step).reshape(len(tables[0]), -1, 2)
    for j in reversed(range(0, len(w), 2)):
        x, y = (targets[i] + errors @ factor[:, i] / factor[i, i] for i in (j, j + 1))
        costs = []
        for odd_x, odd_y in np.ndindex(2, 2):
            second = found[odd_x, odd_y::2, 1]
            own_y = second[np.abs(second - y).argmin()]
            x_then = x + (w[j + 1] - own_y) * factor[j + 1, j] / factor[j, j]
            first = found[odd_x::2, odd_y, 0]
            own_x = first[np.abs(first - x_then).argmin()]
            cost = (factor[j, j] * (x_then - own_x)) ** 2 + (factor[j + 1, j + 1] * (y - own_y)) ** 2
            costs.append((cost, own_x, own_y))
        cost, *rounded[j : j + 2] = min(costs)
        errors[j : j + 2], added = (w - rounded)[j : j + 2], added + cost
    return rounded, added


@pytest.mark.parametrize(("columns", "bits", "size"), [(200, 2, 1), (200, 5, 6), (256, 3, 1), (600, 4, 6)])
def test_rounding_is_the_formula(columns: int, bits: int, size: int) -> None:
    """size: of partners' inputs; errors of large ones weigh more."""
    w, x = drawn(4, columns), inputs(600, columns)
    h, rotated = hessian(rotate(x)), rotate(w)
    sizes = np.where(np.arange(len(h)) % 128 < 64, np.float32(1), np.float32(size))
    h *= np.outer(sizes, sizes)
    change = np.float32(0.1) * np.roll(rotated, 1, axis=1)
    target = rotated + change
    codes, scales = Rounder(h, bits).round(rotated, change @ h)
    n = rotated.shape[1]
    back = np.kron(np.eye(n // 128), rotation().T)
    plain = gaussian.quantize((target @ back).astype(np.float32), bits)
    ours, alone = (rotate(gaussian.dequantize(*each, bits, n)) for each in ((codes, scales), plain))
    expected = round_numpy(rotated, change @ h, h, bits)
    lost = [np.einsum("ri,ij,rj->", target - each, h, target - each) for each in (ours, expected, alone)]
    np.testing.assert_allclose(lost[0], lost[1], rtol=0.03)  # where two levels are as near, all after differs
    assert lost[0] < 0.6 * lost[2]


def test_rounding_where_the_text_says_little() -> None:
    """Fewer inputs than columns, channels that are always 0, none at all: rounded all the same."""
    w = drawn(4, 64)
    for x in (inputs(5, 64), inputs(50, 64) * (np.arange(64) % 2), np.zeros((3, 64), np.float32)):
        rotated = rotate(w)
        codes, scales = Rounder(hessian(rotate(x.astype(np.float32))), 4).round(rotated, np.zeros_like(rotated))
        assert np.square(w - gaussian.dequantize(codes, scales, 4, 64)).sum() < 0.1 * np.square(w).sum()
    with pytest.raises(EdgeKVError, match="not finite"):
        hessian(np.full((2, 64), np.inf, np.float32))


def corrected_numpy(rows: F32, lost: F32, x: F32) -> F64:
    """Returns what is rounded in place of rows, in float64."""
    inverse = np.linalg.inv(hessian_numpy(x))
    missing = lost.astype(np.float64) @ rows.T
    first, second = (missing[part].T @ x[part] for part in np.split(np.arange(len(x)), [len(x) // 2]))
    noise, whole = (
        np.trace(part @ inverse @ part.T)
        for part in ((first + sign * second)[:: rounding.SAMPLE] for sign in (-1, 1))
    )
    change: F64 = max(0, 1 - noise / whole) / len(x) * (first + second) @ inverse
    return rows + change


@pytest.mark.parametrize(("tokens", "columns", "rows"), [(4000, 128, 100), (601, 256, 12)])
def test_an_output_correction_is_the_formula(tokens: int, columns: int, rows: int) -> None:
    x, w, rng = inputs(tokens, columns), drawn(rows, columns), np.random.default_rng(1)
    h = hessian(x)
    lost = (x @ (0.1 * rng.standard_normal((columns, columns))).astype(np.float32)).astype(np.float32)
    expected = corrected_numpy(w, lost, x)
    change = np.abs(expected - w).max()
    assert change > 0.1
    corrected = w + output_correction(Rounder(h, 4), w, lost, x) @ np.linalg.inv(h.astype(np.float64))
    np.testing.assert_allclose(corrected, expected, atol=1e-3 * change)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "WINDOW", 256)
    monkeypatch.setattr(calibration, "MAX_TOKENS", 512)
    monkeypatch.setattr(calibration, "all_cores", lambda: 1)  # small products wait for a busy machine's threads


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
        command = ["quantize", "--model", str(cut), "--weights", "q4,head=int8", *options]
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


@pytest.mark.usefixtures("short")
def test_bits_go_where_they_are_needed(cut: pathlib.Path, text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """More bits than q2 has, each linear layer whole ones of its own, cost less KL."""
    sessions = [Session.load(cut, kv="dense:dtype=f32", ctx=1024, weights="f32")]
    for weights in ("q2", "q2.8"):
        arguments = ["quantize", str(cut), "--weights", weights, "--calibrate", str(text)]
        assert main([*arguments, "--output", str(tmp_path / weights)]) == 0
        sessions.append(Session.load(tmp_path / weights, kv="dense:dtype=f32", ctx=1024))
    following = sessions[0].encode(PROSE[len(PROSE) // 2 :])[:256]
    exact, *others = (session.logits(following) for session in sessions)
    assert divergence(exact, others[1]) < 0.8 * divergence(exact, others[0])
    store = WeightStore(tmp_path / "q2.8")
    sizes = {name: linear.n_elements for name, linear in store.arch.linears().items()}
    bits = {name: store.form.of(name).bits for name in sizes}
    assert store.form.name == "q2.8"
    assert len(set(bits.values())) > 1
    assert 2.5 < sum(bits[name] * n for name, n in sizes.items()) / sum(sizes.values()) <= 2.8


def test_experts_are_rounded_by_their_own_inputs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in bits by need; routers stay exact."""
    letters = SimpleNamespace(bos_id=None, encode=lambda text: [ord(letter) for letter in text])
    monkeypatch.setattr(calibration, "open_tokenizer", lambda model: letters)
    monkeypatch.setattr(calibration, "all_cores", lambda: 1)
    rng, folder = np.random.default_rng(0), tmp_path / "m"
    golden_cases.write_checkpoint("qwen3-moe", folder)
    model = Model.open(folder)
    text = "".join(map(chr, rng.integers(32, model.config.vocab_size, 1100)))
    exact = NumpyOps(model.weights)
    stores = {}
    for weights in ("q3", "q2.5"):
        rounding = calibration.Calibration.choose(model, weights, text, lambda *done: None)
        build(rounding.weights, rounding.form, tmp_path / weights, None, rounding=rounding)
        stores[weights] = WeightStore(tmp_path / weights)
        np.testing.assert_array_equal(stores[weights].matrix("0.router"), exact.weights.matrix("0.router"))
    assert {form for _, form in stores["q2.5"].form.linears} > {"f32", "q2", "q3"}
    tokens = rng.integers(32, model.config.vocab_size, 60)
    plain = model.store(ModelFormat("q3"))
    logits = [
        Session.load(path, kv="dense:dtype=f32", weights=name).logits(tokens)
        for path, name in ((folder, "f32"), (plain.folder, "auto"), (stores["q3"].folder, "auto"))
    ]
    assert divergence(logits[0], logits[2]) < divergence(logits[0], logits[1])


@pytest.mark.usefixtures("short")
def test_whole_means_are_named_apart(cut: pathlib.Path, text: pathlib.Path) -> None:
    """A mean of 3 bits has other weights than 3 bits everywhere, so sessions of one are not the other's."""
    model = Model.open(cut)
    rounded = [
        calibration.Calibration.choose(model, name, text.read_text(), lambda *done: None)
        for name in ("q3", "q3.0", "q3.1")
    ]
    assert [each.form.name for each in rounded] == ["q3", "q3.0", "q3.1"]
    assert len({each.weights.source.identity for each in rounded}) == 3


def test_noise_is_like_rounding() -> None:
    w = drawn(1000, 320)
    w[:, 128:256] *= 9
    for bits in (2, 3):
        calibration.add_noise(noisy := w.copy(), bits)
        quantized = gaussian.dequantize(*gaussian.quantize(w, bits), bits, 320)
        for q, error in ((noisy, gaussian.SQUARED_ERRORS[bits]), (quantized, ERRORS[f"q{bits}"])):
            for part in (slice(0, 128), slice(128, 256)):  # each block by its own size
                square = np.square(w[:, part]).sum()
                shares = np.square(w - q)[:, part].sum() / square, 1 - (w * q)[:, part].sum() / square
                np.testing.assert_allclose(shares, error, rtol=0.05)


def test_windows_begin_as_prompts_do() -> None:
    tokenizer = open_tokenizer(Model.open(DEMO))
    for text in (PROSE, PROSE * 20):  # all of it is encoded, or windows from all over it
        found = calibration.encode_windows(tokenizer, text, 512, 4)
        assert len(found) == 4
        assert (found[:, 0] == tokenizer.bos_id).all()
    for n, most in ((15, 8), (8, 8), (3, 8), (100, 7)):
        chosen = calibration.spread(np.arange(n)[:, None], most)[:, 0]
        assert len(chosen) == min(n, most)
        assert chosen[-1] >= n - -(-n // len(chosen))  # in the last of as many parts


def test_bits_by_need() -> None:
    rng = np.random.default_rng(0)
    sizes = {f"{i}": int(n) for i, n in enumerate(rng.integers(1000, 3000, 200))}
    needs = {name: float(need) for name, need in zip(sizes, rng.exponential(size=200) ** 2, strict=True)}
    for mean in (2.1, 3.0, 3.6, 4.9):
        bits = allocate_layer_bits(needs, sizes, mean)
        assert 0.99 * mean < sum(bits[name] * n for name, n in sizes.items()) / sum(sizes.values()) <= mean
        per_weight = sorted((needs[name] / n, bits[name]) for name, n in sizes.items())
        descents = [a for (_, a), (_, b) in itertools.pairwise(per_weight) if a > b]
        assert len(descents) <= 3  # where the last bits that there was room for went
    assert set(allocate_layer_bits(needs, sizes, 5).values()) == {5}


@pytest.mark.usefixtures("short")
def test_a_weight_that_is_not_finite_is_named(
    cut: pathlib.Path, text: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(cut, tmp_path / "m")
    tensors, damaged = safetensors.numpy.load_file(cut / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    tensors[damaged][3, 5] = np.nan
    safetensors.numpy.save_file(tensors, tmp_path / "m" / "model.safetensors")
    arguments = ["quantize", str(tmp_path / "m"), "--output", str(tmp_path / "out"), "--weights"]
    for more in (["q4", "--calibrate", str(text)], ["q4"], ["int8"]):
        assert main([*arguments, *more]) == 2
        assert f"tensor '{damaged}' has a number that is not finite" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_weight_that_is_not_finite_of_an_idle_expert_is_named(tmp_path: pathlib.Path) -> None:
    folder, y = golden_cases.write_checkpoint("qwen3-moe", tmp_path), np.ones((4, 64), np.float32)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    idle = (tensors["model.layers.0.mlp.gate.weight"].astype(np.float32) @ y[0]).argmin()
    damaged = f"model.layers.0.mlp.experts.{idle}.up_proj.weight"
    tensors[damaged][3, 5] = np.nan
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    ops = CalibratingOps(Model.open(folder).weights, ModelFormat("q3"), lambda name, rounded: None)
    with pytest.raises(CheckpointError, match=f"tensor '{damaged}' has a number that is not finite"):
        ops.add_experts(y, y, 0)


def test_what_can_not_be_calibrated(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    texts = {"short": b"Too short.", "bytes": b"\xff\xfe" * 9000, "long": PROSE.encode()}
    for name, data in texts.items():
        (tmp_path / name).write_bytes(data)
    store = random_store(load_shape("tiny", 1), ModelFormat("q4")).folder
    for name, model, weights, part in (
        ("short", DEMO, "q4", "fewer than 2048 tokens"),
        ("bytes", DEMO, "q4", "not UTF-8"),
        ("demo", DEMO, "q4", "text file; MODEL stands before --calibrate\n"),
        ("long", DEMO, "int8", "works with q2 to q5 only; --weights int8 gives int8 here; choose --weights q4"),
        ("long", DEMO, "auto", "--weights auto gives f32 here"),
        ("long", store, "auto", "is a store, rounded already; give the original checkpoint\n"),
        *(("long", DEMO, name, "q2.1 to q4.9") for name in ("q5.5", "q5.0", "q2.0", "q2.05", "q3.60", "q٣.6")),
    ):
        arguments = ["--model", str(model), "--weights", weights, "--calibrate", str(tmp_path / name)]
        assert main(["quantize", *arguments, "--output", str(output)]) == 2
        error = capsys.readouterr().err
        assert part in error
        assert "--calibrate" in error or model == store
        assert error.count("\n") == 1
        assert not output.exists()
    assert main(["quantize", str(DEMO), "--weights", "q4", "--calibrate", str(tmp_path / "long")]) == 2
    assert "--output" in capsys.readouterr().err
    for command in (["quantize", str(DEMO)], ["run", str(DEMO), "Once"]):
        assert main([*command, "--weights", "q3.6"]) == 2
        assert "edgekv quantize MODEL --weights q3.6 --calibrate" in capsys.readouterr().err
    command = ["quantize", str(DEMO), "--calibrate", "--output", str(output)]
    assert main([*command, "--weights", "q3.6,head=q5"]) == 2
    assert "a text decides the head's bits, too; leave ,head=NAME out" in capsys.readouterr().err
    monkeypatch.delattr(calibration, "format_by_need")  # minutes of work; that the disk is full is known before
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=7_000_000))
    for folder in (output, output / "in" / "it"):
        assert main([*command[:-1], str(folder), "--weights", "q3.6"]) == 2
        assert "needs 7,779,840 bytes, 7,000,000 are free" in capsys.readouterr().err


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
