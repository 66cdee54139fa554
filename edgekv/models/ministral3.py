"""Ministral 3: Llama with yarn, whose queries grow with their position; also the decoder of mistral3 models."""

from __future__ import annotations

from typing import Any

from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw
from edgekv.models.files import Ministral3File
from edgekv.models.llama import Llama, decoder_config, llama_config
from edgekv.models.multimodal import Multimodal, text_config
from edgekv.schema import read

TEXT_TYPES: dict[str, dict[str, Any]] = {"mistral": {}, "ministral3": {}}


def ministral3_config(raw: Raw) -> ModelConfig:
    """ModelConfig of a Ministral 3 config.json."""
    file = read(raw, Ministral3File, "config.json", CONFIG_HINT)
    windows = (file.sliding_window,) * file.num_hidden_layers
    return decoder_config(
        "ministral3", file, layer_windows=windows, qkv_bias=False, out_bias=False, mlp_bias=False
    )


def mistral3_config(raw: Raw) -> ModelConfig:
    """ModelConfig of the decoder of a Mistral 3 config.json (Mistral Small 3.1, Ministral 3)."""
    text = text_config(raw, TEXT_TYPES)
    return ministral3_config(text) if text["model_type"] == "ministral3" else llama_config(text)


class Ministral3(Llama):
    """Llama whose queries grow with their positions."""

    read_config = staticmethod(ministral3_config)


class Mistral3(Multimodal):
    """Read for its text alone."""

    read_config = staticmethod(mistral3_config)
