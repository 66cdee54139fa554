"""Model families by config.json's model_type.

A package adds one by an entry point of the group ``edgekv.families``, whose name is the model_type, or by
`register_family`: a subclass of `Architecture`, mostly of `edgekv.models.llama.Llama`, with its config's schema.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from importlib import import_module
from importlib.metadata import entry_points

from edgekv.errors import CheckpointError, ConfigError, short_repr
from edgekv.models.architecture import Architecture
from edgekv.models.config import Raw
from edgekv.models.gguf import GgufNames

GROUP = "edgekv.families"
FAMILIES: dict[str, str | type[Architecture]] = {  # module:class, imported when the type is met
    "llama": "llama:Llama",
    "mistral": "variants:Mistral",
    "qwen2": "variants:Qwen2",
    "qwen3": "variants:Qwen3",
    "gemma2": "gemma:Gemma2",
    "gemma3": "gemma:Gemma3WithVision",
    "gemma3_text": "gemma:Gemma3",
    "phi3": "variants:Phi3",
    "smollm3": "variants:SmolLM3",
    "olmo2": "variants:Olmo2",
    "granite": "variants:Granite",
    "gpt2": "gpt2:GPT2",
    "ministral3": "variants:Ministral3",
    "mistral3": "llava:Mistral3",
    "lfm2": "recurrent:Lfm2",
    "qwen3_5": "recurrent:Qwen35WithVision",
    "qwen3_5_text": "recurrent:Qwen35",
    "qwen3_moe": "mixtures:Qwen3Moe",
    "mixtral": "mixtures:Mixtral",
    "gpt_oss": "mixtures:GptOss",
    "llava": "llava:Llava",
}


def register_family(model_type: str, family: type[Architecture]) -> None:
    """Adds a family, or takes the place of one. Raises ConfigError for what is no subclass of `Architecture`."""
    if not (isinstance(family, type) and issubclass(family, Architecture)):
        raise ConfigError(f"family={family!r} of {model_type}: accepted: a subclass of edgekv's Architecture")
    FAMILIES[model_type] = family


def find_family(model_type: object) -> type[Architecture]:
    """Returns the family of a model_type. Raises ConfigError for an unknown one, naming those that are known."""
    if isinstance(model_type, str) and model_type not in FAMILIES:
        for point in entry_points(group=GROUP, name=model_type):
            register_family(model_type, point.load())
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        what = f"architecture {short_repr(model_type)} is not supported"
        raise ConfigError(f"config.json: {what}; supported model_type values: {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[model_type]
    if isinstance(family, str):
        module, _, name = family.partition(":")
        family = FAMILIES[model_type] = getattr(import_module(f"edgekv.models.{module}"), name)
    return family


def stacks_experts(raw: Raw) -> bool:
    """Whether such a checkpoint holds the experts of a layer in one tensor; not of an unknown family."""
    try:
        return find_family(raw.get("model_type")).stacked_experts
    except ConfigError:
        return False


def gguf_families() -> dict[str, GgufNames]:
    """Returns how each architecture is written in GGUF files, by GGUF's name of it."""
    outside = [point.name for point in entry_points(group=GROUP)]
    found = [vars(find_family(model_type)).get("gguf") for model_type in dict.fromkeys([*FAMILIES, *outside])]
    return {names.architecture: names for names in found if names is not None}


def architecture(raw: Raw, tensors: Container[str] | None = None) -> Architecture:
    """Returns the architecture that a config.json describes, with the tensor prefix that the checkpoint uses.

    Raises ConfigError for an unsupported architecture or a contradictory config, CheckpointError when ``tensors``
    (the checkpoint's names) don't hold its embedding table.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        model_type = model_type or raw.get("architectures") or "none given"
    family = find_family(model_type)
    prefixes = [p for p in family.prefixes if tensors is None or p + family.required_tensor in tensors]
    if not prefixes:
        what = f"the checkpoint has no tensor {family.prefixes[0]}{family.required_tensor}"
        raise CheckpointError(f"{what}: it is not the {model_type} model that its config.json describes")
    return family(family.read_config(raw), prefixes[0])


def unexpected(arch: Architecture, names: Iterable[str]) -> list[str]:
    """Returns checkpoint tensors that the architecture neither uses nor knows to ignore."""
    return sorted(set(names) - set(arch.tensors()) - {n for n in names if arch.ignores(n)})
