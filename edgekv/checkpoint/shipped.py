"""Where a model lies: at a path, among those that ship with edgekv (`models/`), or in the Hub's cache."""

from __future__ import annotations

import os
import pathlib
import sys

from edgekv.checkpoint.hub import locate
from edgekv.checkpoint.hub_name import hub_name
from edgekv.errors import CheckpointError
from edgekv.files import user_path

CHECKOUT = pathlib.Path(__file__).resolve().parents[2] / "models"
INSTALLED = pathlib.Path(sys.prefix) / "share" / "edgekv" / "models"


def shipped(name: str) -> pathlib.Path | None:
    """A file of `models/` by its name there: in the checkout, else where the wheel put it."""
    return next((folder / name for folder in (CHECKOUT, INSTALLED) if os.path.isfile(folder / name)), None)


def shipped_model(name: str) -> pathlib.Path | None:
    """The folder of a model that ships with edgekv: demo, scenes."""
    config = shipped(f"{name}/config.json")
    return config and config.parent


def find_model(path: str | os.PathLike[str]) -> pathlib.Path:
    """Where a model lies: ``path``, or, where nothing is there, the shipped model or the Hub's of that name.

    A model of the Hub that is not whole in its cache is downloaded. Raises CheckpointError (field model) for what
    is no path, where there is nothing, and where a download fails.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise _none(path)
    place = user_path(path)
    if os.path.exists(place):
        return place
    name = hub_name(path)
    found = locate(name) if name else shipped_model(os.fspath(path))
    if found is None:
        raise _none(path)
    return found


def _none(path: object) -> CheckpointError:
    return CheckpointError(
        f"model={path!r}: there is none; give a Hugging Face folder, a .safetensors or .gguf file, a store, a "
        "name on the Hub (org/name), or demo or scenes, which ship with edgekv",
        field="model",
        value=path,
        accepted=["a path", "org/name", "demo", "scenes"],
    )
