"""LLaVA: an ordinary decoder of the Llama family beside a vision tower, whose output takes the place of tokens."""

from __future__ import annotations

from typing import Any

from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw
from edgekv.models.files import MultimodalFile
from edgekv.models.llama import llama_config
from edgekv.models.multimodal import Multimodal, text_config
from edgekv.schema import read

TEXT_TYPES: dict[str, dict[str, Any]] = {
    "llama": {  # transformers' LlamaConfig
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
}


def llava_config(raw: Raw) -> ModelConfig:
    """ModelConfig of the decoder that a LLaVA config.json describes."""
    return llama_config(text_config(raw, TEXT_TYPES))


def image_token(raw: Raw) -> int | None:
    """The token that stands for an image; None: the model takes none. ConfigError where it is no token."""
    if raw.get("model_type") != "llava":
        return None
    file = read({**raw, "text_config": {}}, MultimodalFile, "config.json", CONFIG_HINT)
    return file.image_token_id if file.image_token_index is None else file.image_token_index


class Llava(Multimodal):
    """The decoder beside the vision tower."""

    read_config = staticmethod(llava_config)
