"""GPT-OSS: experts with biases and a clamped gate, sinks in attention, every other layer sliding."""

from __future__ import annotations

from edgekv.models.config import CONFIG_HINT, ExpertsConfig, ModelConfig, Raw, sliding_layers
from edgekv.models.experts import Mixture
from edgekv.models.files import GptOssFile
from edgekv.models.llama import decoder_config
from edgekv.schema import read


def gpt_oss_config(raw: Raw) -> ModelConfig:
    """ModelConfig of a GPT-OSS config.json."""
    file = read(raw, GptOssFile, "config.json", CONFIG_HINT)
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
    return decoder_config(
        "gpt_oss",
        file,
        mlp_bias=True,
        layer_windows=sliding_layers(file.layer_types or alternating, file.sliding_window, layers),
        experts=experts,
        attention_sinks=True,
    )


class GptOss(Mixture):
    """The experts' projections are one tensor in its checkpoints, seen here as many (`checkpoint.stacked`)."""

    read_config = staticmethod(gpt_oss_config)
    router = "router"

    def layer_vectors(self, i: int) -> dict[str, tuple[str, int]]:
        sinks = f"{self.prefix}layers.{i}.self_attn.sinks"
        return {**super().layer_vectors(i), f"{i}.sinks": (sinks, self.config.n_heads)}
