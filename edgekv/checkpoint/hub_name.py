"""Names of models on the Hugging Face Hub: org/name, org/name@revision, org/name:file.gguf."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re

from edgekv.files import user_path

GGUF = ".gguf"
_PART = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@(\w[\w.-]*(?:/\w[\w.-]*)*))?(?::([^:]+\.gguf))?", re.ASCII)
_FOLDER = re.compile(r"models--(.+?)--(.+)")


@dataclasses.dataclass(frozen=True)
class HubName:
    """A model of the Hub: its repository, a branch, tag or commit (None: main), and which GGUF file of it."""

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{revision}" + (f":{self.file}" if self.file else "")


def parse_name(text: str) -> HubName | None:
    """The model that ``org/name[@revision][:file.gguf]`` means; None for what is not of this form."""
    found = _NAME.fullmatch(text)
    return HubName(*found.groups()) if found and ".." not in text and len(found[1]) <= 96 else None


def hub_name(path: str | os.PathLike[str]) -> HubName | None:
    """What a user may type for ``path``; None where it is a path: something is there, or its folder is."""
    place = user_path(path)
    is_path = os.path.exists(place) or os.path.exists(place.parent)
    return None if is_path else parse_name(os.fspath(path))


def name_of(place: pathlib.Path) -> str | None:
    """The name of what lies in the Hub's cache; None for any other path."""
    folder, file = (place.parent, place.name) if place.suffix == GGUF else (place, None)
    found = _FOLDER.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    if found is None:
        return None
    try:
        is_main = (folder.parents[1] / "refs" / "main").read_text().strip() == folder.name
    except OSError:
        is_main = False
    return str(HubName(f"{found[1]}/{found[2]}", None if is_main else folder.name, file))
