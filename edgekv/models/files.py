"""What config.json may hold, family by family: the fields that are read, their types and their ranges.

The bounds are far beyond any known model; they keep a damaged or hostile file from taking memory or time before a
tensor is looked at. None stands for the family's default.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

Layers = Annotated[int, Meta(ge=1, le=1024)]
Heads = Annotated[int, Meta(ge=1, le=1 << 14)]
Width = Annotated[int, Meta(ge=1, le=1 << 20)]
Vocabulary = Annotated[int, Meta(ge=1, le=1 << 24)]
Positions = Annotated[int, Meta(ge=1, le=1 << 28)]
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
    max_window_layers: Annotated[int, Meta(ge=0, le=1024)] | None = None
    layer_types: list[str] | None = None


class GPT2File(Struct):
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


class LlavaFile(Struct):
    text_config: dict[str, Any] | None = None
    image_token_index: Token | None = None
    image_token_id: Token | None = None
    projector_hidden_act: str | None = None
