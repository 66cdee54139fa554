"""Published quantized checkpoints: what libraries packed, and whole models in GPTQ's, AWQ's and FP8's layouts."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import golden_cases
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import raw_file
from safetensors.numpy import save_file

from edgekv import Session
from edgekv.checkpoint.packed.methods import unpacked
from edgekv.checkpoint.tensors import TensorFile, TensorSet
from edgekv.errors import CheckpointError, ConfigError, EdgeKVError
from edgekv.linear.weights import CheckpointWeights
from edgekv.session.model import Model

PACKED = np.load(pathlib.Path(__file__).parent / "golden" / "packed.npz")
COMPRESSED = {"quantization_config": {"quant_method": "compressed-tensors"}}
BNB = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
CASES: dict[str, tuple[dict[str, Any], str, str | None]] = {  # config, kind, exact format
    "w4a16": (COMPRESSED, "compressed-tensors 4-bit", "int4"),
    "w4a16-asymmetric": (COMPRESSED, "compressed-tensors 4-bit", "int8-32"),
    "w8a16": (COMPRESSED, "compressed-tensors 8-bit", "int8"),
    "int8": (COMPRESSED, "compressed-tensors 8-bit", "int8"),
    "w8a16-float": (COMPRESSED, "FP8", None),
    "nf4": (BNB, "bitsandbytes nf4", None),
    "nf4-nested": (BNB, "bitsandbytes nf4", None),
    "fp4": (BNB, "bitsandbytes fp4", None),
    "mlx-4": ({"quantization": {"group_size": 64, "bits": 4}}, "MLX 4-bit", None),
    "mlx-8": ({"quantization": {"bits": 4, "m": {"group_size": 32, "bits": 8}}}, "MLX 8-bit", None),
}
F8 = np.dtype(ml_dtypes.float8_e4m3fn)


def save(
    folder: pathlib.Path, tensors: dict[str, np.ndarray], config: dict[str, Any] | None = None
) -> pathlib.Path:
    """A .safetensors file in which matrices of F8 are FP8, and config.json beside it."""
    folder.mkdir(exist_ok=True)
    file = folder / "model.safetensors"
    if any(array.dtype == F8 for array in tensors.values()):
        entries, data, start = {}, b"", 0
        for name, array in tensors.items():
            kind = {"<f4": "F32", "<f8": "F64"}.get(array.dtype.str, "F8_E4M3")
            entries[name] = {
                "dtype": kind,
                "shape": list(array.shape),
                "data_offsets": [start, start + array.nbytes],
            }
            data, start = data + array.tobytes(), start + array.nbytes
        raw_file(file, entries, data)
    else:
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_library(name: str, folder: pathlib.Path) -> TensorSet:
    start = f"{name}/tensors/"
    tensors = {f"m.{key.removeprefix(start)}": PACKED[key] for key in PACKED.files if key.startswith(start)}
    if name == "w8a16-float":
        tensors["m.weight"] = tensors["m.weight"].view(F8)
    file = save(folder, tensors) / "model.safetensors"
    return unpacked(TensorSet([TensorFile(file)]), CASES[name][0])


@pytest.mark.parametrize("name", CASES)
def test_unpacks_what_the_library_unpacks(name: str, tmp_path: pathlib.Path) -> None:
    tensors, expected = of_library(name, tmp_path), PACKED[f"{name}/values"]
    assert tensors.names() == ["m.weight"]
    assert tensors.info("m.weight").shape == expected.shape
    assert tensors.quantized("m.weight") == CASES[name][1]
    for lo, hi in ((0, len(expected)), (3, 8), (11, 12)):
        rows = tensors.outputs("m.weight", lo, hi, False)
        np.testing.assert_allclose(rows, expected[lo:hi], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(
        tensors.array("m.weight"), tensors.outputs("m.weight", 0, 12, False).astype("f2")
    )


@pytest.mark.parametrize("name", CASES)
def test_blocks_hold_the_same_values(name: str, tmp_path: pathlib.Path) -> None:
    tensors, exact = of_library(name, tmp_path), CASES[name][2]
    assert tensors.forms("m.weight") == (exact, exact or "int8-32")
    if exact is None:
        with pytest.raises(CheckpointError, match="no blocks"):
            tensors.blocks("m.weight", 0, 12)
        return
    codes, scales = tensors.blocks("m.weight", 0, 12)
    assert codes.shape[2] == (32 if exact.endswith("-32") else 128)
    assert np.abs(codes.astype(int)).max() <= (8 if exact.startswith("int4") else 128)
    values = (codes * scales[..., None]).reshape(12, -1)
    np.testing.assert_array_equal(values, tensors.outputs("m.weight", 0, 12, False))


BASE = golden_cases.LLAMA | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Layout = Callable[[np.ndarray, np.random.Generator], tuple[dict[str, np.ndarray], np.ndarray]]


def groups(w: np.ndarray, size: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """4-bit numbers (rows, columns), and zero points and float16 scales (rows, groups), by rounding."""
    parts = w.reshape(len(w), -1, size)
    lo, hi = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
    scale = (np.abs(parts).max(-1) / 7 if symmetric else (hi - lo) / 15).astype(np.float16)
    zero = np.full(scale.shape, 8) if symmetric else np.clip(np.rint(-lo / scale), 1, 15).astype(int)
    codes = np.clip(np.rint(parts / scale[..., None]) + zero[..., None], 0, 15).astype(np.uint32)
    return codes.reshape(w.shape), zero.astype(np.uint32), scale


def packed_rows(numbers: np.ndarray) -> np.ndarray:
    """AutoGPTQ's loop: 8 rows to one of words."""
    words = np.zeros((len(numbers) // 8, numbers.shape[1]), np.uint32)
    for i in range(len(numbers)):
        words[i // 8] |= numbers[i] << np.uint32(4 * (i % 8))
    return words.view(np.int32)


def packed_columns(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """AutoAWQ's loop: 8 columns to a word, in this order."""
    words = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
    for column in range(words.shape[1]):
        for i, k in enumerate(order):
            words[:, column] |= numbers[:, 8 * column + k] << np.uint32(4 * i)
    return words.view(np.int32)


def gptq(size: int, symmetric: bool = True, version: int = 1, act_order: bool = False) -> Layout:
    def layout(w: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        order = rng.permutation(w.shape[1]) if act_order else np.arange(w.shape[1])
        codes, zero, scale = groups(w[:, order], size, symmetric)
        values = (codes.astype(int) - np.repeat(zero, size, 1).astype(int)) * np.repeat(scale, size, 1).astype(
            "f4"
        )
        back, group_of = np.argsort(order), np.empty(w.shape[1], np.int32)
        group_of[order] = np.arange(w.shape[1]) // size
        tensors = {
            "qweight": packed_rows(codes[:, back].T),
            "qzeros": packed_columns(zero.T - np.uint32(version == 1)),
            "scales": scale.T,
            "g_idx": group_of,
        }
        return tensors, values[:, back].astype(np.float32)

    return layout


def awq(w: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    codes, zero, scale = groups(w, 128, False)
    values = (codes.astype(int) - np.repeat(zero, 128, 1).astype(int)) * np.repeat(scale, 128, 1).astype("f4")
    tensors = {
        "qweight": packed_columns(codes.T, AWQ_ORDER),
        "qzeros": packed_columns(zero.T, AWQ_ORDER),
        "scales": scale.T,
    }
    return tensors, values.astype(np.float32)


def fp8(w: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """transformers' fine-grained FP8: a factor per block of 128 x 128."""
    scale = np.zeros((-(-len(w) // 128), -(-w.shape[1] // 128)), np.float32)
    for i, j in np.ndindex(scale.shape):
        scale[i, j] = np.abs(w[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]).max() / 448
    whole = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: len(w), : w.shape[1]]
    codes = (w / whole).astype(F8)
    return {"weight": codes, "weight_scale_inv": scale}, codes.astype(np.float32) * whole


def of(method: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, "bits": 4, **more}}


MODELS: dict[str, tuple[dict[str, Any], Layout, str, bool]] = {  # config, layout, format of a layer, without loss
    "gptq-128": (of("gptq", group_size=128), gptq(128), "int4", True),
    "gptq-32": (of("gptq", group_size=32), gptq(32), "int4-32", True),
    "gptq-v2-asymmetric": (
        of("gptq", group_size=64, checkpoint_format="gptq_v2"),
        gptq(64, symmetric=False, version=2),
        "int8-32",
        True,
    ),
    "gptq-act-order": (of("gptq", group_size=32, desc_act=True), gptq(32, act_order=True), "int8-32", False),
    "awq": (of("awq", version="GEMM"), awq, "int8", True),
    "fp8": (of("fp8", weight_block_size=[128, 128]), fp8, "int8-32", False),
}


def write(name: str, folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A model packed, and the same with the values that it stands for."""
    config, layout, _, _ = MODELS[name]
    rng = np.random.default_rng(3)
    packed: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    from edgekv.models import architecture

    for tensor, shape in architecture(BASE).tensors().items():
        w = (0.15 * rng.standard_normal(shape)).astype(np.float32) + (len(shape) == 1)
        if "proj" in tensor:
            parts, w = layout(w, rng)
            packed |= {f"{tensor.removesuffix('weight')}{end}": part for end, part in parts.items()}
            packed[f"{tensor.removesuffix('weight')}input_scale"] = np.ones(1, np.float32)
        else:
            packed[tensor] = w
        plain[tensor] = w
    return save(folder / "packed", packed, BASE | config), save(folder / "plain", plain, BASE)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_its_values(name: str, tmp_path: pathlib.Path) -> None:
    folders = write(name, tmp_path)
    tokens, (_, _, form, lossless) = golden_cases.tokens("llama1"), MODELS[name]
    logits = [Session.load(f, kv="dense:dtype=f32", weights="f32").logits(tokens) for f in folders]
    np.testing.assert_allclose(*logits, atol=2e-5, rtol=0)
    packed, plain = (Model.open(folder) for folder in folders)
    assert isinstance(packed.weights, CheckpointWeights)
    own = packed.weight_format("auto")
    assert {own.of(linear).name for linear in packed.arch.linears()} == {form, "int8-32"}
    assert own.of("head").name == "int8-32"
    note = packed.weights_note(own)
    assert (note is None) == lossless, note
    store = packed.store(own)
    for linear in packed.arch.linears():
        expected = plain.weights.matrix(linear)
        step = 0 if lossless and linear != "head" else np.abs(expected).max() / 127
        np.testing.assert_allclose(store.matrix(linear), expected, atol=step + 1e-7, rtol=1e-6)


def test_int4_blocks_can_be_asked_for_in_8_bits(tmp_path: pathlib.Path) -> None:
    """Larger formats take the same blocks; a smaller one loses, and says so."""
    model = Model.open(write("gptq-128", tmp_path)[0])
    for wanted, loses in (
        ("int4", False),
        ("int4-32", False),
        ("int8", False),
        ("int8-32", False),
        ("f32", False),
    ):
        assert (model.weights_note(model.weight_format(wanted)) is not None) == loses
    other = Model.open(write("awq", tmp_path / "other")[0]) if (tmp_path / "other").mkdir() is None else model
    assert "AWQ 4-bit were quantized a second time" in str(other.weights_note(other.weight_format("int4")))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"quant_method": "hqq"}, "quant_method is 'hqq'; accepted: gptq, awq"),
        ({"quant_method": []}, "quant_method is []"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'; accepted for awq: gemm"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3; accepted for gptq: 4, 8"),
        ({"quant_method": "gptq", "bits": "4"}, "bits is '4'; accepted: int"),
    ],
)
def test_methods_that_can_not_be_read(change: dict[str, Any], part: str, tmp_path: pathlib.Path) -> None:
    folder = write("gptq-128", tmp_path)[0]
    (folder / "config.json").write_text(json.dumps(BASE | {"quantization_config": change}))
    with pytest.raises(ConfigError) as error:
        Model.open(folder)
    assert part in str(error.value)


@pytest.mark.parametrize("name", [*CASES, *MODELS])
def test_damaged_parts_are_refused(name: str, tmp_path: pathlib.Path) -> None:
    """Each part in other shapes and types, or absent: an error in one line, or a matrix."""
    if name in CASES:
        start = f"{name}/tensors/"
        whole = {f"m.{key.removeprefix(start)}": PACKED[key] for key in PACKED.files if key.startswith(start)}
        config = CASES[name][0]
        if name == "w8a16-float":
            whole["m.weight"] = whole["m.weight"].view(F8)
    else:
        config, layout, _, _ = MODELS[name]
        whole = {
            f"m.{k}": v for k, v in layout(np.ones((16, 128), np.float32), np.random.default_rng(0))[0].items()
        }
    messages = []
    for part, array in whole.items():
        changes = [
            None,
            array[..., :-1],
            array.reshape(-1)[:0],
            array.astype(np.float64),
            array[None],
            array * 0 + 77,
        ]
        for i, change in enumerate(changes):
            tensors = {k: v for k, v in whole.items() if k != part}
            if change is not None:
                tensors[part] = change
            try:
                file = save(tmp_path / f"{part}-{i}", tensors) / "model.safetensors"
                held = unpacked(TensorSet([TensorFile(file)]), config)
                for tensor in held.names():
                    if held.quantized(tensor):
                        held.outputs(tensor, 0, held.info(tensor).shape[0], False)
            except EdgeKVError as error:
                messages.append(str(error))
    assert messages
    assert not any("\n" in message for message in messages)
