"""The tensors of a packed checkpoint, and what its config.json says of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from edgekv.checkpoint.packed.tensors import Words
from edgekv.checkpoint.tensor_set import TensorSet
from edgekv.errors import CheckpointError, ConfigError
from edgekv.schema import read

HINT = "give the checkpoint's own config.json"
SIDE = Annotated[int, Meta(ge=1, le=1 << 20)]


class Quantization(Struct):
    """quantization_config, or mlx's quantization: what the tensors' shapes do not say."""

    quant_method: str | None = None
    bits: Annotated[int, Meta(ge=2, le=8)] | None = None
    group_size: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    checkpoint_format: str | None = None
    version: str | None = None
    mode: str | None = None
    weight_block_size: Annotated[list[SIDE], Meta(min_length=2, max_length=2)] | None = None


class Parts:
    """The tensors of a checkpoint; what is taken from it has the shape and type that a format needs."""

    def __init__(self, tensors: TensorSet) -> None:
        self.tensors = tensors

    def named(self, ending: str) -> Iterator[str]:
        """What stands before this ending of a name, of each tensor that has it."""
        return (name.removesuffix(ending) for name in self.tensors.names() if name.endswith(ending))

    def words(self, name: str) -> Words:
        """(r, n) of 32-bit words."""
        array = self.tensors.array(name)
        if array.dtype.itemsize != 4 or array.dtype.kind not in "iu" or array.ndim != 2 or not array.size:
            raise self.wrong(name, "a matrix of 32-bit words")
        return array.view(np.uint32)

    def matrix(self, name: str) -> npt.NDArray[Any]:
        """An array of two axes that is not empty."""
        array = self.tensors.array(name)
        if array.ndim != 2 or not array.size:
            raise self.wrong(name, "a matrix")
        return array

    def shaped(self, name: str, *shapes: tuple[int, ...]) -> npt.NDArray[Any]:
        """An array of one of the shapes."""
        array = self.tensors.array(name)
        if array.shape not in shapes:
            raise self.wrong(name, " or ".join(map(str, shapes)))
        return array

    def wrong(self, name: str, accepted: str) -> CheckpointError:
        """The error for a tensor of another type or shape than ``accepted`` says."""
        info = self.tensors.info(name)
        return CheckpointError(
            f"{self.tensors.files[0].path}: tensor {name!r} is {info.dtype} {info.shape}, expected {accepted}: "
            "download the checkpoint again"
        )

    def group_of(self, name: str, columns: int, groups: int) -> npt.NDArray[np.int64] | None:
        """Each column's group, None where the groups are neighbours of one size."""
        if name not in self.tensors:
            return None
        found = self.shaped(name, (columns,)).astype(np.int64)
        if found.min() < 0 or found.max() >= groups:
            raise self.wrong(name, f"numbers of {groups} groups")
        return None if np.array_equal(found, np.arange(columns) // -(-columns // groups)) else found

    def beside(self, module: str, *endings: str) -> list[str]:
        """Of these tensors of a module those that are there."""
        return [module + ending for ending in endings if module + ending in self.tensors]


def settings_of(raw: Any, where: str) -> Quantization:
    """The fields of a quantization_config that are read. Raises CheckpointError or ConfigError as `read`."""
    return read(raw, Quantization, f"config.json: {where}", HINT)


def width(settings: Quantization, method: str, *accepted: int) -> int:
    """Bits of a weight: one of the accepted."""
    bits = settings.bits or 4
    if bits not in accepted:
        raise ConfigError(
            f"config.json: quantization_config: bits is {bits}; accepted for {method}: "
            f"{', '.join(map(str, accepted))}"
        )
    return bits
