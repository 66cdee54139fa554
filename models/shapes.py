"""Which tensors a model of a config.json has, and how random ones are drawn.

The .json files in this folder are the published values; each can be given to `--config` too.
"""

import math
import re
from dataclasses import dataclass

from edgekv.checkpoint.shapes import Config
from edgekv.errors import ConfigError
from edgekv.models import architecture


@dataclass(frozen=True)
class Tensor:
    """name; shape; and its values: normal around `mean` with deviation `std`."""

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float


RESIDUAL = (
    ".o_proj.weight",
    ".out_proj.weight",
    ".down_proj.weight",
    ".w2.weight",
    ".c_proj.weight",
)  # written to the residual stream
NORM_BIAS = re.compile(r"ln_\w+\.bias$")


def tensor_list(config: Config) -> list[Tensor]:
    """Every tensor of a model of this config, in the order of its files."""
    arch = architecture(config)
    std = config.get("initializer_range", 0.02)
    if not isinstance(std, int | float):
        raise ConfigError(f"initializer_range is {std!r} in the shape; a number is needed")
    residual_std = std / math.sqrt(2 * arch.config.n_layers)

    gains = {
        name for name, _ in arch.arrays().values() if name.endswith("norm.weight")
    }  # norms without the offset

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        if name in gains:
            return Tensor(name, shape, 1.0, 0.0)
        if len(shape) == 1 and name.endswith(".weight"):
            return Tensor(name, shape, 1.0 - arch.norm_offset, 0.0)
        if NORM_BIAS.search(name):
            return Tensor(name, shape, 0.0, 0.0)
        return Tensor(name, shape, 0.0, residual_std if name.endswith(RESIDUAL) else std)

    return [tensor(name, shape) for name, shape in arch.tensors().items()]
