"""Mistral: Llama in which every layer slides."""

from __future__ import annotations

from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw, sliding_layers
from edgekv.models.files import LlamaFile
from edgekv.models.llama import Llama, decoder_config
from edgekv.schema import read

WINDOW = 4096  # where sliding_window is absent; null means none


def mistral_config(raw: Raw) -> ModelConfig:
    """ModelConfig of a Mistral config.json."""
    file = read(raw, LlamaFile, "config.json", CONFIG_HINT)
    layers = file.num_hidden_layers
    window = file.sliding_window if "sliding_window" in raw else WINDOW
    types = file.layer_types or ["sliding_attention"] * layers
    return decoder_config(
        "mistral",
        file,
        layer_windows=sliding_layers(types, None if file.use_sliding_window is False else window, layers),
    )


class Mistral(Llama):
    """Llama; which layers slide is data of its config."""

    read_config = staticmethod(mistral_config)
