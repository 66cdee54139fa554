"""Phi-3 and Phi-4-mini: Llama with fused projections, partly rotated heads and longrope."""

from __future__ import annotations

from edgekv.errors import ConfigError
from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw, head_size
from edgekv.models.files import Phi3File, RopeFile
from edgekv.models.llama import Llama, decoder_config
from edgekv.models.rope import RopeConfig
from edgekv.schema import read, shown

ROPE_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


def phi3_config(raw: Raw) -> ModelConfig:
    """ModelConfig of a Phi-3 config.json."""
    file = read(raw, Phi3File, "config.json", CONFIG_HINT)
    head_dim = file.head_dim or head_size(file.hidden_size, file.num_attention_heads)
    layers = file.num_hidden_layers
    return decoder_config(
        "phi3",
        file,
        layer_ropes=(_rope(file, head_dim),) * layers,
        layer_windows=(file.sliding_window,) * layers,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )


def _rope(file: Phi3File, head_dim: int) -> RopeConfig:
    """As `RopeConfig.from_file`; what calls itself yarn here is longrope, and a head may be rotated in part."""
    name = "rope_scaling" if file.rope_scaling else "rope_parameters"
    found = file.rope_scaling or file.rope_parameters or {}
    kind = found.get("rope_type") or found.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise ConfigError(
            f"config.json: {name} type {shown(kind)} is not supported in phi3; supported: {', '.join(ROPE_KINDS)}"
        )
    share = read(found, RopeFile, f"config.json: {name}").partial_rotary_factor or file.partial_rotary_factor
    return RopeConfig.of(
        {**found, "rope_type": ROPE_KINDS[kind]},
        name,
        int(head_dim * share),
        file.max_position_embeddings or 0,
        file.rope_theta or 10000.0,
        file.original_max_position_embeddings,
    )


class Phi3(Llama):
    """Llama with fused projections; a share of the channels is rotated."""

    read_config = staticmethod(phi3_config)
    qkv_parts = ("qkv_proj",)
    up_parts = ("gate_up_proj",)
