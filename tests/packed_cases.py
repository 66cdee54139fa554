"""Small models in the layouts of published quantized checkpoints, packed by AutoGPTQ's and AutoAWQ's loops."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import golden_cases
import ml_dtypes
import numpy as np
from checkpoint_files import raw_file
from safetensors.numpy import load_file, save_file

from edgekv.models import architecture

F8 = np.dtype(ml_dtypes.float8_e4m3fn)


def save(
    folder: pathlib.Path, tensors: dict[str, np.ndarray], config: dict[str, Any] | None = None
) -> pathlib.Path:
    """Writes a .safetensors file in which matrices of F8 are FP8, and config.json beside it."""
    folder.mkdir(exist_ok=True, parents=True)
    file = folder / "model.safetensors"
    if any(array.dtype == F8 for array in tensors.values()):
        entries, data, start = {}, b"", 0
        for name, array in tensors.items():
            kind = {"<f4": "F32", "<f8": "F64"}.get(array.dtype.str, "F8_E4M3")
            entries[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [start, start + array.nbytes]}
            data, start = data + array.tobytes(), start + array.nbytes
        raw_file(file, entries, data)
    else:
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


BASE = golden_cases.LLAMA | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Layout = Callable[[np.ndarray, np.random.Generator], tuple[dict[str, np.ndarray], np.ndarray]]


def groups(w: np.ndarray, size: int, symmetric: bool, bits: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns numbers (rows, columns), and zero points and float16 scales (rows, groups), by rounding."""
    parts, half, top = w.reshape(len(w), -1, size), 1 << (bits - 1), (1 << bits) - 1
    lo, hi = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
    scale = (np.abs(parts).max(-1) / (half - 1) if symmetric else (hi - lo) / top).astype(np.float16)
    zero = np.full(scale.shape, half) if symmetric else np.clip(np.rint(-lo / scale), 1, top).astype(int)
    codes = np.clip(np.rint(parts / scale[..., None]) + zero[..., None], 0, top).astype(np.uint32)
    return codes.reshape(w.shape), zero.astype(np.uint32), scale


def packed_rows(numbers: np.ndarray, bits: int = 4) -> np.ndarray:
    """Packs 32 / bits rows to one of words, by AutoGPTQ's loop."""
    n = 32 // bits
    words = np.zeros((len(numbers) // n, numbers.shape[1]), np.uint32)
    for i in range(len(numbers)):
        words[i // n] |= numbers[i] << np.uint32(bits * (i % n))
    return words.view(np.int32)


def packed_columns(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Packs 8 columns to a word in this order, or 4 of 8 bits, by AutoAWQ's loop."""
    n = len(order)
    words = np.zeros((len(numbers), numbers.shape[1] // n), np.uint32)
    for column in range(words.shape[1]):
        for i, k in enumerate(order):
            words[:, column] |= numbers[:, n * column + k] << np.uint32(32 // n * i)
    return words.view(np.int32)


def gptq(size: int, symmetric: bool = True, version: int = 1, act_order: bool = False, bits: int = 4) -> Layout:
    def layout(w: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        order = rng.permutation(w.shape[1]) if act_order else np.arange(w.shape[1])
        codes, zero, scale = groups(w[:, order], size, symmetric, bits)
        steps = np.repeat(scale, size, 1).astype(np.float32)
        values = (codes.astype(int) - np.repeat(zero, size, 1).astype(int)) * steps
        back, group_of = np.argsort(order), np.empty(w.shape[1], np.int32)
        group_of[order] = np.arange(w.shape[1]) // size
        tensors = {
            "qweight": packed_rows(codes[:, back].T, bits),
            "qzeros": packed_columns(zero.T - np.uint32(version == 1), tuple(range(32 // bits))),
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
    """Rounds to transformers' fine-grained FP8, a factor per block of 128 x 128."""
    scale = np.zeros((-(-len(w) // 128), -(-w.shape[1] // 128)), np.float32)
    for i, j in np.ndindex(scale.shape):
        scale[i, j] = np.abs(w[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]).max() / 448
    whole = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: len(w), : w.shape[1]]
    codes = (w / whole).astype(F8)
    return {"weight": codes, "weight_scale_inv": scale}, codes.astype(np.float32) * whole


def of(method: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, "bits": 4} | more}


MODELS: dict[str, tuple[dict[str, Any], Layout, str, bool]] = {  # config, layout, format of a layer, without loss
    "gptq-128": (of("gptq", group_size=128), gptq(128), "int4", True),
    "gptq-32": (of("gptq", group_size=32), gptq(32), "int4-32", True),
    "gptq-v2-asymmetric": (
        of("gptq", group_size=64, checkpoint_format="gptq_v2"),
        gptq(64, symmetric=False, version=2),
        "int4-32-zeros",
        True,
    ),
    "gptq-8": (of("gptq", bits=8, group_size=-1), gptq(128, bits=8), "int8", True),
    "gptq-act-order": (of("gptq", group_size=32, desc_act=True), gptq(32, act_order=True), "int8-32", False),
    "awq": (of("awq", version="GEMM"), awq, "int4-zeros", True),
    "fp8": (of("fp8", weight_block_size=[128, 128]), fp8, "int8-32", False),
}


def write(name: str, folder: pathlib.Path, base: dict[str, Any] = BASE) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes a packed model, and the same model with the values that it stands for."""
    config, layout, _, _ = MODELS[name]
    rng = np.random.default_rng(3)
    packed: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for tensor, shape in architecture(base).tensors().items():
        w = (0.15 * rng.standard_normal(shape)).astype(np.float32) + (len(shape) == 1)
        if "proj" in tensor:
            parts, w = layout(w, rng)
            packed |= {f"{tensor.removesuffix('weight')}{end}": part for end, part in parts.items()}
            packed[f"{tensor.removesuffix('weight')}input_scale"] = np.ones(1, np.float32)
        else:
            packed[tensor] = w
        plain[tensor] = w
    return save(folder / "packed", packed, base | config), save(folder / "plain", plain, base)


PACKED = np.load(pathlib.Path(__file__).parent / "golden" / "packed.npz")
COMPRESSED = {"quantization_config": {"quant_method": "compressed-tensors"}}
LIBRARIES: dict[str, tuple[dict[str, Any], str, str | None]] = {  # config, kind, exact format
    "w4a16": (COMPRESSED, "compressed-tensors 4-bit", "int4"),
    "w4a16-asymmetric": (COMPRESSED, "compressed-tensors 4-bit", "int4-32-zeros"),
    "w8a16": (COMPRESSED, "compressed-tensors 8-bit", "int8"),
    "int8": (COMPRESSED, "compressed-tensors 8-bit", "int8"),
    "w8a16-float": (COMPRESSED, "FP8", None),
}


def library_tensors(name: str) -> dict[str, np.ndarray]:
    """Returns what one of LIBRARIES made of a matrix "m", by the parts' names."""
    start = f"{name}/tensors/"
    parts = {f"m.{key.removeprefix(start)}": PACKED[key] for key in PACKED.files if key.startswith(start)}
    return parts | ({"m.weight": parts["m.weight"].view(F8)} if name == "w8a16-float" else {})


def write_mxfp4(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes GPT-OSS as published, and with its values in float32, which ml_dtypes computes."""
    config = golden_cases.GPT_OSS | {"hidden_size": 64, "intermediate_size": 96}
    golden_cases.CASES["mxfp4"] = config
    try:
        plain = golden_cases.write_checkpoint("mxfp4", folder / "plain")
    finally:
        del golden_cases.CASES["mxfp4"]
    arrays, packed, rng = load_file(plain / "model.safetensors"), {}, np.random.default_rng(0)
    for name in [name for name in arrays if name.endswith(("gate_up_proj", "down_proj"))]:
        n_experts, inputs, outputs = arrays[name].shape
        codes = rng.integers(0, 16, (n_experts, outputs, inputs // 32, 32), np.uint8)
        exponents = rng.integers(121, 127, codes.shape[:3], np.uint8)
        packed[f"{name}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        packed[f"{name}_scales"] = exponents
        scales = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * scales[..., None] * np.float32(0.25)
        arrays[name] = np.ascontiguousarray(values.reshape(n_experts, outputs, inputs).transpose(0, 2, 1))
        packed[f"{name}_scales"] -= 2
    rest = {name: array for name, array in arrays.items() if f"{name}_blocks" not in packed}
    save_file(arrays, plain / "model.safetensors")
    (folder / "packed").mkdir()
    save_file(packed | rest, folder / "packed" / "model.safetensors")
    more = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (folder / "packed" / "config.json").write_text(json.dumps(config | more))
    return folder / "packed", plain
