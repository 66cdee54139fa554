"""GPT-OSS: experts with biases and a clamped gate, sinks in attention, every other layer sliding."""

from __future__ import annotations

from typing import Any

from msgspec import field

from edgekv.models.config import Epsilon, ExpertsConfig, ModelConfig, Raw, Width, sliding_layers
from edgekv.models.experts import Mixture, MixtureConfigSchema
from edgekv.models.llama import llama_config
from edgekv.models.rope import Factor, Positions, Theta

GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssConfigSchema(MixtureConfigSchema):
    """gpt_oss."""

    head_dim: Width | None = 64
    max_position_embeddings: Positions | None = 131072
    rms_norm_eps: Epsilon | None = 1e-5
    attention_bias: bool | None = True
    sliding_window: Positions | None = 128
    rope_theta: Theta | None = 150000.0
    rope_parameters: dict[str, Any] | None = field(default_factory=GPT_OSS_ROPE.copy)
    swiglu_alpha: Factor = 1.702
    swiglu_limit: Factor = 7.0


class GptOss(Mixture):
    """The experts' projections are one tensor in its checkpoints, seen here as many (`Tensors.unstacked`)."""

    schema = GptOssConfigSchema
    router = "router"
    stacked_experts = True

    @classmethod
    def model_config(cls, file: GptOssConfigSchema, raw: Raw) -> ModelConfig:
        layers = file.num_hidden_layers
        alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
        experts = ExpertsConfig(
            (True,) * layers,
            file.num_local_experts or file.num_experts or 128,
            file.num_experts_per_tok or 4,
            file.intermediate_size,
            renormalized=True,
            clamped=(file.swiglu_alpha, file.swiglu_limit),
        )
        return llama_config(
            "gpt_oss",
            file,
            mlp_bias=True,
            layer_windows=sliding_layers(file.layer_types or alternating, file.sliding_window, layers),
            experts=experts,
            attention_sinks=True,
        )

    def layer_vectors(self, i: int) -> dict[str, tuple[str, int]]:
        sinks = f"{self.prefix}layers.{i}.self_attn.sinks"
        return {**super().layer_vectors(i), f"{i}.sinks": (sinks, self.config.n_heads)}
