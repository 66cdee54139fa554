"""Mistral (Llama in which every layer slides), Mixtral (experts in every layer), Ministral 3 and Mistral 3.

Ministral 3 has yarn, and queries that grow with their position; Mistral 3 sees, and its decoder is one of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import field

from edgekv.models.config import Epsilon, ExpertsConfig, ModelConfig, Raw, Width, sliding_layers
from edgekv.models.experts import Mixture, MixtureConfigSchema
from edgekv.models.llama import Llama, LlamaConfigSchema, llama_config
from edgekv.models.llava import Multimodal
from edgekv.models.rope import Positions, Theta

WINDOW = 4096  # where sliding_window is absent; null means none
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class MixtralConfigSchema(MixtureConfigSchema):
    """mixtral."""

    rms_norm_eps: Epsilon | None = 1e-5
    max_position_embeddings: Positions | None = 131072
    rope_theta: Theta | None = 1e6


class Ministral3ConfigSchema(LlamaConfigSchema):
    """ministral3."""

    head_dim: Width | None = 128
    max_position_embeddings: Positions | None = 262144
    rms_norm_eps: Epsilon | None = 1e-5
    rope_parameters: dict[str, Any] | None = field(default_factory=MINISTRAL_ROPE.copy)


class Mistral(Llama):
    """Llama; which layers slide is data of its config."""

    @classmethod
    def model_config(cls, file: LlamaConfigSchema, raw: Raw) -> ModelConfig:
        layers = file.num_hidden_layers
        window = file.sliding_window if "sliding_window" in raw else WINDOW
        types = file.layer_types or ["sliding_attention"] * layers
        return llama_config(
            "mistral",
            file,
            layer_windows=sliding_layers(types, None if file.use_sliding_window is False else window, layers),
        )


class Mixtral(Mixture):
    """The projections have the names of the first release."""

    schema = MixtralConfigSchema
    mixture = "block_sparse_moe"
    expert_parts = ("w1", "w3", "w2")

    @classmethod
    def model_config(cls, file: MixtralConfigSchema, raw: Raw) -> ModelConfig:
        layers = file.num_hidden_layers
        experts = ExpertsConfig(
            (True,) * layers,
            file.num_experts or file.num_local_experts or 8,
            file.num_experts_per_tok or 2,
            file.intermediate_size,
            renormalized=True,
        )
        return llama_config(
            "mixtral",
            file,
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            layer_windows=(file.sliding_window,) * layers,
            experts=experts,
        )


class Ministral3(Llama):
    """Llama whose queries grow with their positions."""

    schema = Ministral3ConfigSchema

    @classmethod
    def model_config(cls, file: Ministral3ConfigSchema, raw: Raw) -> ModelConfig:
        windows = (file.sliding_window,) * file.num_hidden_layers
        return llama_config(
            "ministral3", file, layer_windows=windows, qkv_bias=False, out_bias=False, mlp_bias=False
        )


class Mistral3(Multimodal):
    """Read for its text alone."""

    text_types: ClassVar[Mapping[str, Raw]] = {"mistral": {}, "ministral3": {}}
