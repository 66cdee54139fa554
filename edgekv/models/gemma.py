"""Gemma 2 and 3: norms around attention and MLP, 1 + w in place of w in them, scaled embeddings, sliding layers.

Gemma 2 bounds attention's scores and the logits softly; Gemma 3 has q/k norms and two rotations. Of models that
see (model_type gemma3) the decoder is read, for text alone.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from edgekv.checks import read_fields
from edgekv.errors import ConfigError
from edgekv.models.config import Layers, ModelConfig, Raw, Width, activation, sliding_layers
from edgekv.models.gguf import LLAMA_KEYS, LLAMA_NAMES, POST_NORMS, GgufMetadata, GgufNames, head_dim
from edgekv.models.llama import Llama, LlamaConfigSchema, llama_config
from edgekv.models.llava import Multimodal
from edgekv.models.rope import Factor, Positions, RopeConfig, Theta

NORMS = {
    "norm_in": "input_layernorm",
    "norm_attention": "post_attention_layernorm",
    "norm_mlp": "pre_feedforward_layernorm",
    "norm_down": "post_feedforward_layernorm",
}
GEMMA2_CAPS = {"logit_cap": 30.0, "score_cap": 50.0}  # where the config does not say
GEMMA3 = {  # transformers' Gemma3TextConfig, for what the config of a model that sees does not say
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
MOST_LAYERS = 1 << 12  # more than any config may have


class GemmaConfigSchema(LlamaConfigSchema):
    """What gemma2 and gemma3_text share."""

    head_dim: Width | None = 256
    tie_word_embeddings: bool | None = True
    hidden_activation: str | None = None
    query_pre_attn_scalar: Factor = 256.0
    sliding_window: Positions | None = 4096
    sliding_window_pattern: Layers = 6
    rope_local_base_freq: Theta = 10000.0
    use_bidirectional_attention: bool | None = None


class Gemma2ConfigSchema(GemmaConfigSchema):
    """gemma2."""

    max_position_embeddings: Positions | None = 8192
    final_logit_softcapping: Factor | None = None
    attn_logit_softcapping: Factor | None = None


class Gemma3ConfigSchema(GemmaConfigSchema):
    """gemma3_text."""

    final_logit_softcapping: Factor | None = None
    max_position_embeddings: Positions | None = 131072
    rope_theta: Theta | None = 1e6


class LayerTypeRopes(Struct):
    """gemma3's rope_parameters: one for each type of layer."""

    full_attention: dict[str, Any] | None = None
    sliding_attention: dict[str, Any] | None = None


def _from_gguf(facts: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    """The scale of the scores, which no key has, as llama.cpp chooses it; and the layers that slide."""
    name, layers = facts.metadata["general.architecture"], config["num_hidden_layers"]
    own = head_dim(config)
    wide = config["hidden_size"] // config["num_attention_heads"]
    scalar = wide if layers == GEMMA_27B[name] else own
    slides = facts.get("attention.sliding_window_pattern", SLIDING_OF[name])
    if not isinstance(slides, list):
        slides = [slides == 0 or (i + 1) % slides != 0 for i in range(min(layers, MOST_LAYERS))]
    if name == "gemma3" and not config.get("sliding_window"):
        slides = [False] * len(slides)
    types = ["sliding_attention" if each else "full_attention" for each in slides]
    return {**config, "head_dim": own, "query_pre_attn_scalar": scalar, "layer_types": types}


def gemma_config(model_type: str, file: GemmaConfigSchema, layer_types: list[str], **own: Any) -> ModelConfig:
    """Makes what the generations share. ``own``: the fields in which one differs."""
    if file.use_bidirectional_attention:
        raise ConfigError(
            f"config.json: use_bidirectional_attention is true: this {model_type} is an encoder and writes no text"
        )
    layers = file.num_hidden_layers
    return llama_config(
        model_type,
        file,
        activation=activation(file.hidden_activation or "gelu_pytorch_tanh"),
        mlp_bias=False,
        layer_windows=sliding_layers(layer_types, file.sliding_window, layers),
        layer_scales=(file.query_pre_attn_scalar**-0.5,) * layers,
        embedding_scale=file.hidden_size**0.5,
        **own,
    )


def _ropes(file: Gemma3ConfigSchema) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see everything, and of those that slide: rope_scaling is of the former alone."""
    nested = read_fields(file.rope_parameters or {}, LayerTypeRopes, "config.json: rope_parameters")
    head_dim, positions = file.head_dim or 0, file.max_position_embeddings or 0
    whole = {**(nested.full_attention or {}), **(file.rope_scaling or {})}
    sliding = nested.sliding_attention or {}
    return (
        RopeConfig.of(whole, "rope_scaling", head_dim, positions, file.rope_theta or 1e6),
        RopeConfig.of(sliding, "rope_parameters", head_dim, positions, file.rope_local_base_freq),
    )


class Gemma(Llama):
    """What both have."""

    norms = NORMS
    norm_offset = 1.0


class Gemma2(Gemma):
    """Attention that slides in every other layer; scores and logits have soft bounds."""

    schema = Gemma2ConfigSchema
    gguf = GgufNames("gemma2", "gemma2", GEMMA_NAMES, GEMMA_KEYS, norm_offset=1.0, finish=_from_gguf)

    @classmethod
    def model_config(cls, file: Gemma2ConfigSchema, raw: Raw) -> ModelConfig:
        alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(file.num_hidden_layers)]
        caps = {"logit_cap": file.final_logit_softcapping, "score_cap": file.attn_logit_softcapping}
        names = {"logit_cap": "final_logit_softcapping", "score_cap": "attn_logit_softcapping"}
        caps |= {field: GEMMA2_CAPS[field] for field, name in names.items() if name not in raw}  # null means none
        return gemma_config("gemma2", file, file.layer_types or alternating, **caps)


class Gemma3(Gemma):
    """Five layers that slide for each that sees everything, with a rotation of their own."""

    schema = Gemma3ConfigSchema
    gguf = GgufNames("gemma3", "gemma3_text", GEMMA_NAMES, GEMMA_KEYS, norm_offset=1.0, finish=_from_gguf)

    @classmethod
    def model_config(cls, file: Gemma3ConfigSchema, raw: Raw) -> ModelConfig:
        every = file.sliding_window_pattern
        pattern = [
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(file.num_hidden_layers)
        ]
        types = file.layer_types or pattern
        ropes = _ropes(file)
        return gemma_config(
            "gemma3_text",
            file,
            types,
            qk_norm=True,
            logit_cap=file.final_logit_softcapping,
            max_positions=file.max_position_embeddings,
            layer_ropes=tuple(ropes[kind == "sliding_attention"] for kind in types),
        )


class Gemma3WithVision(Multimodal, Gemma3):
    """Read for its text alone."""

    text_types = {"gemma3_text": GEMMA3}  # noqa: RUF012 - not changed
