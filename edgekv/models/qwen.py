"""Qwen 2 (biases of queries, keys, values), Qwen 3 (q/k norms), also with experts: upper layers may slide."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from edgekv.models.config import ExpertsConfig, ModelConfig, Raw, Width, sliding_layers
from edgekv.models.experts import Mixture, MixtureConfigSchema
from edgekv.models.gguf import LLAMA_KEYS, LLAMA_NAMES, GgufNames
from edgekv.models.llama import Llama, LlamaConfigSchema, llama_config
from edgekv.models.rope import Positions


class Qwen2ConfigSchema(LlamaConfigSchema):
    """qwen2; max_window_layers: the first that slides."""

    max_window_layers: Annotated[int, Meta(ge=0, le=1024)] = 28


class Qwen3ConfigSchema(Qwen2ConfigSchema):
    """qwen3."""

    head_dim: Width | None = 128


class Qwen3MoeConfigSchema(MixtureConfigSchema):
    """qwen3_moe; mlp_only_layers and decoder_sparse_step say which layers have an MLP of intermediate_size."""

    max_position_embeddings: Positions | None = 32768
    moe_intermediate_size: Width = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Annotated[int, Meta(ge=1, le=1024)] = 1
    mlp_only_layers: list[Annotated[int, Meta(ge=0, le=1024)]] | None = None


def _windows(file: Qwen2ConfigSchema) -> tuple[int | None, ...]:
    """Layers slide with use_sliding_window alone, from max_window_layers on."""
    layers, first = file.num_hidden_layers, file.max_window_layers
    upper = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    window = file.sliding_window if file.use_sliding_window else None
    return sliding_layers(file.layer_types or upper, window, layers)


class Qwen2(Llama):
    """Llama; its biases are data of its config."""

    schema = Qwen2ConfigSchema
    gguf = GgufNames("qwen2", "qwen2", LLAMA_NAMES, LLAMA_KEYS)

    @classmethod
    def model_config(cls, file: Qwen2ConfigSchema, raw: Raw) -> ModelConfig:
        return llama_config("qwen2", file, qkv_bias=True, out_bias=False, layer_windows=_windows(file))


class Qwen3(Llama):
    """Llama; its q/k norms are data of its config."""

    schema = Qwen3ConfigSchema
    gguf = GgufNames("qwen3", "qwen3", LLAMA_NAMES, LLAMA_KEYS)

    @classmethod
    def model_config(cls, file: Qwen3ConfigSchema, raw: Raw) -> ModelConfig:
        return llama_config("qwen3", file, qk_norm=True, layer_windows=_windows(file))


class Qwen3Moe(Mixture):
    """Experts in some layers, as a rule in all; a window, where it has one, is that of all layers."""

    schema = Qwen3MoeConfigSchema

    @classmethod
    def model_config(cls, file: Qwen3MoeConfigSchema, raw: Raw) -> ModelConfig:
        layers, plain = file.num_hidden_layers, file.mlp_only_layers or ()
        sparse = tuple(i not in plain and (i + 1) % file.decoder_sparse_step == 0 for i in range(layers))
        experts = ExpertsConfig(
            sparse,
            file.num_experts or file.num_local_experts or 128,
            file.num_experts_per_tok or 8,
            file.moe_intermediate_size,
            renormalized=file.norm_topk_prob,
        )
        return llama_config(
            "qwen3_moe",
            file,
            qk_norm=True,
            mlp_bias=False,
            layer_windows=(file.sliding_window if file.use_sliding_window else None,) * layers,
            experts=experts if any(sparse) else None,
        )
