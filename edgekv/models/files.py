"""What config.json may hold, family by family: the fields that are read, their types and their ranges.

The bounds are far beyond any known model; they keep a damaged or hostile file from taking memory or time before a
tensor is looked at. None stands for the family's default.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field

Layers = Annotated[int, Meta(ge=1, le=1024)]
Heads = Annotated[int, Meta(ge=1, le=1 << 14)]
Width = Annotated[int, Meta(ge=1, le=1 << 20)]
Vocabulary = Annotated[int, Meta(ge=1, le=1 << 24)]
Positions = Annotated[int, Meta(ge=1, le=1 << 28)]
Experts = Annotated[int, Meta(ge=1, le=1 << 14)]
Epsilon = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(gt=1e-6, le=1e6)]
Share = Annotated[float, Meta(gt=0, le=1)]
Theta = Annotated[float, Meta(gt=1, le=1e15)]
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]


class RopeFile(Struct):
    """rope_scaling and rope_parameters of all types together; which type needs what: `models.rope`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Theta | None = None
    factor: Factor | None = None
    original_max_position_embeddings: Positions | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    attention_factor: Factor | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    mscale: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    mscale_all_dim: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    truncate: bool | None = None
    partial_rotary_factor: Share | None = None
    llama_4_scaling_beta: Annotated[float, Meta(ge=0, le=1e3)] | None = None
    short_factor: list[Factor] | None = None
    long_factor: list[Factor] | None = None


class LlamaFile(Struct):
    """llama and mistral; what most families have."""

    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    vocab_size: Vocabulary
    num_key_value_heads: Heads | None = None
    head_dim: Width | None = None
    max_position_embeddings: Positions | None = None
    original_max_position_embeddings: Positions | None = None
    rms_norm_eps: Epsilon | None = None
    hidden_act: str | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    rope_theta: Theta | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    sliding_window: Positions | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None


class QwenFile(LlamaFile):
    """qwen2; max_window_layers: the first that slides."""

    max_window_layers: Annotated[int, Meta(ge=0, le=1024)] = 28


class Qwen3File(QwenFile):
    """qwen3."""

    head_dim: Width | None = 128


class ExpertsFile(LlamaFile):
    """What mixtures of experts share; num_experts and num_local_experts are two names of one field."""

    num_experts_per_tok: Experts | None = None
    num_experts: Experts | None = None
    num_local_experts: Experts | None = None


class MixtralFile(ExpertsFile):
    """mixtral."""

    rms_norm_eps: Epsilon | None = 1e-5
    max_position_embeddings: Positions | None = 131072
    rope_theta: Theta | None = 1e6


class Qwen3MoeFile(ExpertsFile):
    """qwen3_moe; mlp_only_layers and decoder_sparse_step say which layers have an MLP of intermediate_size."""

    max_position_embeddings: Positions | None = 32768
    moe_intermediate_size: Width = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Annotated[int, Meta(ge=1, le=1024)] = 1
    mlp_only_layers: list[Annotated[int, Meta(ge=0, le=1024)]] | None = None


GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssFile(ExpertsFile):
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


class GemmaFile(LlamaFile):
    """What gemma2 and gemma3_text share."""

    head_dim: Width | None = 256
    tie_word_embeddings: bool | None = True
    hidden_activation: str | None = None
    query_pre_attn_scalar: Factor = 256.0
    sliding_window: Positions | None = 4096
    sliding_window_pattern: Layers = 6
    rope_local_base_freq: Theta = 10000.0
    use_bidirectional_attention: bool | None = None


class Gemma2File(GemmaFile):
    """gemma2."""

    max_position_embeddings: Positions | None = 8192
    final_logit_softcapping: Factor | None = None
    attn_logit_softcapping: Factor | None = None


class Gemma3File(GemmaFile):
    """gemma3_text."""

    final_logit_softcapping: Factor | None = None
    max_position_embeddings: Positions | None = 131072
    rope_theta: Theta | None = 1e6


class Phi3File(LlamaFile):
    """phi3."""

    max_position_embeddings: Positions | None = 4096
    original_max_position_embeddings: Positions | None = 4096
    rms_norm_eps: Epsilon | None = 1e-5
    partial_rotary_factor: Share = 1.0


class SmolLM3File(LlamaFile):
    """smollm3; no_rope_layers: 1 for each layer that rotates."""

    max_position_embeddings: Positions | None = 32768
    rope_theta: Theta | None = 2e6
    tie_word_embeddings: bool | None = True
    no_rope_layers: list[Annotated[int, Meta(ge=0, le=1)]] | None = None
    no_rope_layer_interval: Layers = 4


class Olmo2File(LlamaFile):
    """olmo2."""

    rms_norm_eps: Epsilon | None = 1e-5


class GraniteFile(LlamaFile):
    """granite; factors on embeddings, residual stream and scores, and a divisor of logits."""

    embedding_multiplier: Factor = 1.0
    residual_multiplier: Factor = 1.0
    attention_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0


MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Ministral3File(LlamaFile):
    """ministral3."""

    head_dim: Width | None = 128
    max_position_embeddings: Positions | None = 262144
    rms_norm_eps: Epsilon | None = 1e-5
    rope_parameters: dict[str, Any] | None = field(default_factory=MINISTRAL_ROPE.copy)


Taps = Annotated[int, Meta(ge=2, le=64)]


class Lfm2File(LlamaFile):
    """lfm2; block_ff_dim and tie_embedding are older names."""

    num_key_value_heads: Heads | None = 8
    max_position_embeddings: Positions | None = 128000
    rope_theta: Theta | None = 1e6
    tie_word_embeddings: bool | None = True
    tie_embedding: bool | None = None
    norm_eps: Epsilon = 1e-5
    conv_bias: bool = False
    conv_taps: Taps = field(default=3, name="conv_L_cache")
    block_ff_dim: Width | None = None
    block_multiple_of: Width = 256
    block_ffn_dim_multiplier: Factor = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[Annotated[int, Meta(ge=0, le=1024)]] | None = None


class Qwen35File(LlamaFile):
    """qwen3_5_text."""

    num_key_value_heads: Heads | None = 4
    head_dim: Width | None = 256
    max_position_embeddings: Positions | None = 32768
    partial_rotary_factor: Share = 0.25
    full_attention_interval: Layers = 4
    linear_conv_kernel_dim: Taps = 4
    linear_key_head_dim: Annotated[int, Meta(ge=1, le=4096)] = 128
    linear_value_head_dim: Annotated[int, Meta(ge=1, le=4096)] = 128
    linear_num_key_heads: Heads = 16
    linear_num_value_heads: Heads = 32


class GPT2File(Struct):
    """gpt2."""

    n_embd: Width
    n_head: Heads
    n_layer: Layers
    vocab_size: Vocabulary
    n_positions: Positions | None = None
    n_ctx: Positions | None = None
    n_inner: Width | None = None
    layer_norm_epsilon: Epsilon | None = None
    activation_function: str | None = None
    tie_word_embeddings: bool | None = None
    scale_attn_weights: bool | None = None
    scale_attn_by_inverse_layer_idx: bool | None = None


class RopeOfLayers(Struct):
    """gemma3's rope_parameters: one for each type of layer."""

    full_attention: dict[str, Any] | None = None
    sliding_attention: dict[str, Any] | None = None


class MultimodalFile(Struct):
    """What a model that sees has beside its text_config."""

    text_config: dict[str, Any] | None = None
    image_token_index: Token | None = None
    image_token_id: Token | None = None
    projector_hidden_act: str | None = None
