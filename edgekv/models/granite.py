"""Granite 3 and 4 (dense): Llama with multipliers of embeddings, attention, residual stream and logits."""

from __future__ import annotations

from typing import Any

from edgekv.errors import ConfigError
from edgekv.models.config import ModelConfig, Raw
from edgekv.models.gguf import LLAMA_KEYS, LLAMA_NAMES, GgufMetadata, GgufNames, head_dim
from edgekv.models.llama import Llama, LlamaConfigSchema, llama_config
from edgekv.models.rope import Factor

GRANITE_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}


class GraniteConfigSchema(LlamaConfigSchema):
    """granite; factors on embeddings, residual stream and scores, and a divisor of logits."""

    embedding_multiplier: Factor = 1.0
    residual_multiplier: Factor = 1.0
    attention_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0


def _from_gguf(facts: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    """A factor of 0 stands for none, as in llama.cpp; the scale of scores is then the usual one."""
    if facts.get("rope.scaling.finetuned") is False:
        raise ConfigError("GGUF architecture 'granite' without rotations is not supported")
    given = {entry: value for entry, value in config.items() if value or entry not in GRANITE_SCALES}
    return {"attention_multiplier": head_dim(config) ** -0.5, **given}


class Granite(Llama):
    """Llama; the multipliers are data of its config."""

    schema = GraniteConfigSchema
    gguf = GgufNames(
        "granite",
        "granite",
        LLAMA_NAMES,
        LLAMA_KEYS | GRANITE_SCALES,
        interleaved=("attn_q", "attn_k"),
        finish=_from_gguf,
    )

    @classmethod
    def model_config(cls, file: GraniteConfigSchema, raw: Raw) -> ModelConfig:
        return llama_config(
            "granite",
            file,
            layer_scales=(file.attention_multiplier,) * file.num_hidden_layers,
            embedding_scale=file.embedding_multiplier,
            residual_scale=file.residual_multiplier,
            logit_scale=1 / file.logits_scaling,
        )
