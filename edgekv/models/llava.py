"""LLaVA: an ordinary decoder of the Llama family beside a vision tower, whose output takes the place of tokens."""

from __future__ import annotations

from collections.abc import Callable

from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw
from edgekv.models.files import MultimodalFile
from edgekv.models.llama import llama_config
from edgekv.models.mistral import mistral_config
from edgekv.models.multimodal import Multimodal, text_config
from edgekv.models.qwen import qwen2_config, qwen3_config
from edgekv.schema import read

LLAMA = {  # transformers' LlamaConfig, for what the config does not say
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
TEXT_TYPES: dict[str, Callable[[Raw], ModelConfig]] = {
    "llama": lambda raw: llama_config({**LLAMA, **raw}),
    "mistral": mistral_config,
    "qwen2": qwen2_config,
    "qwen3": qwen3_config,
}


def llava_config(raw: Raw) -> ModelConfig:
    """ModelConfig of the decoder that a LLaVA config.json describes."""
    return text_config(raw, TEXT_TYPES)


def image_token(raw: Raw) -> int | None:
    """The token that stands for an image; None: the model takes none. ConfigError where it is no token."""
    if raw.get("model_type") != "llava":
        return None
    file = read({**raw, "text_config": {}}, MultimodalFile, "config.json", CONFIG_HINT)
    return file.image_token_id if file.image_token_index is None else file.image_token_index


class Llava(Multimodal):
    """The decoder beside the vision tower."""

    read_config = staticmethod(llava_config)
