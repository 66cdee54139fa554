"""Small random LoRAs of models of tests/golden_cases.py, in PEFT's files.

tools/golden/logits.py merges them with PEFT itself and writes tests/golden/lora.npz.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import zlib
from typing import Any

import golden_cases
import numpy as np
from safetensors.numpy import save_file

from edgekv.models import architecture

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class LoraCase:
    """A LoRA: its model of golden_cases, ends of the changed modules' names, and the adapter_config.json."""

    model: str
    modules: tuple[str, ...]
    config: dict[str, Any]
    scale: float = 1.0

    def rank(self, module: str) -> int:
        ranks = (r for key, r in self.config.get("rank_pattern", {}).items() if module.endswith(key.strip("^")))
        return int(next(ranks, self.config["r"]))


RANKS = {"k_proj": 2, "^model.layers.1.self_attn.q_proj": 3}
PATTERNS = {"rank_pattern": RANKS, "alpha_pattern": {"layers.0.mlp.up_proj": 12, "o_proj": 3}}
SCALED = {"r": 4, "lora_alpha": 6, "use_rslora": True} | PATTERNS
CASES = {
    "llama": LoraCase("llama31", ALL, {"r": 4, "lora_alpha": 8}),
    "llama-patterns": LoraCase("llama2-gqa", (*ALL, "lm_head"), SCALED, scale=0.5),
    "gpt2": LoraCase(
        "gpt2", ("c_attn", "mlp.c_fc", "mlp.c_proj"), {"r": 3, "lora_alpha": 6, "fan_in_fan_out": True}
    ),
    "phi3": LoraCase("phi3", ("qkv_proj", "o_proj", "gate_up_proj"), {"r": 4, "lora_alpha": 8}),
}


def tensors(name: str) -> dict[str, np.ndarray]:
    """Returns A and B of every changed module, in PEFT's names, float32."""
    case, found = CASES[name], {}
    linears = architecture(golden_cases.CASES[case.model]).linears().values()
    for part in (part for linear in linears for part in linear.parts):
        module = part.tensor.removesuffix(".weight")
        if not module.endswith(case.modules):
            continue
        rank = case.rank(module)
        for half, shape in (("A", (rank, part.columns)), ("B", (part.rows, rank))):
            rng = np.random.default_rng(zlib.crc32(f"{name}/{module}/{half}".encode()))
            values = rng.standard_normal(shape).astype(np.float32)
            found[f"base_model.model.{module}.lora_{half}.weight"] = values * np.float32(0.15)
    return found


def write(name: str, folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Writes the case as a folder of PEFT. changes: other fields of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "target_modules": list(CASES[name].modules)}
    config |= {"base_model_name_or_path": "base", "bias": "none", "modules_to_save": None}
    (folder / "adapter_config.json").write_text(json.dumps(config | CASES[name].config | changes))
    save_file(tensors(name), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
