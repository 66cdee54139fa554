"""The shapes of known models: the config.json files of `models/`, by name."""

from __future__ import annotations

import os
from typing import Any

from edgekv.checkpoint.shipped import CHECKOUT, INSTALLED, shipped
from edgekv.checkpoint.source import read_config
from edgekv.errors import ConfigError
from edgekv.files import user_path
from edgekv.models import architecture

MIN_ROTARY_POSITIONS = 8192
POSITIONS = {"gpt2": "n_positions"}
LAYERS = {"gpt2": "n_layer"}

Config = dict[str, Any]


def load_shape(shape: str, n_layers: int | None = None, n_positions: int | None = None) -> Config:
    """The config of a named shape, or of a JSON file, with what was asked changed.

    Random weights have no trained length, so plain rotary positions are raised to MIN_ROTARY_POSITIONS. Raises
    ConfigError for an unknown shape.
    """
    config = read_shape(shape)
    ropes = architecture(config).config.ropes
    layers_key = LAYERS.get(config["model_type"], "num_hidden_layers")
    positions_key = POSITIONS.get(config["model_type"], "max_position_embeddings")
    if n_positions is None and ropes and all(rope.kind == "default" for rope in ropes):
        n_positions = max(number(config, positions_key), MIN_ROTARY_POSITIONS)
    config[layers_key] = n_layers or number(config, layers_key)
    config[positions_key] = n_positions or number(config, positions_key)
    return config


def read_shape(shape: str) -> Config:
    """The config of a named shape, or of a JSON file, as it is. Raises ConfigError for an unknown shape."""
    path = user_path(shape) if shape.endswith(".json") else shipped(f"{shape}.json")
    if path is None or not os.path.isfile(path):
        raise ConfigError(
            f"shape={shape!r}: no such shape; accepted are {', '.join(names())}, or a path that ends in .json",
            field="shape",
            value=shape,
            accepted=names(),
        )
    return read_config(path)


def names() -> list[str]:
    """What `load_shape` knows."""
    return sorted({file.stem for folder in (CHECKOUT, INSTALLED) for file in folder.glob("*.json")})


def number(config: Config, key: str) -> int:
    """A positive whole number of the config."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} is {value!r} in the shape; a whole number above 0 is needed")
    return value
