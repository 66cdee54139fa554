"""Ministral 3: Llama with yarn, whose queries grow with their position; also the decoder of mistral3 models."""

from __future__ import annotations

from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw
from edgekv.models.files import Ministral3File
from edgekv.models.llama import Llama, decoder_config
from edgekv.models.mistral import mistral_config
from edgekv.models.multimodal import Multimodal, text_config
from edgekv.schema import read


def ministral3_config(raw: Raw) -> ModelConfig:
    """ModelConfig of a Ministral 3 config.json."""
    file = read(raw, Ministral3File, "config.json", CONFIG_HINT)
    windows = (file.sliding_window,) * file.num_hidden_layers
    return decoder_config(
        "ministral3", file, layer_windows=windows, qkv_bias=False, out_bias=False, mlp_bias=False
    )


def mistral3_config(raw: Raw) -> ModelConfig:
    """ModelConfig of the decoder of a Mistral 3 config.json (Mistral Small 3.1, Ministral 3)."""
    return text_config(raw, {"mistral": mistral_config, "ministral3": ministral3_config})


class Ministral3(Llama):
    """Llama whose queries grow with their positions."""

    read_config = staticmethod(ministral3_config)


class Mistral3(Multimodal):
    """Read for its text alone."""

    read_config = staticmethod(mistral3_config)
