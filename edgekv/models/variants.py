"""Families that are almost Llama: Mistral, Ministral 3, Qwen 2 and 3, SmolLM3, Granite, OLMo 2, Phi-3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from edgekv.checks import read_fields
from edgekv.errors import ConfigError, short_repr
from edgekv.models.architecture import Ops
from edgekv.models.config import Layers, ModelConfig, Raw, head_size, sliding_layers
from edgekv.models.gguf import LLAMA_KEYS, LLAMA_NAMES, POST_NORMS, ROTATED, GgufMetadata, GgufNames, head_dim
from edgekv.models.llama import NO_BIASES, Llama, LlamaConfigSchema, SlidingConfigSchema, llama_rope
from edgekv.models.rope import Factor, RopeConfig, RopeSchema

MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GRANITE_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
PHI3_ROPES = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
PHI3_NAMES = {theirs: ours for theirs, ours in LLAMA_NAMES.items() if theirs[-2:] not in ("_q", "_k", "_v")} | {
    "blk.{i}.attn_qkv": "model.layers.{i}.self_attn.qkv_proj",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.gate_up_proj",
}
PHI3_KEYS = LLAMA_KEYS | {
    "sliding_window": "attention.sliding_window",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}


class Mistral(Llama):
    """Mistral: every layer has a sliding window of 4096 tokens by default; null means none."""

    @classmethod
    def model_config(cls, file: LlamaConfigSchema, raw: Raw, **overrides: Any) -> ModelConfig:
        layers, window = file.num_hidden_layers, file.sliding_window if "sliding_window" in raw else 4096
        types = file.layer_types or ["sliding_attention"] * layers
        windows = sliding_layers(types, None if file.use_sliding_window is False else window, layers)
        return super().model_config(file, raw, layer_windows=windows)


class Ministral3(Llama):
    """Ministral 3: YaRN, and queries that grow with their positions."""

    schema = SlidingConfigSchema
    fixed = NO_BIASES
    defaults: ClassVar[Raw] = {
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": MINISTRAL_ROPE,
    }


class QwenConfigSchema(LlamaConfigSchema):
    """The fields of Qwen 2 and 3; max_window_layers: the first layer with a sliding window, if it is used."""

    max_window_layers: Annotated[int, Meta(ge=0, le=1024)] = 28

    def windows(self) -> tuple[int | None, ...]:
        layers, first = self.num_hidden_layers, self.max_window_layers
        upper = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        window = self.sliding_window if self.use_sliding_window else None
        return sliding_layers(self.layer_types or upper, window, layers)


class Qwen2(Llama):
    """Qwen 2: biases of queries, keys and values."""

    schema = QwenConfigSchema
    fixed: ClassVar[Raw] = {"qkv_bias": True, "out_bias": False}
    gguf = GgufNames("qwen2", "qwen2")


class Qwen3(Llama):
    """Qwen 3: norms of queries and keys."""

    schema = QwenConfigSchema
    defaults: ClassVar[Raw] = {"head_dim": 128}
    fixed: ClassVar[Raw] = {"qk_norm": True}
    gguf = GgufNames("qwen3", "qwen3")


class SmolLM3ConfigSchema(LlamaConfigSchema):
    """The fields of smollm3; no_rope_layers: 1 for each layer that rotates."""

    no_rope_layers: list[Annotated[int, Meta(ge=0, le=1)]] | None = None
    no_rope_layer_interval: Layers = 4


class SmolLM3(Llama):
    """SmolLM 3: every fourth layer, as a rule, does not rotate queries and keys."""

    schema = SmolLM3ConfigSchema
    defaults: ClassVar[Raw] = {"max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True}
    gguf = GgufNames("smollm3", "smollm3", interleaved=ROTATED)

    @classmethod
    def model_config(cls, file: SmolLM3ConfigSchema, raw: Raw, **overrides: Any) -> ModelConfig:
        layers, given = file.num_hidden_layers, file.no_rope_layers
        if given is None:
            given = [int((i + 1) % file.no_rope_layer_interval != 0) for i in range(layers)]
        if len(given) < layers:
            raise ConfigError(f"config.json: no_rope_layers has {len(given)} entries for {layers} layers")
        rope = llama_rope(file, file.head_dim or head_size(file.hidden_size, file.num_attention_heads))
        slides = ["full_attention" if rotates else "sliding_attention" for rotates in given[:layers]]
        window = file.sliding_window if file.use_sliding_window else None
        windows = sliding_layers(file.layer_types or slides, window, layers)
        ropes = tuple(rope if rotates else None for rotates in given[:layers])
        overrides = {"max_positions": rope.max_positions, "layer_ropes": ropes, "layer_windows": windows}
        return super().model_config(file, raw, **overrides)


def _granite_from_gguf(facts: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    """Drops factors of 0, which stand for none, as in llama.cpp, and adds the usual scale of scores."""
    if facts.get("rope.scaling.finetuned") is False:
        raise ConfigError("GGUF architecture 'granite' without rotations is not supported")
    given = {entry: value for entry, value in config.items() if value or entry not in GRANITE_SCALES}
    return {"attention_multiplier": head_dim(config) ** -0.5, **given}


class GraniteConfigSchema(LlamaConfigSchema):
    """The fields of granite: factors of embeddings, residual stream and scores, and a divisor of logits."""

    embedding_multiplier: Factor = 1.0
    residual_multiplier: Factor = 1.0
    attention_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0


class Granite(Llama):
    """Granite 3 and 4 (dense)."""

    schema = GraniteConfigSchema
    gguf = GgufNames(
        "granite", "granite", LLAMA_NAMES, LLAMA_KEYS | GRANITE_SCALES, ROTATED, finish=_granite_from_gguf
    )

    @classmethod
    def model_config(cls, file: GraniteConfigSchema, raw: Raw, **overrides: Any) -> ModelConfig:
        overrides["layer_scales"] = (file.attention_multiplier,) * file.num_hidden_layers
        overrides |= {"embedding_scale": file.embedding_multiplier, "residual_scale": file.residual_multiplier}
        return super().model_config(file, raw, logit_scale=1 / file.logits_scaling, **overrides)


def _olmo2_from_gguf(facts: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    if facts.get("attention.sliding_window"):
        raise ConfigError("GGUF architecture 'olmo2' with sliding layers, as OLMo 3 has them, is not supported")
    return config


class Olmo2(Llama):
    """OLMo 2: norms behind attention and MLP instead of before them, one over all queries, one over all keys."""

    defaults: ClassVar[Raw] = {"rms_norm_eps": 1e-5}
    fixed: ClassVar[Raw] = {"mlp_bias": False}
    gguf = GgufNames("olmo2", "olmo2", LLAMA_NAMES | POST_NORMS, finish=_olmo2_from_gguf)
    norms: ClassVar[Mapping[str, str]] = {
        "norm_attention": "post_attention_layernorm",
        "norm_down": "post_feedforward_layernorm",
    }

    def layer_vectors(self, i: int) -> dict[str, tuple[str, int]]:
        c, attn = self.config, f"{self.prefix}layers.{i}.self_attn."
        return {
            **super().layer_vectors(i),
            f"{i}.norm_queries": (f"{attn}q_norm.weight", c.q_size),
            f"{i}.norm_keys": (f"{attn}k_norm.weight", c.kv_size),
        }

    def pre_attention(self, ops: Ops, i: int, x: Any) -> Any:
        c = self.config
        q, k, v = ops.split(super().pre_attention(ops, i, x), (c.q_size, c.kv_size, c.kv_size))
        q = ops.rms_norm(q, f"{i}.norm_queries", c.norm_eps)
        k = ops.rms_norm(k, f"{i}.norm_keys", c.norm_eps)
        return ops.join((q, k, v))


def _phi3_rope(file: LlamaConfigSchema, head_dim: int) -> RopeConfig:
    """Makes a rotation as `llama_rope` does; yarn is longrope here, and a head may be rotated in part."""
    name = "rope_scaling" if file.rope_scaling else "rope_parameters"
    found = file.rope_scaling or file.rope_parameters or {}
    kind = found.get("rope_type") or found.get("type") or "default"
    if not isinstance(kind, str) or kind not in PHI3_ROPES:
        what = f"{name} type {short_repr(kind)} is not supported in phi3"
        raise ConfigError(f"config.json: {what}; supported: {', '.join(PHI3_ROPES)}")
    factor = read_fields(found, RopeSchema, f"config.json: {name}").partial_rotary_factor
    dim, positions = int(head_dim * (factor or file.partial_rotary_factor)), file.max_position_embeddings
    found, original = {**found, "rope_type": PHI3_ROPES[kind]}, file.original_max_position_embeddings
    return RopeConfig.of(found, name, dim, positions, file.rope_theta, original)


def _phi3_from_gguf(facts: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    """Drops a window of 0 tokens, and adds the share of a head's channels that are rotated."""
    whole = head_dim(config)
    rotated = facts.get("rope.dimension_count", whole)
    share = math.nextafter(rotated / whole, 1.0)  # so that the product, cut to a whole number, is `rotated`
    return {**config, "sliding_window": config.get("sliding_window") or None, "partial_rotary_factor": share}


class Phi3(Llama):
    """Phi-3 and Phi-4-mini: fused projections, partly rotated heads and longrope."""

    schema = SlidingConfigSchema
    fixed = NO_BIASES
    defaults: ClassVar[Raw] = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    gguf = GgufNames("phi3", "phi3", PHI3_NAMES, PHI3_KEYS, finish=_phi3_from_gguf)
    qkv_parts = ("qkv_proj",)
    up_parts = ("gate_up_proj",)

    @classmethod
    def model_config(cls, file: LlamaConfigSchema, raw: Raw, **overrides: Any) -> ModelConfig:
        rope = _phi3_rope(file, file.head_dim or head_size(file.hidden_size, file.num_attention_heads))
        return super().model_config(file, raw, layer_ropes=(rope,) * file.num_hidden_layers)
