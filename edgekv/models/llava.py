"""Models with vision, LLaVA and Mistral 3: a decoder in text_config, whose tensors are under language_model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import Struct

from edgekv.checks import read_fields
from edgekv.errors import ConfigError, short_repr
from edgekv.models import find_family
from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw, Token
from edgekv.models.llama import Llama

LLAMA = {  # transformers' LlamaConfig, for what the config does not say
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


class MultimodalConfigSchema(Struct):
    """The fields of a model with vision beside its decoder's, which are in text_config."""

    text_config: dict[str, Any] | None = None
    image_token_index: Token | None = None
    image_token_id: Token | None = None
    projector_hidden_act: str | None = None


class Multimodal(Llama):
    """The decoder alone: tensors of the vision tower and the projector are not its own.

    text_types: model_type values of the text_config, the first of which is meant where none is named, and what
    such a config need not say.
    """

    text_types: ClassVar[Mapping[str, Raw]]
    prefixes: tuple[str, ...] = ("language_model.model.", "model.language_model.")
    ignored = (
        *Llama.ignored,
        r"^language_model\.lm_head\.weight$",
        r"^(model\.)?(vision_tower|multi_modal_projector)\.",
    )

    @classmethod
    def read_config(cls, raw: Raw) -> ModelConfig:
        text = read_fields(raw, MultimodalConfigSchema, "config.json", CONFIG_HINT).text_config
        if text is None:
            what = f"model_type {raw['model_type']} needs a text_config object"
            raise ConfigError(f"config.json: {what}; copy the model's own config")
        kind = text.get("model_type", next(iter(cls.text_types)))
        if not isinstance(kind, str) or kind not in cls.text_types:
            what = f"text_config of model_type {short_repr(kind)} is not supported"
            raise ConfigError(f"config.json: {what}; supported: {', '.join(cls.text_types)}")
        return find_family(kind).read_config({**cls.text_types[kind], **text, "model_type": kind})

    def __init__(self, config: ModelConfig, prefix: str) -> None:
        super().__init__(config, prefix)
        if prefix == "language_model.model.":
            self.head_tensor = "language_model.lm_head.weight"


class Llava(Multimodal):
    """The decoder beside the vision tower, whose output takes the place of tokens."""

    text_types: ClassVar[Mapping[str, Raw]] = {"llama": LLAMA, "mistral": {}, "qwen2": {}, "qwen3": {}}


class Mistral3(Multimodal):
    """Mistral 3 with vision, read for its text alone."""

    text_types: ClassVar[Mapping[str, Raw]] = {"mistral": {}, "ministral3": {}}


def image_token(raw: Raw) -> int | None:
    """Returns the token that stands for an image, or None if the model takes none. Raises ConfigError."""
    if raw.get("model_type") != "llava":
        return None
    file = read_fields({**raw, "text_config": {}}, MultimodalConfigSchema, "config.json", CONFIG_HINT)
    return file.image_token_id if file.image_token_index is None else file.image_token_index
