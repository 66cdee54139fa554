"""config.json -> ModelConfig: every field the decoder needs, checked once, whatever the checkpoint's dialect."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from edgekv.errors import ConfigError
from edgekv.models.rope import RopeConfig

Raw = Mapping[str, Any]
CONFIG_HINT = "add or correct it, or give a whole config=FILE"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one decoder.

    ``layer_windows[i]`` is layer i's sliding window in tokens (None: sees everything);
    ``layer_scales[i]`` multiplies the queries before the dot product (1/sqrt(head_dim) as a rule).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    activation: str
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig | None
    layer_windows: tuple[int | None, ...]
    layer_scales: tuple[float, ...]

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}


def activation(name: str) -> str:
    """The operator's name for a Hugging Face activation."""
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def head_size(hidden: int, heads: int) -> int:
    """Channels of a head where the config does not say. ConfigError where there are more heads than channels."""
    if heads > hidden:
        raise ConfigError(f"config.json: {heads} heads leave no head_dim of a width of {hidden}; {CONFIG_HINT}")
    return hidden // heads


def check(config: ModelConfig) -> ModelConfig:
    """The config itself, or ConfigError where its sizes contradict each other."""
    if config.n_heads % config.n_kv_heads:
        raise ConfigError(
            f"config.json: {config.n_heads} query heads can't share {config.n_kv_heads} key-value heads evenly"
        )
    if config.model_type == "gpt2" and config.q_size != config.hidden_size:
        raise ConfigError(f"config.json: n_embd {config.hidden_size} is no multiple of n_head {config.n_heads}")
    return config
