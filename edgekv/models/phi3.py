"""Phi-3 and Phi-4-mini: Llama with fused projections, partly rotated heads and longrope."""

from __future__ import annotations

import math
from typing import Any

from edgekv.checks import read_fields, short_repr
from edgekv.errors import ConfigError
from edgekv.models.config import Epsilon, ModelConfig, Raw, head_size
from edgekv.models.gguf import LLAMA_KEYS, LLAMA_NAMES, GgufMetadata, GgufNames
from edgekv.models.gguf import head_dim as gguf_head_dim
from edgekv.models.llama import Llama, LlamaConfigSchema, llama_config
from edgekv.models.rope import Positions, RopeConfig, RopeSchema, Share

ROPE_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
PHI3_NAMES = {
    **{theirs: ours for theirs, ours in LLAMA_NAMES.items() if "attn_" not in theirs and "ffn_" not in theirs},
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.attn_qkv": "model.layers.{i}.self_attn.qkv_proj",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.gate_up_proj",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
}
PHI3_KEYS = LLAMA_KEYS | {
    "sliding_window": "attention.sliding_window",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}


class Phi3ConfigSchema(LlamaConfigSchema):
    """phi3."""

    max_position_embeddings: Positions | None = 4096
    original_max_position_embeddings: Positions | None = 4096
    rms_norm_eps: Epsilon | None = 1e-5
    partial_rotary_factor: Share = 1.0


def _rope(file: Phi3ConfigSchema, head_dim: int) -> RopeConfig:
    """As `llama_rope`; what calls itself yarn here is longrope, and a head may be rotated in part."""
    name = "rope_scaling" if file.rope_scaling else "rope_parameters"
    found = file.rope_scaling or file.rope_parameters or {}
    kind = found.get("rope_type") or found.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise ConfigError(
            f"config.json: {name} type {short_repr(kind)} is not supported in phi3; supported: "
            f"{', '.join(ROPE_KINDS)}"
        )
    share = (
        read_fields(found, RopeSchema, f"config.json: {name}").partial_rotary_factor or file.partial_rotary_factor
    )
    return RopeConfig.of(
        {**found, "rope_type": ROPE_KINDS[kind]},
        name,
        int(head_dim * share),
        file.max_position_embeddings or 0,
        file.rope_theta or 10000.0,
        file.original_max_position_embeddings,
    )


def _from_gguf(facts: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    """A window of 0 tokens is none; heads may be rotated in part."""
    head_dim = gguf_head_dim(config)
    rotated = facts.get("rope.dimension_count", head_dim)
    share = math.nextafter(rotated / head_dim, 1.0)  # so that the product, cut to a whole number, is `rotated`
    return {**config, "sliding_window": config.get("sliding_window") or None, "partial_rotary_factor": share}


class Phi3(Llama):
    """Llama with fused projections; a share of the channels is rotated."""

    schema = Phi3ConfigSchema
    gguf = GgufNames("phi3", "phi3", PHI3_NAMES, PHI3_KEYS, finish=_from_gguf)
    qkv_parts = ("qkv_proj",)
    up_parts = ("gate_up_proj",)

    @classmethod
    def model_config(cls, file: Phi3ConfigSchema, raw: Raw) -> ModelConfig:
        head_dim = file.head_dim or head_size(file.hidden_size, file.num_attention_heads)
        layers = file.num_hidden_layers
        return llama_config(
            "phi3",
            file,
            layer_ropes=(_rope(file, head_dim),) * layers,
            layer_windows=(file.sliding_window,) * layers,
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
        )
