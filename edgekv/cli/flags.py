"""Parameters as the command line calls them: errors and notes of the library name `ctx`, people type --ctx."""

from __future__ import annotations

import dataclasses
import re

from edgekv.session.options import LoadOptions
from edgekv.session.sampling_params import SamplingParams

OTHER_NAMES = {
    "images": "--image",
    "loras": "--lora",
    "model": "--model",
    "shape": "--shape",
    "layers": "--layers",
    "hz": "--hz",
}
SHARED_NAMES = (
    "max_new_tokens",
    "stop",
    "prompt",
    "chat_template",
    "json_schema",
    "session",
    "output",
    "max_request",
    "prefix_cache",
)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


FLAGS = {
    **{field.name: _flag(field.name) for field in dataclasses.fields(LoadOptions)},
    **{field.name: _flag(field.name) for field in dataclasses.fields(SamplingParams)},
    **{name: _flag(name) for name in SHARED_NAMES},
    **OTHER_NAMES,
}
"""The option of a parameter, the `field` of an `EdgeKVError`."""

_NAMES = "|".join(sorted(FLAGS, key=len, reverse=True))
_VALUE = r"'[^']*'|\"[^\"]*\"|[^\s,;:)]+"
_MENTION = re.compile(rf"`({_NAMES})`|(?<![-\w.:,=])({_NAMES})=({_VALUE})")


def in_flags(text: str) -> str:
    """The text with every `name` and ``name=value`` of a parameter as its option: --name, --name value."""

    def flag(found: re.Match[str]) -> str:
        if found[1]:
            return FLAGS[found[1]]
        return f"{FLAGS[found[2]]} {found[3].strip(chr(39) + chr(34))}"

    return _MENTION.sub(flag, text)
