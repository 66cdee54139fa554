"""A model of random weights in the shape of a known one: to time, or plan, what has not been downloaded."""

from __future__ import annotations

import pathlib
from typing import Any

from edgekv.checkpoint.shapes import load_shape
from edgekv.linear.formats import weight_format
from edgekv.linear.random import RandomWeights, random_store
from edgekv.models import architecture
from edgekv.session.model import Model
from edgekv.types import TaskProgress

SPARE_POSITIONS = 4096  # beyond those that are asked for, where a shape has too few learned ones


def shape_model(
    shape: str, n_layers: int | None, positions: int, weights: str, progress: TaskProgress | None = None
) -> Model:
    """A shape of `edgekv.checkpoint.shapes` with ``n_layers`` layers (None: its own).

    positions: tokens that it must be able to read. weights: a format's name, or auto. Raises ConfigError (field
    shape, or weights).
    """
    config = shape_config(shape, n_layers, positions)
    store = random_store(config, weight_format(weights, architecture(config)), progress)
    return Model(pathlib.Path(store.folder), config, None, store)


def shape_config(shape: str, n_layers: int | None, positions: int) -> dict[str, Any]:
    """The config that `shape_model` draws weights for."""
    config = load_shape(shape, n_layers, None)
    arch = architecture(config)
    if arch.learned_positions and positions > arch.config.max_positions:
        config = load_shape(shape, n_layers, positions + SPARE_POSITIONS)
    return config


def unread_model(name: str, config: dict[str, Any]) -> Model:
    """A model of a config alone, which nothing is drawn or read for: to plan with. Raises as `architecture`."""
    return Model(pathlib.Path(name), config, None, RandomWeights(config))
