"""Granite 3 and 4 (dense): Llama with multipliers of embeddings, attention, residual stream and logits."""

from __future__ import annotations

from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw
from edgekv.models.files import GraniteFile
from edgekv.models.llama import Llama, decoder_config
from edgekv.schema import read


def granite_config(raw: Raw) -> ModelConfig:
    """ModelConfig of a Granite config.json."""
    file = read(raw, GraniteFile, "config.json", CONFIG_HINT)
    return decoder_config(
        "granite",
        file,
        layer_scales=(file.attention_multiplier,) * file.num_hidden_layers,
        embedding_scale=file.embedding_multiplier,
        residual_scale=file.residual_multiplier,
        logit_scale=1 / file.logits_scaling,
    )


class Granite(Llama):
    """Llama; the multipliers are data of its config."""

    read_config = staticmethod(granite_config)
