"""Where the files of `models/` lie: the shapes and models by name, and the model used when no --model is given."""

from __future__ import annotations

import pathlib
import sys

CHECKOUT = pathlib.Path(__file__).resolve().parents[2] / "models"
INSTALLED = pathlib.Path(sys.prefix) / "share" / "edgekv" / "models"


def shipped(name: str) -> pathlib.Path | None:
    """A file of `models/` by its name there: in the checkout, else where the wheel put it."""
    return next((folder / name for folder in (CHECKOUT, INSTALLED) if (folder / name).is_file()), None)


def shipped_model(name: str) -> pathlib.Path | None:
    """The folder of a model that ships with edgekv: demo, scenes."""
    config = shipped(f"{name}/config.json")
    return config and config.parent
