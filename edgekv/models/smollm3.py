"""SmolLM3: Llama in which every fourth layer, as a rule, rotates nothing."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from msgspec import Meta

from edgekv.errors import ConfigError
from edgekv.models.config import Layers, ModelConfig, Raw, sliding_layers
from edgekv.models.gguf import LLAMA_KEYS, LLAMA_NAMES, GgufNames
from edgekv.models.llama import Llama, LlamaConfigSchema, llama_config
from edgekv.models.rope import Positions, Theta


class SmolLM3ConfigSchema(LlamaConfigSchema):
    """smollm3; no_rope_layers: 1 for each layer that rotates."""

    max_position_embeddings: Positions | None = 32768
    rope_theta: Theta | None = 2e6
    tie_word_embeddings: bool | None = True
    no_rope_layers: list[Annotated[int, Meta(ge=0, le=1)]] | None = None
    no_rope_layer_interval: Layers = 4


def _rotating_layers(file: SmolLM3ConfigSchema) -> list[bool]:
    layers, every = file.num_hidden_layers, file.no_rope_layer_interval
    if file.no_rope_layers is None:
        return [(i + 1) % every != 0 for i in range(layers)]
    if len(file.no_rope_layers) < layers:
        raise ConfigError(
            f"config.json: no_rope_layers has {len(file.no_rope_layers)} entries for {layers} layers"
        )
    return [bool(rotates) for rotates in file.no_rope_layers[:layers]]


class SmolLM3(Llama):
    """Llama; which layers rotate is data of its config."""

    schema = SmolLM3ConfigSchema
    gguf = GgufNames("smollm3", "smollm3", LLAMA_NAMES, LLAMA_KEYS, interleaved=("attn_q", "attn_k"))

    @classmethod
    def model_config(cls, file: SmolLM3ConfigSchema, raw: Raw) -> ModelConfig:
        whole = llama_config("smollm3", file)
        rope, rotates = whole.layer_ropes[0], _rotating_layers(file)
        types = file.layer_types or ["full_attention" if turns else "sliding_attention" for turns in rotates]
        window = file.sliding_window if file.use_sliding_window else None
        return dataclasses.replace(
            whole,
            layer_ropes=tuple(rope if turns else None for turns in rotates),
            layer_windows=sliding_layers(types, window, whole.n_layers),
        )
