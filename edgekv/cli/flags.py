"""Parameters as the command line calls them: errors and notes of the library name `ctx`, people type --ctx."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container

from edgekv.errors import EdgeKVError
from edgekv.session.options import LoadOptions
from edgekv.session.sampling_params import SamplingParams

QUOTES = "'\""
HIDDEN = "\0"  # stands in a message for what a user gave
OTHER_NAMES = {
    "images": "--image",
    "loras": "--lora",
    "model": "--model",
    "shape": "--shape",
    "layers": "--layers",
    "hz": "--hz",
    "meter": "--meter",
}
SHARED_NAMES = (
    "max_new_tokens",
    "stop",
    "prompt",
    "chat_template",
    "json_schema",
    "session",
    "output",
    "calibrate",
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

OTHERWISE = {"meter": "--power"}
"""The option that some commands have in place of the usual one."""

_NAMES = "|".join(sorted(FLAGS, key=len, reverse=True))
_QUOTED = r"'[^']*'|\"[^\"]*\""
_MENTION = re.compile(rf"`({_NAMES})`|(?<![-\w.:,=/])({_NAMES})=({_QUOTED}|[^\s,;:)]+)|(?<!\w)(?:{_QUOTED})")


def in_flags(said: EdgeKVError | str, options: Container[str] | None = None) -> str:
    """An error, or a note of the library, with every `name` and ``name=value`` of a parameter as its option.

    options: those of the command; what it lacks stays as it is. None: all. What an error was given as ``value``
    and what stands in quotes is somebody's text and stays as well.
    """
    text, value = str(said), said.value if isinstance(said, EdgeKVError) else None
    if isinstance(value, str) and value:
        text = text.replace(value, HIDDEN)

    def flag(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        known = (FLAGS.get(name), OTHERWISE.get(name))
        option = next((each for each in known if each and (not options or each in options)), None)
        if option is None:
            return found[0]
        return option if found[1] else f"{option} {found[3].strip(QUOTES) or found[3]}"

    shown = _MENTION.sub(flag, text)
    return shown.replace(HIDDEN, value) if isinstance(value, str) else shown
