"""The decoder of a model that also sees: its config lies in text_config, its tensors under language_model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgekv.errors import ConfigError
from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw
from edgekv.models.files import MultimodalFile
from edgekv.models.llama import Llama
from edgekv.schema import read, shown


def text_config(raw: Raw, kinds: Mapping[str, Callable[[Raw], ModelConfig]]) -> ModelConfig:
    """ModelConfig of the decoder. kinds: its model_type values -> what reads such a config.json.

    The first is meant where no model_type is named. Raises ConfigError for others.
    """
    text = read(raw, MultimodalFile, "config.json", CONFIG_HINT).text_config
    if text is None:
        raise ConfigError(
            f"config.json: model_type {raw['model_type']} needs a text_config object; copy the model's own config"
        )
    kind = text.get("model_type", next(iter(kinds)))
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(
            f"config.json: text_config of model_type {shown(kind)} is not supported; supported: {', '.join(kinds)}"
        )
    return kinds[kind]({**text, "model_type": kind})


class Multimodal(Llama):
    """Tensors of the vision tower and the projector are not the decoder's."""

    prefixes = ("language_model.model.", "model.language_model.")
    ignored = (
        *Llama.ignored,
        r"^language_model\.lm_head\.weight$",
        r"^(model\.)?(vision_tower|multi_modal_projector)\.",
    )

    @property
    def head_tensor(self) -> str:
        return "language_model.lm_head.weight" if self.prefix == self.prefixes[0] else "lm_head.weight"
