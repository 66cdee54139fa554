"""Where a model lies: at a path, among those that ship with edgekv (`models/`), or in the Hub's cache."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

from edgekv.checkpoint.checkpoint import read_config
from edgekv.checkpoint.hub import hub_name, locate
from edgekv.errors import CheckpointError, ConfigError
from edgekv.files import user_path
from edgekv.models import architecture

CHECKOUT = pathlib.Path(__file__).resolve().parents[2] / "models"
INSTALLED = pathlib.Path(sys.prefix) / "share" / "edgekv" / "models"
MIN_ROTARY_POSITIONS = 8192
Config = dict[str, Any]


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


def load_shape(shape: str, n_layers: int | None = None, n_positions: int | None = None) -> Config:
    """The config of a named shape, or of a JSON file, with what was asked changed.

    Random weights have no trained length, so plain rotary positions are raised to MIN_ROTARY_POSITIONS. Raises
    ConfigError for an unknown shape.
    """
    config = read_shape(shape)
    arch = architecture(config)
    ropes, trained = arch.config.ropes, config.get(arch.positions_key) or arch.config.max_positions
    if ropes and all(rope.kind == "default" for rope in ropes):
        trained = max(trained, MIN_ROTARY_POSITIONS)
    config[arch.layers_key] = n_layers or arch.config.n_layers
    config[arch.positions_key] = n_positions or trained
    return config


def read_shape(shape: str) -> Config:
    """The config of a named shape, or of a JSON file, as it is. Raises ConfigError for an unknown shape."""
    path = user_path(shape) if shape.endswith(".json") else shipped(f"{shape}.json")
    if path is None or not os.path.isfile(path):
        raise ConfigError(
            f"shape={shape!r}: no such shape; accepted are {', '.join(shape_names())}, or a path "
            "that ends in .json",
            field="shape",
            value=shape,
            accepted=shape_names(),
        )
    return read_config(path)


def shape_names() -> list[str]:
    """What `load_shape` knows."""
    return sorted({file.stem for folder in (CHECKOUT, INSTALLED) for file in folder.glob("*.json")})
