"""Llama whose MLPs are mixtures of experts: Mixtral, Qwen 3 MoE and GPT-OSS."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from edgekv.models.architecture import Linear, Ops
from edgekv.models.config import Experts, ExpertsConfig, ModelConfig, Raw, Width, alternating, sliding_layers
from edgekv.models.gguf import EXPERT_KEYS, EXPERT_NAMES, GgufNames
from edgekv.models.llama import NO_BIASES, Llama, SlidingConfigSchema
from edgekv.models.rope import Factor

GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class MixtureConfigSchema(SlidingConfigSchema):
    """The fields of mixtures of experts; num_experts and num_local_experts are two names of one field."""

    num_experts_per_tok: Experts = 2
    num_experts: Experts = 8
    num_local_experts: Experts | None = None

    def experts(self, size: int, layers: tuple[bool, ...] = (), **overrides: Any) -> ExpertsConfig:
        """Makes the ExpertsConfig. size: channels of each. layers: those with experts, (): all."""
        layers, count = layers or (True,) * self.num_hidden_layers, self.num_local_experts or self.num_experts
        return ExpertsConfig(layers, count, self.num_experts_per_tok, size, **{"renormalized": True, **overrides})


class Mixture(Llama):
    """The base of mixtures of experts, among which ``{i}.router`` chooses.

    A layer's experts are two projections, ``{i}.experts_up`` and ``{i}.experts_down``: the first has the rows of
    each expert's gate and up projections, expert after expert.
    """

    mixture = "mlp"  # names in the checkpoint: of a layer's mixture, its router, and an expert's projections
    router = "gate"
    expert_parts = ("gate_proj", "up_proj", "down_proj")

    def layer_linears(self, i: int) -> dict[str, Linear]:
        linears, c, experts = super().layer_linears(i), self.config, self.config.experts_of(i)
        if experts is None:
            return linears
        base = f"{self.prefix}layers.{i}.{self.mixture}."
        bases = [f"{base}experts.{e}." for e in range(experts.count)]
        gate, up, down = self.expert_parts
        ups = [self._linear(name, (gate, up), (experts.size,) * 2, c.hidden_size, c.mlp_bias) for name in bases]
        downs = [self._linear(name, (down,), (c.hidden_size,), experts.size, c.mlp_bias) for name in bases]
        return {
            f"{i}.qkv": linears[f"{i}.qkv"],
            f"{i}.out": linears[f"{i}.out"],
            f"{i}.router": self._linear(base, (self.router,), (experts.count,), c.hidden_size, c.mlp_bias),
            f"{i}.experts_up": Linear.of_experts(ups),
            f"{i}.experts_down": Linear.of_experts(downs),
        }

    def post_attention(self, ops: Ops, i: int, x: Any, attention: Any) -> Any:
        if self.config.experts_of(i) is None:
            return super().post_attention(ops, i, x, attention)
        x = self._added(ops, i, "norm_attention", x, attention, "out")
        return ops.add_experts(x, self._normed(ops, i, "norm_mlp", x), i)


class Mixtral(Mixture):
    """Mixtral: experts in every layer."""

    schema = MixtureConfigSchema
    defaults: ClassVar[Raw] = {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6}
    fixed = NO_BIASES
    mixture = "block_sparse_moe"
    expert_parts = ("w1", "w3", "w2")

    @classmethod
    def model_config(cls, file: MixtureConfigSchema, raw: Raw, **overrides: Any) -> ModelConfig:
        return super().model_config(file, raw, experts=file.experts(file.intermediate_size))


class Qwen3MoeConfigSchema(MixtureConfigSchema):
    """The fields of qwen3_moe; mlp_only_layers and decoder_sparse_step say which layers have an MLP."""

    moe_intermediate_size: Width = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Annotated[int, Meta(ge=1, le=1024)] = 1
    mlp_only_layers: list[Annotated[int, Meta(ge=0, le=1024)]] | None = None

    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window if self.use_sliding_window else None,) * self.num_hidden_layers


class Qwen3Moe(Mixture):
    """Qwen 3 MoE: experts in some layers, as a rule in all."""

    schema = Qwen3MoeConfigSchema
    defaults: ClassVar[Raw] = {"max_position_embeddings": 32768, "num_experts": 128, "num_experts_per_tok": 8}
    fixed: ClassVar[Raw] = {"qk_norm": True, "mlp_bias": False}
    gguf = GgufNames(
        "qwen3moe",
        "qwen3_moe",
        EXPERT_NAMES,
        EXPERT_KEYS,
        finish=lambda facts, config: config | {"norm_topk_prob": True},  # as llama.cpp has it
    )

    @classmethod
    def model_config(cls, file: Qwen3MoeConfigSchema, raw: Raw, **overrides: Any) -> ModelConfig:
        layers, plain = file.num_hidden_layers, file.mlp_only_layers or ()
        sparse = tuple(i not in plain and (i + 1) % file.decoder_sparse_step == 0 for i in range(layers))
        experts = file.experts(file.moe_intermediate_size, sparse, renormalized=file.norm_topk_prob)
        return super().model_config(file, raw, experts=experts if any(sparse) else None)


class GptOssConfigSchema(MixtureConfigSchema):
    """The fields of gpt_oss, whose gates are clamped."""

    swiglu_alpha: Factor = 1.702
    swiglu_limit: Factor = 7.0

    def windows(self) -> tuple[int | None, ...]:
        layers = self.num_hidden_layers
        return sliding_layers(self.layer_types or alternating(layers, 2), self.sliding_window, layers)


class GptOss(Mixture):
    """GPT-OSS: experts with biases, attention sinks, a sliding window in every other layer.

    The experts' projections are one tensor in its checkpoints, seen here as many (`Tensors.unstacked`).
    """

    schema = GptOssConfigSchema
    defaults: ClassVar[Raw] = {
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "rope_theta": 150000.0,
        "rope_parameters": GPT_OSS_ROPE,
        "num_experts": 128,
        "num_experts_per_tok": 4,
    }
    fixed: ClassVar[Raw] = {"mlp_bias": True, "attention_sinks": True}
    router = "router"
    stacked_experts = True

    @classmethod
    def model_config(cls, file: GptOssConfigSchema, raw: Raw, **overrides: Any) -> ModelConfig:
        clamped = file.swiglu_alpha, file.swiglu_limit
        return super().model_config(file, raw, experts=file.experts(file.intermediate_size, clamped=clamped))

    def layer_vectors(self, i: int) -> dict[str, tuple[str, int]]:
        sinks = f"{self.prefix}layers.{i}.self_attn.sinks"
        return {**super().layer_vectors(i), f"{i}.sinks": (sinks, self.config.n_heads)}
