"""How a session is opened: one list of options for `Session.load`, `Session.restore` and the command line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from edgekv.checks import Count, check_fields, refused
from edgekv.errors import ConfigError
from edgekv.kvcache import CacheSpec
from edgekv.types import Path

LORA_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """The options of a session. Raises an EdgeKVError, whose field is the option, for a value of a wrong type.

    kv: the KV scheme: a name of CACHES with its knobs, ``name:knob=value,...``, a CacheSpec, or "auto", the best
        one within ``kv_budget``. None is "dense", or with a ``kv_budget`` "steps": ever fewer bits for the oldest
        tokens, so that the budget holds.
    ctx: tokens that the conversation can have; None is 8192, or the model's positions where these are fewer.
    weights: the format of the weights: "f32", "int8", "int8-32", "int4", "int4-32", or "auto", by its size. With
        ",head=int8" behind it the language-model head has another format.
    kv_budget: bytes that the cache may take; None is no bound (for kv "auto" a quarter of the free memory,
        or less, so that the weights fit too).
    overflow: what happens when the conversation outgrows ``ctx``: a name of CONTEXT_SHIFTS, "stop" or "slide".
    draft: what guesses the next tokens, so that one pass checks several; the text is what it is without. "none",
        "ngram" (what followed the latest tokens where they stood before), "auto" (ngram on the device cpu), or the
        path of a smaller model with the same vocabulary.
    device: "cpu" (Numba; onnxruntime for float32 weights), "cuda" (CuPy), "numpy" (the slow reference), or
        "auto": cuda where CuPy, a GPU and the scheme's kernels are, else cpu. The command line's default is auto;
        here it is cpu, so that a program gives the same text on every machine and takes no GPU that it was not
        told to take.
    threads: cores to use; None is all that this process may use, and for weight products as many of them as a
        short measurement at the first load finds fastest, which is then remembered.
    slots: conversations that may generate at once, each a `Session.fork` in a thread of its own: their tokens
        share passes of the linear layers, and a prompt is read between them. More than 1: device "cpu" or
        "numpy", and no drafts.
    config: a config.json for a .safetensors file that has none beside it.
    tokenizer: a tokenizer's file or folder, where none lies beside the weights.
    adapter: an adapter.safetensors that was trained for this checkpoint and this scheme.
    lora: a LoRA as PEFT saves it, as FOLDER or FOLDER:scale, merged into the checkpoint's weights.
    loras: LoRAs by name, each as FOLDER or FOLDER:scale, beside the weights: `Session.use_lora` chooses one for a
        conversation. Device "cpu" or "numpy".
    """

    kv: str | CacheSpec | None = None
    ctx: Count | None = None
    weights: str = "auto"
    kv_budget: Count | None = None
    overflow: str = "stop"
    draft: Path = "none"
    device: str = "cpu"
    threads: Count | None = None
    slots: Count = 1
    config: Path | None = None
    tokenizer: Path | None = None
    adapter: Path | None = None
    lora: Path | None = None
    loras: Mapping[str, Path] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.slots > 1 and self.draft not in ("none", "auto"):
            raise refused("draft", self.draft, "none or auto, with more than one slot")
        for name in self.loras:
            if not LORA_NAME.fullmatch(name):
                raise refused("loras", name, "names of 1 to 64 letters, digits, dots and dashes")


def changed(options: LoadOptions | None, changes: Mapping[str, Any]) -> LoadOptions:
    """The options (None: the defaults) with those given by name. Raises ConfigError for a name that none has."""
    names = [field.name for field in dataclasses.fields(LoadOptions)]
    for name, value in changes.items():
        if name not in names:
            raise ConfigError(
                f"{name}={value!r:.60} is no option; accepted: {', '.join(names)}",
                field=name,
                value=value,
                accepted=names,
            )
    return dataclasses.replace(options or LoadOptions(), **changes)
