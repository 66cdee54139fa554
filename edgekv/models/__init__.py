"""Model families: one entry per config.json model_type."""

from collections.abc import Container, Iterable

from edgekv.errors import CheckpointError, ConfigError
from edgekv.models.architecture import Architecture
from edgekv.models.config import Raw
from edgekv.models.gemma import Gemma2, Gemma3, Gemma3WithVision
from edgekv.models.gpt2 import GPT2
from edgekv.models.gpt_oss import GptOss
from edgekv.models.granite import Granite
from edgekv.models.lfm2 import Lfm2
from edgekv.models.llama import Llama
from edgekv.models.llava import Llava
from edgekv.models.ministral3 import Ministral3, Mistral3
from edgekv.models.mistral import Mistral
from edgekv.models.mixtral import Mixtral
from edgekv.models.olmo2 import Olmo2
from edgekv.models.phi3 import Phi3
from edgekv.models.qwen import Qwen2, Qwen3
from edgekv.models.qwen3_5 import Qwen35, Qwen35WithVision
from edgekv.models.qwen3_moe import Qwen3Moe
from edgekv.models.smollm3 import SmolLM3
from edgekv.schema import shown

MODELS: dict[str, type[Architecture]] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gpt2": GPT2,
    "gemma2": Gemma2,
    "gemma3": Gemma3WithVision,
    "gemma3_text": Gemma3,
    "phi3": Phi3,
    "smollm3": SmolLM3,
    "olmo2": Olmo2,
    "granite": Granite,
    "ministral3": Ministral3,
    "mistral3": Mistral3,
    "lfm2": Lfm2,
    "qwen3_5": Qwen35WithVision,
    "qwen3_5_text": Qwen35,
    "qwen3_moe": Qwen3Moe,
    "mixtral": Mixtral,
    "gpt_oss": GptOss,
    "llava": Llava,
}


def architecture(raw: Raw, tensors: Container[str] | None = None) -> Architecture:
    """The architecture that a config.json describes, with the tensor prefix that the checkpoint uses.

    Raises ConfigError for an unsupported architecture (naming the supported ones) or a contradictory
    config, CheckpointError when ``tensors`` (the checkpoint's names) don't hold its embedding table.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODELS:
        named = model_type or raw.get("architectures") or "none given"
        raise ConfigError(
            f"config.json: architecture {shown(named)} is not supported; supported model_type values: "
            f"{', '.join(sorted(MODELS))}"
        )
    family = MODELS[model_type]
    prefixes = [p for p in family.prefixes if tensors is None or p + family.probe in tensors]
    if not prefixes:
        raise CheckpointError(
            f"the checkpoint has no tensor {family.prefixes[0]}{family.probe}: "
            f"it is not the {model_type} model that its config.json describes"
        )
    return family(family.read_config(raw), prefixes[0])


def unexpected(arch: Architecture, names: Iterable[str]) -> list[str]:
    """Checkpoint tensors that the architecture neither uses nor knows to ignore."""
    return sorted(set(names) - set(arch.tensors()) - {n for n in names if arch.ignores(n)})
