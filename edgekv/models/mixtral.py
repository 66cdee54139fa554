"""Mixtral: Llama with experts in every layer."""

from __future__ import annotations

from edgekv.models.config import CONFIG_HINT, ExpertsConfig, ModelConfig, Raw
from edgekv.models.experts import Mixture
from edgekv.models.files import MixtralFile
from edgekv.models.llama import decoder_config
from edgekv.schema import read


def mixtral_config(raw: Raw) -> ModelConfig:
    """ModelConfig of a Mixtral config.json."""
    file = read(raw, MixtralFile, "config.json", CONFIG_HINT)
    layers = file.num_hidden_layers
    experts = ExpertsConfig(
        (True,) * layers,
        file.num_experts or file.num_local_experts or 8,
        file.num_experts_per_tok or 2,
        file.intermediate_size,
        renormalized=True,
    )
    return decoder_config(
        "mixtral",
        file,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        layer_windows=(file.sliding_window,) * layers,
        experts=experts,
    )


class Mixtral(Mixture):
    """The projections have the names of the first release."""

    read_config = staticmethod(mixtral_config)
    mixture = "block_sparse_moe"
    expert_parts = ("w1", "w3", "w2")
