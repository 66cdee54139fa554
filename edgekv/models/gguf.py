"""GGUF's metadata and tensor names as those of the Hugging Face checkpoints that they were made from.

Sources: llama.cpp's gguf-py/gguf/constants.py and conversion/. What a family has of its own is in its file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from edgekv.errors import ConfigError

ALL_LENGTHS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_FACTORS = (ALL_LENGTHS, LONG, SHORT)
"""Tensors of divisors of each frequency: of Llama 3.1's scaling, and of longrope beyond the original length and
up to it."""


@dataclasses.dataclass(frozen=True)
class GgufMetadata:
    """The contents of a file: metadata, tensors' shapes (rows first), and the values of those in ROPE_FACTORS."""

    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    factors: Mapping[str, list[float]]

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the architecture's own metadata under a key, or the default."""
        return self.metadata.get(f"{self.metadata['general.architecture']}.{key}", default)


Config = dict[str, Any]
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
EXPERT_NAMES = LLAMA_NAMES | {
    "blk.{i}.ffn_gate_inp": "model.layers.{i}.mlp.gate",
    "blk.{i}.ffn_gate_exps": "model.layers.{i}.mlp.experts.{e}.gate_proj",
    "blk.{i}.ffn_up_exps": "model.layers.{i}.mlp.experts.{e}.up_proj",
    "blk.{i}.ffn_down_exps": "model.layers.{i}.mlp.experts.{e}.down_proj",
}
EXPERT_KEYS = LLAMA_KEYS | {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
ROTATED = ("attn_q", "attn_k")
POST_NORMS = {
    "blk.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.post_ffw_norm": "model.layers.{i}.post_feedforward_layernorm",
}


@dataclasses.dataclass(frozen=True)
class GgufNames:
    """The names of one architecture in GGUF files; by default those of Llama.

    architecture: GGUF's name of it. model_type: config.json's. names: GGUF tensor, without its ending, to ours;
    ``{i}`` is the layer, ``{e}`` an expert, of which the tensor holds all. keys: entry of config.json to metadata
    key behind the architecture's name. interleaved: projections whose rows are ordered for rotations of
    neighbouring channels. conv1d: those that the checkpoint stores transposed. norm_offset: what the file has
    added to norms. finish: adds what no key says.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str] = dataclasses.field(default_factory=LLAMA_NAMES.copy)
    keys: Mapping[str, str] = dataclasses.field(default_factory=LLAMA_KEYS.copy)
    interleaved: tuple[str, ...] = ()
    conv1d: tuple[str, ...] = ()
    norm_offset: float = 0.0
    finish: Callable[[GgufMetadata, Config], Config] = lambda metadata, config: config

    def has_experts(self, role: str) -> bool:
        """Returns whether a tensor blk.0.``role`` holds a projection of all experts."""
        return "{e}" in self.names.get("blk.{i}." + role, "")

    def checkpoint_name(self, name: str, expert: int = 0) -> str:
        """Returns the checkpoint's name of a GGUF tensor, or of an expert in it; an unknown one keeps its own."""
        layer = re.match(r"blk\.(\d+)\.", name)
        base, dot, end = name.rpartition(".")
        pattern = base.replace(layer[0], "blk.{i}.") if layer else base
        if pattern not in self.names:
            return name
        return self.names[pattern].format(i=layer[1] if layer else "", e=expert) + dot + end

    def config(self, facts: GgufMetadata) -> Config:
        """Makes the model's config.json. Raises ConfigError where the metadata lack something."""
        values = {entry: facts.get(key) for entry, key in self.keys.items() if facts.get(key) is not None}
        if "token_embd.weight" not in facts.shapes:
            raise ConfigError("the GGUF file has no tensor token_embd.weight: it is no language model")
        config = {
            "model_type": self.model_type,
            **values,
            "vocab_size": facts.shapes["token_embd.weight"][0],
            "tie_word_embeddings": "output.weight" not in facts.shapes,
            "attention_bias": "blk.0.attn_q.bias" in facts.shapes,
            "mlp_bias": "blk.0.ffn_up.bias" in facts.shapes,
        }
        scaling = _rope_scaling(facts, int(values.get("max_position_embeddings", 0)))
        return self.finish(facts, config | ({"rope_scaling": scaling} if scaling else {}))


def head_dim(config: Mapping[str, Any]) -> int:
    """Returns the channels of a head of a config with Llama's keys."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope_scaling(facts: GgufMetadata, positions: int) -> dict[str, Any] | None:
    """Returns config.json's rope_scaling; positions: the model's longest context."""
    kind, original = facts.get("rope.scaling.type", "none"), facts.get("rope.scaling.original_context_length")
    scaling = {"original_max_position_embeddings": original} if original else {}
    if ALL_LENGTHS in facts.factors:  # whatever the length: LongRoPE with equal sets
        both = dict.fromkeys(("short_factor", "long_factor"), facts.factors[ALL_LENGTHS])
        scaling = {"original_max_position_embeddings": positions, **both, "attention_factor": 1.0}
    elif LONG in facts.factors or SHORT in facts.factors:
        for name, side in ((LONG, "long_factor"), (SHORT, "short_factor")):
            if name not in facts.factors:
                raise ConfigError(f"the GGUF file has no tensor {name}, but the other of the two")
            scaling[side] = facts.factors[name]
        if attention := facts.get("rope.scaling.attn_factor"):
            scaling["attention_factor"] = attention
    else:
        factor = facts.get("rope.scaling.factor", 1.0)
        return None if kind == "none" else {"rope_type": kind, "factor": factor, **scaling}
    return {"rope_type": "longrope", **scaling}
