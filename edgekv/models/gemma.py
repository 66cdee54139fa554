"""Gemma 2 and 3: norms around attention and MLP, 1 + w in place of w in them, scaled embeddings, sliding layers.

Gemma 2 bounds attention's scores and the logits softly; Gemma 3 has q/k norms and two rotations. Of models that
see (model_type gemma3) the decoder is read, for text alone.
"""

from __future__ import annotations

from typing import Any

from edgekv.errors import ConfigError
from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw, activation, sliding_layers
from edgekv.models.files import Gemma2File, Gemma3File, GemmaFile, RopeOfLayers
from edgekv.models.llama import Llama, decoder_config
from edgekv.models.multimodal import Multimodal, text_config
from edgekv.models.rope import RopeConfig
from edgekv.schema import read

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


def gemma_config(model_type: str, file: GemmaFile, layer_types: list[str], **own: Any) -> ModelConfig:
    """What the generations share. ``own``: the fields in which one differs."""
    if file.use_bidirectional_attention:
        raise ConfigError(
            f"config.json: use_bidirectional_attention is true: this {model_type} is an encoder and writes no text"
        )
    layers = file.num_hidden_layers
    return decoder_config(
        model_type,
        file,
        activation=activation(file.hidden_activation or "gelu_pytorch_tanh"),
        mlp_bias=False,
        layer_windows=sliding_layers(layer_types, file.sliding_window, layers),
        layer_scales=(file.query_pre_attn_scalar**-0.5,) * layers,
        embedding_scale=file.hidden_size**0.5,
        **own,
    )


def gemma2_config(raw: Raw) -> ModelConfig:
    """ModelConfig of a gemma2 config.json."""
    file = read(raw, Gemma2File, "config.json", CONFIG_HINT)
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(file.num_hidden_layers)]
    caps = {"logit_cap": file.final_logit_softcapping, "score_cap": file.attn_logit_softcapping}
    names = {"logit_cap": "final_logit_softcapping", "score_cap": "attn_logit_softcapping"}
    caps |= {field: GEMMA2_CAPS[field] for field, name in names.items() if name not in raw}  # null means none
    return gemma_config("gemma2", file, file.layer_types or alternating, **caps)


def gemma3_config(raw: Raw) -> ModelConfig:
    """ModelConfig of a gemma3_text config.json."""
    file = read(raw, Gemma3File, "config.json", CONFIG_HINT)
    every = file.sliding_window_pattern
    pattern = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(file.num_hidden_layers)]
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


def _ropes(file: Gemma3File) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see everything, and of those that slide: rope_scaling is of the former alone."""
    nested = read(file.rope_parameters or {}, RopeOfLayers, "config.json: rope_parameters")
    head_dim, positions = file.head_dim or 0, file.max_position_embeddings or 0
    whole = {**(nested.full_attention or {}), **(file.rope_scaling or {})}
    sliding = nested.sliding_attention or {}
    return (
        RopeConfig.of(whole, "rope_scaling", head_dim, positions, file.rope_theta or 1e6),
        RopeConfig.of(sliding, "rope_parameters", head_dim, positions, file.rope_local_base_freq),
    )


def gemma3_text_of(raw: Raw) -> ModelConfig:
    """ModelConfig of the decoder that a gemma3 config.json describes."""
    return text_config(raw, {"gemma3_text": lambda text: gemma3_config({**GEMMA3, **text})})


class Gemma2(Llama):
    """Attention that slides in every other layer; scores and logits have soft bounds."""

    read_config = staticmethod(gemma2_config)
    norms = NORMS
    norm_offset = 1.0


class Gemma3(Llama):
    """Five layers that slide for each that sees everything, with a rotation of their own."""

    read_config = staticmethod(gemma3_config)
    norms = NORMS
    norm_offset = 1.0


class Gemma3WithVision(Multimodal):
    """Read for its text alone."""

    read_config = staticmethod(gemma3_text_of)
    norms = NORMS
    norm_offset = 1.0
