"""Gemma 2 and 3: norms around attention and MLP, 1 + w in place of w in them, scaled embeddings, sliding layers.

Gemma 2 bounds attention's scores and the logits softly; Gemma 3 has q/k norms and two rotations. Of models with
vision (model_type gemma3) the decoder is read, for text alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import Struct

from edgekv.checks import read_fields
from edgekv.errors import ConfigError
from edgekv.models.config import Layers, ModelConfig, Raw, activation, alternating, sliding_layers
from edgekv.models.gguf import LLAMA_KEYS, LLAMA_NAMES, POST_NORMS, GgufMetadata, GgufNames, head_dim
from edgekv.models.llama import Llama, LlamaConfigSchema
from edgekv.models.llava import Multimodal
from edgekv.models.rope import Factor, RopeConfig, Theta

NORMS = {
    "norm_in": "input_layernorm",
    "norm_attention": "post_attention_layernorm",
    "norm_mlp": "pre_feedforward_layernorm",
    "norm_down": "post_feedforward_layernorm",
}
GEMMA3 = {  # transformers' Gemma3TextConfig, for what the config of a model with vision does not say
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
GEMMA_NAMES = LLAMA_NAMES | POST_NORMS | {"blk.{i}.ffn_norm": "model.layers.{i}.pre_feedforward_layernorm"}
GEMMA_KEYS = LLAMA_KEYS | {
    "sliding_window": "attention.sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "rope_local_base_freq": "rope.freq_base_swa",
}
GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the sizes whose scores have a scale of their own
SLIDING_OF = {"gemma2": 2, "gemma3": 6}  # of so many layers one sees everything
MAX_LAYERS = 1 << 12  # more than any config may have


class GemmaConfigSchema(LlamaConfigSchema):
    """The fields of gemma2 and gemma3_text beside Llama's."""

    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: str | None = None
    query_pre_attn_scalar: Factor = 256.0
    sliding_window_pattern: Layers = 6  # of so many layers one sees everything
    rope_local_base_freq: Theta = 10000.0
    use_bidirectional_attention: bool = False
    final_logit_softcapping: Factor | None = None
    attn_logit_softcapping: Factor | None = None

    def types(self) -> list[str]:
        """Returns each layer's type."""
        return self.layer_types or alternating(self.num_hidden_layers, self.sliding_window_pattern)

    def windows(self) -> tuple[int | None, ...]:
        return sliding_layers(self.types(), self.sliding_window, self.num_hidden_layers)


class LayerTypeRopes(Struct):
    """The fields of gemma3's rope_parameters: one for each type of layer."""

    full_attention: dict[str, Any] = {}
    sliding_attention: dict[str, Any] = {}


def _from_gguf(facts: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    """Adds the scale of the scores, which no key has, as llama.cpp chooses it, and the types of layers."""
    name, layers = facts.metadata["general.architecture"], config["num_hidden_layers"]
    dim, wide = head_dim(config), config["hidden_size"] // config["num_attention_heads"]
    scalar = wide if layers == GEMMA_27B[name] else dim
    slides = facts.get("attention.sliding_window_pattern", SLIDING_OF[name])
    if not isinstance(slides, list):
        slides = [slides == 0 or (i + 1) % slides != 0 for i in range(min(layers, MAX_LAYERS))]
    if name == "gemma3" and not config.get("sliding_window"):
        slides = [False] * len(slides)
    types = ["sliding_attention" if slide else "full_attention" for slide in slides]
    return {**config, "head_dim": dim, "query_pre_attn_scalar": scalar, "layer_types": types}


class Gemma(Llama):
    """The base of Gemma 2 and 3."""

    schema = GemmaConfigSchema
    defaults: ClassVar[Raw] = {
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
        "sliding_window_pattern": 2,
    }
    norms: ClassVar[Mapping[str, str]] = NORMS
    fixed: ClassVar[Raw] = {"mlp_bias": False}
    norm_offset = 1.0

    @classmethod
    def model_config(cls, file: GemmaConfigSchema, raw: Raw, **overrides: Any) -> ModelConfig:
        """Makes the ModelConfig; overrides: the fields in which a generation differs."""
        if file.use_bidirectional_attention:
            raise ConfigError("config.json: use_bidirectional_attention is true: this is an encoder, no decoder")
        overrides["activation"] = activation(file.hidden_activation or "gelu_pytorch_tanh")
        overrides["layer_scales"] = (file.query_pre_attn_scalar**-0.5,) * file.num_hidden_layers
        return super().model_config(file, raw, embedding_scale=file.hidden_size**0.5, **overrides)


class Gemma2(Gemma):
    """Gemma 2: every other layer has a sliding window; scores and logits have soft bounds (null: none)."""

    gguf = GgufNames("gemma2", "gemma2", GEMMA_NAMES, GEMMA_KEYS, norm_offset=1.0, finish=_from_gguf)

    @classmethod
    def model_config(cls, file: GemmaConfigSchema, raw: Raw, **overrides: Any) -> ModelConfig:
        logit_cap = file.final_logit_softcapping if "final_logit_softcapping" in raw else 30.0
        score_cap = file.attn_logit_softcapping if "attn_logit_softcapping" in raw else 50.0
        return super().model_config(file, raw, logit_cap=logit_cap, score_cap=score_cap)


class Gemma3(Gemma):
    """Gemma 3: five layers with a sliding window and a rotation of their own to each that sees everything."""

    defaults: ClassVar[Raw] = {
        **Gemma.defaults,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "sliding_window_pattern": 6,
    }
    gguf = GgufNames("gemma3", "gemma3_text", GEMMA_NAMES, GEMMA_KEYS, norm_offset=1.0, finish=_from_gguf)

    @classmethod
    def model_config(cls, file: GemmaConfigSchema, raw: Raw, **overrides: Any) -> ModelConfig:
        nested = read_fields(file.rope_parameters or {}, LayerTypeRopes, "config.json: rope_parameters")
        whole = {**nested.full_attention, **(file.rope_scaling or {})}  # rope_scaling is not of layers that slide
        dim, positions = file.head_dim or 0, file.max_position_embeddings
        near, theta = nested.sliding_attention, file.rope_local_base_freq
        ropes = {
            "full_attention": RopeConfig.of(whole, "rope_scaling", dim, positions, file.rope_theta),
            "sliding_attention": RopeConfig.of(near, "rope_parameters", dim, positions, theta),
        }
        overrides = {"max_positions": positions, "layer_ropes": tuple(ropes.get(kind) for kind in file.types())}
        return super().model_config(file, raw, qk_norm=True, logit_cap=file.final_logit_softcapping, **overrides)


class Gemma3WithVision(Multimodal, Gemma3):
    """Gemma 3 with vision, read for its text alone."""

    text_types: ClassVar[Mapping[str, Raw]] = {"gemma3_text": GEMMA3}
