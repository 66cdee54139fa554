"""Published quantized checkpoints: matrices that libraries packed, and whole models of GPTQ, AWQ and FP8."""

from __future__ import annotations

import itertools
import json
import pathlib

import golden_cases
import numpy as np
import pytest
from cuda_cases import OnDevice, require_same_logits
from helpers import raises
from packed_cases import BASE, MODELS, PACKED, library_tensors, save, write
from packed_cases import LIBRARIES as CASES

from edgekv import Session
from edgekv.checkpoint.quantized import unpack_tensors
from edgekv.checkpoint.tensors import Tensors
from edgekv.engine.model import Model
from edgekv.errors import CheckpointError, ConfigError, EdgeKVError
from edgekv.weights.checkpoint_weights import CheckpointWeights, common_format, holds_exactly
from edgekv.weights.formats import FORMATS


@pytest.mark.parametrize("name", CASES)
def test_unpacks_what_the_library_unpacks(name: str, tmp_path: pathlib.Path) -> None:
    """Checks blocks of a weight format too, where one has the same values."""
    expected, (config, kind, exact) = PACKED[f"{name}/values"], CASES[name]
    tensors = unpack_tensors(Tensors.open(save(tmp_path, library_tensors(name)) / "model.safetensors"), config)
    weight = tensors["m.weight"]
    assert (list(tensors), weight.shape, weight.kind) == (["m.weight"], expected.shape, kind)
    assert (weight.exact_format, weight.nearest_format) == (exact, exact or "int8-32")
    for lo, hi in ((0, len(expected)), (3, 8), (11, 12)):
        np.testing.assert_allclose(weight.rows(lo, hi), expected[lo:hi], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(weight.read(), weight.rows(0, 12).astype("f2"))
    if exact is None:
        with pytest.raises(CheckpointError, match="no blocks"):
            weight.blocks(0, 12)
        return
    codes, scales, zeros = weight.blocks(0, 12)
    assert (codes.shape[2], zeros is not None) == (FORMATS[exact].block, exact.endswith("zeros"))
    whole = codes.astype(int) + (0 if zeros is None else zeros[..., None])
    assert np.abs(whole + 0.5).max() < 2 ** (FORMATS[exact].bits - 1)
    np.testing.assert_array_equal((codes * scales[..., None]).reshape(12, -1), weight.rows(0, 12))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_its_values(name: str, tmp_path: pathlib.Path) -> None:
    folders = write(name, tmp_path)
    tokens, (_, _, form, lossless) = golden_cases.tokens("llama1"), MODELS[name]
    logits = [Session.load(f, kv="dense:dtype=f32", weights="f32").logits(tokens) for f in folders]
    np.testing.assert_allclose(*logits, atol=2e-5, rtol=0)
    packed, plain = (Model.open(folder) for folder in folders)
    assert isinstance(packed.weights, CheckpointWeights)
    own = packed.weight_format("auto")
    assert own.name == MODELS[name][0]["quantization_config"]["quant_method"]
    assert {own.of(linear).name for linear in packed.arch.linears()} == {form, "int8-32"}
    assert own.of("head").name == "int8-32"
    note = packed.weights_note(own)
    assert (note is None) == lossless, note
    store = packed.store(own)
    assert store.form.name == own.name
    for linear in packed.arch.linears():
        expected = plain.weights.matrix(linear)
        step = 0 if lossless and linear != "head" else np.abs(expected).max() / 127
        np.testing.assert_allclose(store.matrix(linear), expected, atol=step + 1e-7, rtol=1e-6)


def test_a_format_for_parts_of_several() -> None:
    """It has all exactly, or can be quantized to; kept blocks become int8-32 where f32 is not needed anyway."""
    for names, expected in (
        ("int4-32 fp4-32", "int8-32"),
        ("int4 int4-zeros int4-32", "int4-32-zeros"),
        ("int8 int4-32", "int8-32"),
        ("int8-32 int4-32-offsets", "int8-32"),
        ("int4-32 int4-32-offsets", "int4-32-offsets"),
        ("Q6_K Q2_K", "int8-32"),
        ("Q6_K f32", "f32"),
        ("fp4-32", "fp4-32"),
    ):
        assert common_format(set(names.split())) == expected
    for pair in itertools.combinations([n for n, form in FORMATS.items() if not form.kept], 2):
        form = FORMATS[common_format(pair)]
        assert form.name == "int8-32" or all(holds_exactly(name, form) for name in pair)


@pytest.mark.parametrize("name", ["gptq-v2-asymmetric", "awq"])
def test_zero_points_on_every_path(name: str, device: OnDevice, tmp_path: pathlib.Path) -> None:
    require_same_logits(Model.open(write(name, tmp_path)[0]), golden_cases.tokens("llama1")[:41], device)


def test_methods_that_can_not_be_read(tmp_path: pathlib.Path) -> None:
    folder = write("gptq-128", tmp_path)[0]
    for change, part in (
        ({"quant_method": "hqq"}, "quant_method is 'hqq'; accepted: gptq, awq"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'; accepted for awq: gemm"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3; accepted for gptq: 4, 8"),
    ):
        (folder / "config.json").write_text(json.dumps(BASE | {"quantization_config": change}))
        with raises(ConfigError, part):
            Model.open(folder)


@pytest.mark.parametrize("name", [*CASES, *MODELS])
def test_damaged_parts_are_refused(name: str, tmp_path: pathlib.Path) -> None:
    """Each part in other shapes and types, or absent, ends in an error of one line or in a matrix."""
    if name in CASES:
        config, whole = CASES[name][0], library_tensors(name)
    else:
        config, layout, _, _ = MODELS[name]
        parts = layout(np.ones((16, 128), np.float32), np.random.default_rng(0))[0]
        whole = {f"m.{key}": part for key, part in parts.items()}
    messages = []
    for part, array in whole.items():
        flat, odd = array.reshape(-1)[:0], array * 0 + 77
        changes = [None, array[..., :-1], flat, array.astype(np.float64), array[None], odd]
        for i, change in enumerate(changes):
            tensors = {k: v for k, v in whole.items() if k != part}
            if change is not None:
                tensors[part] = change
            try:
                file = save(tmp_path / f"{part}-{i}", tensors) / "model.safetensors"
                held = unpack_tensors(Tensors.open(file), config)
                for tensor in held.values():
                    if tensor.kind:
                        tensor.rows(0, tensor.shape[0])
            except EdgeKVError as error:
                messages.append(str(error))
    assert messages
    assert not any("\n" in message for message in messages)
