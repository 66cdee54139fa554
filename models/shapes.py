"""The shapes of known models: which tensors a Hugging Face config.json asks for, by architecture.

The .json files in this folder are the published values; each can be given to `--config` too.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgekv.checkpoint.source import read_config
from edgekv.errors import ConfigError
from edgekv.models import architecture

SHAPES = Path(__file__).resolve().parent
MIN_ROTARY_POSITIONS = 8192

Config = dict[str, Any]


@dataclass(frozen=True)
class Tensor:
    """name; shape; and its values: normal around `mean` with deviation `std`."""

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float


def number(config: Config, key: str, default: int | None = None) -> int:
    """A positive whole number of the config."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} is {value!r} in the shape; a whole number above 0 is needed")
    return value


POSITIONS = {"gpt2": "n_positions"}
LAYERS = {"gpt2": "n_layer"}
RESIDUAL = (".o_proj.weight", ".down_proj.weight", ".c_proj.weight")  # written to the residual stream
NORM_BIAS = re.compile(r"ln_\w+\.bias$")


def tensor_list(config: Config) -> list[Tensor]:
    """Every tensor of a model of this config, in the order of its files."""
    arch = architecture(config)
    std = config.get("initializer_range", 0.02)
    if not isinstance(std, int | float):
        raise ConfigError(f"initializer_range is {std!r} in the shape; a number is needed")
    residual_std = std / math.sqrt(2 * arch.config.n_layers)

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1 and name.endswith(".weight"):
            return Tensor(name, shape, 1.0, 0.0)
        if NORM_BIAS.search(name):
            return Tensor(name, shape, 0.0, 0.0)
        return Tensor(name, shape, 0.0, residual_std if name.endswith(RESIDUAL) else std)

    return [tensor(name, shape) for name, shape in arch.tensors().items()]


def load_shape(shape: str, n_layers: int | None, n_positions: int | None) -> Config:
    """The config of a named shape of this folder, or of a JSON file, with what was asked changed.

    Random weights have no trained length, so plain rotary positions are raised to MIN_ROTARY_POSITIONS.
    """
    path = Path(shape) if shape.endswith(".json") else SHAPES / f"{shape}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in SHAPES.glob("*.json")))
        raise ConfigError(f"--shape {shape}: no such shape; accepted are {known}, or a path that ends in .json")
    config = read_config(path)
    rope = architecture(config).config.rope
    layers_key = LAYERS.get(config["model_type"], "num_hidden_layers")
    positions_key = POSITIONS.get(config["model_type"], "max_position_embeddings")
    if n_positions is None and rope is not None and rope.kind == "default":
        n_positions = max(number(config, positions_key), MIN_ROTARY_POSITIONS)
    config[layers_key] = n_layers or number(config, layers_key)
    config[positions_key] = n_positions or number(config, positions_key)
    return config
