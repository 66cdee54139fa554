"""LLaVA: an ordinary decoder of the Llama family beside a vision tower, whose output takes the place of tokens."""

from __future__ import annotations

from typing import Any

from edgekv.errors import ConfigError
from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw
from edgekv.models.files import LlavaFile
from edgekv.models.llama import Llama, llama_config
from edgekv.schema import read, shown

DEFAULTS = {  # of transformers' LlamaConfig: a text_config names only what differs
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
TEXT_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def llava_config(raw: Raw) -> ModelConfig:
    """ModelConfig of the decoder that a LLaVA config.json describes."""
    text = read(raw, LlavaFile, "config.json", CONFIG_HINT).text_config
    if text is None:
        raise ConfigError("config.json: model_type llava needs a text_config object; copy the model's own config")
    kind = text.get("model_type", "llama")
    whole: dict[str, Any] = {**(DEFAULTS if kind == "llama" else {}), **text}
    if whole["model_type"] not in TEXT_TYPES:
        raise ConfigError(
            f"config.json: text_config of model_type {shown(whole['model_type'])} is not supported; supported: "
            f"{', '.join(TEXT_TYPES)}"
        )
    return llama_config(whole)


def image_token(raw: Raw) -> int | None:
    """The token that stands for an image; None: the model takes none. ConfigError where it is no token."""
    file = read({**raw, "text_config": {}}, LlavaFile, "config.json", CONFIG_HINT)
    return file.image_token_id if file.image_token_index is None else file.image_token_index


class Llava(Llama):
    """The decoder's tensors; those of the vision tower and the projector are read by `edgekv.vision`."""

    prefixes = ("language_model.model.", "model.language_model.")
    ignored = (
        *Llama.ignored,
        r"^language_model\.lm_head\.weight$",
        r"^(model\.)?(vision_tower|multi_modal_projector)\.",
    )
    read_config = staticmethod(llava_config)

    @property
    def head_tensor(self) -> str:
        return "language_model.lm_head.weight" if self.prefix == self.prefixes[0] else "lm_head.weight"
