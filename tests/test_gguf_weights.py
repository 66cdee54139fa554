"""Weights of GGUF files: plain numbers, blocks that are taken over, blocks that are quantized again."""

import json
import pathlib

import gguf
import gguf_writer
import golden_cases
import numpy as np
import pytest
from cuda_cases import OnDevice, require_same_logits
from safetensors.numpy import save_file

from edgekv import Session
from edgekv.engine.model import Model
from edgekv.models import architecture
from edgekv.weights.store import WeightStore

CASES = [
    "llama1",
    "llama2-gqa",
    "llama31",
    "llama-tied-smollm",
    "llama-head-dim",
    "llama-biases",
    "rope-linear",
    "rope-yarn",
    "qwen2",
    "qwen3",
    "gpt2",
]
QUANTISED = {"Q4_0": "int4-32", "Q8_0": "int8-32", "Q4_1": "int4-32-offsets"}
ROUNDING = {"Q4_0": 0, "Q8_0": 0, "Q4_1": 3e-7}  # of the sums


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_numbers_are_the_checkpoints(name: str, kind: str, tmp_path: pathlib.Path) -> None:
    folder = golden_cases.write_checkpoint(name, tmp_path / "folder")
    path = gguf_writer.write_gguf(folder, tmp_path / "model.gguf", kind)
    tokens = golden_cases.tokens(name)
    ours = Session.load(path, kv="dense:dtype=f32").logits(tokens)
    if kind != "F32":
        rounded = {n: _rounded(a, kind) for n, a in golden_cases.tensors(name).items()}
        kept = {n: a for n, a in golden_cases.tensors(name).items() if n.endswith("wpe.weight")}
        save_file(rounded | kept, folder / "model.safetensors")
    np.testing.assert_array_equal(ours, Session.load(folder, kv="dense:dtype=f32").logits(tokens))


def _rounded(array: np.ndarray, kind: str) -> np.ndarray:
    """What is left of a matrix in the type; vectors stay float32."""
    chosen = gguf_writer.TYPES[kind]
    return gguf.quants.dequantize(gguf.quants.quantize(array, chosen), chosen) if array.ndim > 1 else array


@pytest.mark.parametrize("name", ["llama2-gqa", "qwen2", "wide-gpt2"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_equal_blocks_are_taken_over(name: str, kind: str, tmp_path: pathlib.Path) -> None:
    """Every weight of the store is the file's own, to the bit."""
    folder = golden_cases.write_checkpoint(name.removeprefix("wide-"), tmp_path / "folder")
    if name == "wide-gpt2":
        widened(folder)
    path = gguf_writer.write_gguf(folder, tmp_path / "model.gguf", kind)
    model = Model.open(path)
    form = model.weight_format("auto")
    assert form.name == "gguf"
    assert model.weights_note(form) is None
    store = model.store(form)
    for linear in model.arch.linears():
        assert form.of(linear).name == QUANTISED[kind]
        np.testing.assert_array_equal(store.matrix(linear), model.weights.matrix(linear))
    if kind != "Q4_1":
        wider = model.store(model.weight_format("int8-32"))  # 4 bits fit into 8
        np.testing.assert_array_equal(wider.matrix("0.up"), store.matrix("0.up"))
    expected = gguf.quants.quantize(reference(folder, "0.up"), gguf_writer.TYPES[kind])
    theirs = gguf.quants.dequantize(expected, gguf_writer.TYPES[kind])
    np.testing.assert_allclose(store.matrix("0.up"), theirs, rtol=0, atol=ROUNDING[kind] * np.abs(theirs).max())


def widened(folder: pathlib.Path) -> None:
    """GPT-2 with channels that are whole blocks of 32."""
    config = golden_cases.GPT2 | {"n_embd": 96, "n_head": 3}
    (folder / "config.json").write_text(json.dumps(config))

    shapes = architecture(config).tensors()
    save_file({n: golden_cases._draw("wide", n, s) for n, s in shapes.items()}, folder / "model.safetensors")


def reference(folder: pathlib.Path, linear: str) -> np.ndarray:
    return np.ascontiguousarray(Model.open(folder).weights.matrix(linear))


@pytest.mark.parametrize("device", ["cpu", "numpy"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_logits_of_quantized_files(kind: str, device: str, tmp_path: pathlib.Path) -> None:
    """Against the checkpoint with the file's weights; the products also round the activations."""
    folder = golden_cases.write_checkpoint("llama2-gqa", tmp_path / "folder")
    path = gguf_writer.write_gguf(folder, tmp_path / "model.gguf", kind)
    rounded = {n: _rounded(a, kind) for n, a in golden_cases.tensors("llama2-gqa").items()}
    save_file(rounded, folder / "model.safetensors")
    tokens = golden_cases.tokens("llama2-gqa")
    ours = Session.load(path, kv="dense:dtype=f32", device=device).logits(tokens)
    expected = Session.load(folder, kv="dense:dtype=f32", device="numpy", weights="f32").logits(tokens)
    error = np.sqrt(np.mean(np.square(ours - expected)))
    assert error < (0.05 if device == "cpu" else 2e-3) * expected.std()  # the table is rounded to float16


@pytest.mark.parametrize(("kind", "form"), [("Q5_0", "int8-32"), ("Q5_1", "int8-32")])
def test_other_blocks_are_quantized_again_and_it_is_said(kind: str, form: str, tmp_path: pathlib.Path) -> None:
    folder = golden_cases.write_checkpoint("llama2-gqa", tmp_path / "folder")
    path = gguf_writer.write_gguf(folder, tmp_path / "model.gguf", kind)
    session = Session.load(path)
    assert session.plan.notes == (f"weights of type {kind} were quantized a second time, to {form}",)
    exact, ours = session.model.weights, session.model.store(session.model.weight_format("auto"))
    for linear in ("0.qkv", "1.down", "head"):
        x, y = exact.matrix(linear), ours.matrix(linear)
        assert np.linalg.norm(x - y) < 0.01 * np.linalg.norm(x)


@pytest.mark.parametrize("kind", ["Q5_K", "Q6_K"])
def test_k_quants_of_more_bits_are_quantized_again(kind: str, tmp_path: pathlib.Path) -> None:
    path, expected = gguf_writer.write_k_quants(tmp_path, kind)
    session = Session.load(path, kv="dense:dtype=f32")
    assert session.plan.notes == (f"weights of type {kind} were quantized a second time, to int8-32",)
    np.testing.assert_array_equal(session.model.weights.matrix("0.down"), expected)
    store = session.model.store(session.model.weight_format("auto"))
    assert np.linalg.norm(store.matrix("0.down") - expected) < 0.01 * np.linalg.norm(expected)
    assert np.isfinite(session.logits([1, 2, 3])).all()


def test_q4_k_is_taken_over(device: OnDevice, tmp_path: pathlib.Path) -> None:
    """The library's values up to the rounding of a sum; products on every path, of a prompt and of a token."""
    path, expected = gguf_writer.write_k_quants(tmp_path, "Q4_K")
    model, near = Model.open(path), 1e-6 * np.abs(expected).max()
    form = model.weight_format("auto")
    assert {form.of(name).name for name in model.arch.linears()} == {"int4-32-offsets"}
    assert model.weights_note(form) is None
    assert "int8-32" in str(model.weights_note(model.weight_format("int8-32")))
    np.testing.assert_allclose(model.weights.matrix("0.down"), expected, atol=near, rtol=0)
    store = model.store(form)
    np.testing.assert_allclose(store.matrix("0.down"), expected, atol=near, rtol=0)
    assert WeightStore(store.folder).form == form
    require_same_logits(model, range(41), device)


def test_parts_of_several_types(tmp_path: pathlib.Path) -> None:
    """Fused projections of which one has more bits, as llama.cpp mixes them."""
    path, _ = gguf_writer.write_k_quants(tmp_path, "Q4_K", {"v_proj": "Q6_K", "gate_proj": "Q4_0"})
    model = Model.open(path)
    form = model.weight_format("auto")
    names = {name: form.of(name).name for name in ("0.qkv", "0.out", "0.up")}
    assert names == {"0.qkv": "int8-32", "0.out": "int4-32-offsets", "0.up": "int4-32-offsets"}
    assert model.weights_note(form) is not None
    store = model.store(form)
    for name, error in (("0.qkv", 0.01), ("0.up", 1e-6)):
        expected = model.weights.matrix(name)
        assert np.linalg.norm(store.matrix(name) - expected) < error * np.linalg.norm(expected)


def test_each_linear_layer_has_its_own_format(tmp_path: pathlib.Path) -> None:
    """As llama.cpp mixes them: the output projection with more bits."""
    folder = golden_cases.write_checkpoint("llama2-gqa", tmp_path / "folder")
    path = gguf_writer.write_gguf(folder, tmp_path / "model.gguf", "Q4_0", head="Q8_0")
    model = Model.open(path)
    form = model.weight_format("auto")
    assert (form.of("0.qkv").name, form.of("head").name) == ("int4-32", "int8-32")
    assert model.weights_note(form) is None
    again = WeightStore(model.store(form).folder)  # the manifest remembers
    assert again.form == form
    np.testing.assert_array_equal(again.matrix("head"), model.weights.matrix("head"))
    assert model.weights_note(model.weight_format("int4")) is not None
