"""Qwen 3 with experts: q/k norms, and in some layers, as a rule in all, experts in place of the MLP."""

from __future__ import annotations

from edgekv.models.config import CONFIG_HINT, ExpertsConfig, ModelConfig, Raw
from edgekv.models.experts import Mixture
from edgekv.models.files import Qwen3MoeFile
from edgekv.models.llama import decoder_config
from edgekv.schema import read


def qwen3_moe_config(raw: Raw) -> ModelConfig:
    """ModelConfig of a Qwen 3 MoE config.json. Its window, where it has one, is that of all layers."""
    file = read(raw, Qwen3MoeFile, "config.json", CONFIG_HINT)
    layers, plain = file.num_hidden_layers, file.mlp_only_layers or ()
    sparse = tuple(i not in plain and (i + 1) % file.decoder_sparse_step == 0 for i in range(layers))
    experts = ExpertsConfig(
        sparse,
        file.num_experts or file.num_local_experts or 128,
        file.num_experts_per_tok or 8,
        file.moe_intermediate_size,
        renormalized=file.norm_topk_prob,
    )
    return decoder_config(
        "qwen3_moe",
        file,
        qk_norm=True,
        mlp_bias=False,
        layer_windows=(file.sliding_window if file.use_sliding_window else None,) * layers,
        experts=experts if any(sparse) else None,
    )


class Qwen3Moe(Mixture):
    """Its q/k norms are data of its config."""

    read_config = staticmethod(qwen3_moe_config)
