"""GGUF's metadata and tensor names as those of the Hugging Face checkpoint that they were made from.

Sources: llama.cpp's gguf-py/gguf/constants.py and conversion/.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from edgekv.errors import ConfigError

Metadata = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]  # GGUF tensor name -> shape, rows first

ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's scaling, as a divisor of each frequency


@dataclasses.dataclass(frozen=True)
class Family:
    """How one architecture is written.

    names: GGUF tensor, without its ending, to ours; ``{i}`` is the layer. keys: entry of config.json to metadata
    key behind the architecture's name. interleaved: rows of the query and key projections are ordered for
    rotations of neighbouring channels. conv1d: projections that the checkpoint stores transposed.
    """

    model_type: str
    names: Mapping[str, str]
    keys: Mapping[str, str]
    interleaved: tuple[str, ...] = ()
    conv1d: tuple[str, ...] = ()


LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj",
    "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj",
    "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj",
    "blk.{i}.attn_q_norm": "model.layers.{i}.self_attn.q_norm",
    "blk.{i}.attn_k_norm": "model.layers.{i}.self_attn.k_norm",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
}
LLAMA_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}
GPT2_NAMES = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "output": "lm_head",
    "blk.{i}.attn_norm": "h.{i}.ln_1",
    "blk.{i}.attn_qkv": "h.{i}.attn.c_attn",
    "blk.{i}.attn_output": "h.{i}.attn.c_proj",
    "blk.{i}.ffn_norm": "h.{i}.ln_2",
    "blk.{i}.ffn_up": "h.{i}.mlp.c_fc",
    "blk.{i}.ffn_down": "h.{i}.mlp.c_proj",
}
GPT2_KEYS = {
    "n_embd": "embedding_length",
    "n_inner": "feed_forward_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
FAMILIES: dict[str, Family] = {
    "llama": Family("llama", LLAMA_NAMES, LLAMA_KEYS, interleaved=("attn_q", "attn_k")),
    "qwen2": Family("qwen2", LLAMA_NAMES, LLAMA_KEYS),
    "qwen3": Family("qwen3", LLAMA_NAMES, LLAMA_KEYS),
    "gpt2": Family("gpt2", GPT2_NAMES, GPT2_KEYS, conv1d=("attn_qkv", "attn_output", "ffn_up", "ffn_down")),
}


def find_family(metadata: Metadata) -> Family:
    """Raises ConfigError for an architecture that is not among FAMILIES."""
    name = metadata.get("general.architecture")
    if name not in FAMILIES:
        raise ConfigError(f"GGUF architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    if metadata.get(f"{name}.expert_count"):
        raise ConfigError("GGUF files with experts are not supported; give the model's safetensors checkpoint")
    return FAMILIES[name]


def checkpoint_name(family: Family, name: str) -> str:
    """The checkpoint's name of a GGUF tensor; an unknown one keeps its own."""
    layer = re.match(r"blk\.(\d+)\.", name)
    base, dot, end = name.rpartition(".")
    pattern = base.replace(layer[0], "blk.{i}.") if layer else base
    if pattern not in family.names:
        return name
    return family.names[pattern].format(i=layer[1] if layer else "") + dot + end


def make_config(metadata: Metadata, shapes: Shapes, rope_factors: list[float] | None) -> dict[str, Any]:
    """config.json of the model. Raises ConfigError where the metadata lack something."""
    family, architecture = find_family(metadata), metadata["general.architecture"]
    values = {
        entry: metadata[f"{architecture}.{key}"]
        for entry, key in family.keys.items()
        if f"{architecture}.{key}" in metadata
    }
    if "token_embd.weight" not in shapes:
        raise ConfigError("the GGUF file has no tensor token_embd.weight: it is no language model")
    config = {
        "model_type": family.model_type,
        **values,
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    if family.model_type == "llama":
        config |= {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    scaling = _rope_scaling(metadata, architecture, rope_factors, int(values.get("max_position_embeddings", 0)))
    return config | ({"rope_scaling": scaling} if scaling else {})


def _rope_scaling(
    metadata: Metadata, architecture: str, factors: list[float] | None, positions: int
) -> dict[str, Any] | None:
    prefix = f"{architecture}.rope.scaling"
    kind, factor = metadata.get(f"{prefix}.type", "none"), metadata.get(f"{prefix}.factor", 1.0)
    original = metadata.get(f"{prefix}.original_context_length")
    if factors is not None:  # a divisor per frequency, whatever the length: LongRoPE with equal sets
        same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {"rope_type": "longrope", "original_max_position_embeddings": positions, **same}
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": factor}
    return scaling | ({"original_max_position_embeddings": original} if original else {})
