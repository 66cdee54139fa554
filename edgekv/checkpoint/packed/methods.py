"""How published checkpoints pack their weights, by the method that config.json names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from edgekv.checkpoint.packed.bitsandbytes import bitsandbytes
from edgekv.checkpoint.packed.compressed import compressed
from edgekv.checkpoint.packed.float8 import float8
from edgekv.checkpoint.packed.gptq import awq, gptq
from edgekv.checkpoint.packed.mlx import mlx
from edgekv.checkpoint.packed.mxfp4 import mxfp4
from edgekv.checkpoint.packed.parts import Parts, Quantization, settings_of
from edgekv.checkpoint.packed.tensors import Packed, PackedTensors
from edgekv.checkpoint.stacked import StackedTensors
from edgekv.checkpoint.tensor_set import TensorSet
from edgekv.errors import ConfigError
from edgekv.schema import shown

METHODS: dict[str, Callable[[Parts, Quantization], dict[str, Packed]]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "fp8": float8,
    "fbgemm_fp8": float8,
    "bitsandbytes": bitsandbytes,
    "mxfp4": mxfp4,
}
STACKED_TYPE = "gpt_oss"  # model_type of checkpoints with stacked experts
PLAIN = "int8-32"  # of what such a checkpoint leaves unpacked, mostly the language-model head
IGNORED = re.compile(r"\.(input_scale|activation_scale|input_scale_ub|k_scale|v_scale)$")


def unpacked(tensors: TensorSet, config: Mapping[str, Any]) -> TensorSet:
    """The checkpoint's tensors as the plain ones that they stand for, packed as its config says.

    Raises ConfigError for a method that can't be read, CheckpointError for tensors that do not fit it.
    """
    method = packing(config)
    if config.get("model_type") == STACKED_TYPE:
        tensors = TensorSet([StackedTensors(tensors)])
    if method is None:
        return tensors
    parts = Parts(tensors)
    if method == "mlx":
        ours = config["quantization"]
        packed = mlx(parts, settings_of(ours, "quantization"), ours)
    else:
        packed = METHODS[method](parts, settings_of(config["quantization_config"], "quantization_config"))
    held = PackedTensors(tensors, packed, method, PLAIN)
    held.hide(IGNORED)
    return TensorSet([held])


def packing(config: Mapping[str, Any]) -> str | None:
    """A name of METHODS, or mlx; None: plain weights. Raises ConfigError for a method that can't be read."""
    raw, ours = config.get("quantization_config"), config.get("quantization")
    method = raw.get("quant_method") if isinstance(raw, dict) else None
    if raw is None and ours is None:
        return None
    if method is None and isinstance(ours, dict):
        return "mlx"
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(
            f"config.json: quantization_config: quant_method is {shown(method)}; accepted: {', '.join(METHODS)}, "
            "and mlx's quantization"
        )
    return method
