"""Write a copy of a Llama checkpoint whose keys have a large bias, as Qwen2's do: a known killer of few-bit keys.

    python tools/key_bias.py --model models/demo --out BIASED --times 30
    edgekv eval --gate --model BIASED --text BOOK.txt

The copy is a Qwen2 checkpoint with q, k and v biases. Those of q and v are 0. That of k has, in every layer and KV
head, ``times`` the norm of a typical key in each channel of the ``--pairs`` slowest rotary pairs, at random signs.
These turn so little within a context that the bias adds nearly the same to every score of a query: the model stays
usable, while its keys are hardly anything but the bias. A typical key's norm is that for inputs of unit variance.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from edgekv.checkpoint.source import TOKENIZER_FILES, open_source
from edgekv.checkpoint.tensors import to_float32
from edgekv.models import architecture

F32 = npt.NDArray[np.float32]


def key_bias(weight: F32, norm: F32, head_dim: int, times: float, pairs: int, rng: np.random.Generator) -> F32:
    """(n_kv_heads * head_dim,) for k_proj's weight (as many, hidden) behind an RMS norm (hidden,)."""
    rows = (weight * norm).reshape(-1, head_dim, weight.shape[1])
    typical = np.sqrt((rows**2).sum((1, 2)))  # (n_kv_heads,)
    half = head_dim // 2
    slow = np.r_[half - pairs : half, head_dim - pairs : head_dim]
    bias = np.zeros(rows.shape[:2], np.float32)
    bias[:, slow] = times * typical[:, None] * rng.choice([-1, 1], (len(rows), len(slow)))
    return bias.reshape(-1)


def write_biased(model: pathlib.Path, out: pathlib.Path, times: float, pairs: int = 1) -> pathlib.Path:
    """The checkpoint folder ``out``: float32, with config.json and what there is of a tokenizer."""
    source = open_source(model)
    arch = architecture(source.config, source.tensors)
    c, rng = arch.config, np.random.default_rng(0)
    if c.model_type != "llama" or c.qkv_bias:
        raise SystemExit(f"{model} is a {c.model_type} checkpoint; give a llama without biases")
    tensors: dict[str, Any] = {name: to_float32(source.tensors.array(name)) for name in arch.tensors()}
    for i in range(c.n_layers):
        base = f"{arch.prefix}layers.{i}."
        weight, norm = tensors[f"{base}self_attn.k_proj.weight"], tensors[f"{base}input_layernorm.weight"]
        tensors[f"{base}self_attn.k_proj.bias"] = key_bias(weight, norm, c.head_dim, times, pairs, rng)
        tensors[f"{base}self_attn.q_proj.bias"] = np.zeros(c.q_size, np.float32)
        tensors[f"{base}self_attn.v_proj.bias"] = np.zeros(c.kv_size, np.float32)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {**source.config, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in (*TOKENIZER_FILES, "merges.txt", "tokenizer_config.json"):
        if (model / name).is_file():
            shutil.copy(model / name, out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default="models/demo", help="a Llama folder")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder to write")
    parser.add_argument("--times", type=float, default=30, help="typical key norms per channel (default: 30)")
    parser.add_argument("--pairs", type=int, default=1, help="of rotary channels, the slowest (default: 1)")
    args = parser.parse_args()
    write_biased(args.model, args.out, args.times, args.pairs)


if __name__ == "__main__":
    main()
