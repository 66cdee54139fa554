"""Where the files of `models/` lie: the shapes, and the models that ship with edgekv, by name."""

from __future__ import annotations

import os
import pathlib
import sys

from edgekv.errors import CheckpointError

CHECKOUT = pathlib.Path(__file__).resolve().parents[2] / "models"
INSTALLED = pathlib.Path(sys.prefix) / "share" / "edgekv" / "models"


def shipped(name: str) -> pathlib.Path | None:
    """A file of `models/` by its name there: in the checkout, else where the wheel put it."""
    return next((folder / name for folder in (CHECKOUT, INSTALLED) if (folder / name).is_file()), None)


def shipped_model(name: str) -> pathlib.Path | None:
    """The folder of a model that ships with edgekv: demo, scenes."""
    config = shipped(f"{name}/config.json")
    return config and config.parent


def find_model(path: str | os.PathLike[str]) -> pathlib.Path:
    """Where a model lies: ``path``, or, where nothing is there, the shipped model of that name.

    Raises CheckpointError (field model) for what is no path, and where there is nothing.
    """
    place = pathlib.Path(path).expanduser() if isinstance(path, (str, os.PathLike)) else None
    found = place if place is None or place.exists() else shipped_model(os.fspath(path))
    if found is None:
        raise CheckpointError(
            f"model={path!r}: there is none; give a Hugging Face folder, a .safetensors or .gguf file or a store, "
            "or demo or scenes, which ship with edgekv",
            field="model",
            value=path,
            accepted=["a path", "demo", "scenes"],
        )
    return found
