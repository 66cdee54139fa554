"""A small GPT-OSS whose experts are packed as it is published."""

from __future__ import annotations

import json
import pathlib

import golden_cases
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file


def write_mxfp4(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """GPT-OSS as published, and with the values in float32; ml_dtypes says what codes and exponents stand for."""
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
