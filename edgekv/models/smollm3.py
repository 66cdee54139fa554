"""SmolLM3: Llama in which every fourth layer, as a rule, rotates nothing."""

from __future__ import annotations

import dataclasses

from edgekv.errors import ConfigError
from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw, sliding_layers
from edgekv.models.files import SmolLM3File
from edgekv.models.llama import Llama, decoder_config
from edgekv.schema import read


def smollm3_config(raw: Raw) -> ModelConfig:
    """ModelConfig of a SmolLM3 config.json."""
    file = read(raw, SmolLM3File, "config.json", CONFIG_HINT)
    whole = decoder_config("smollm3", file)
    rope, rotates = whole.layer_ropes[0], _rotating_layers(file)
    types = file.layer_types or ["full_attention" if turns else "sliding_attention" for turns in rotates]
    window = file.sliding_window if file.use_sliding_window else None
    return dataclasses.replace(
        whole,
        layer_ropes=tuple(rope if turns else None for turns in rotates),
        layer_windows=sliding_layers(types, window, whole.n_layers),
    )


def _rotating_layers(file: SmolLM3File) -> list[bool]:
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

    read_config = staticmethod(smollm3_config)
