"""Weights that a checkpoint holds packed, as the plain matrices that they stand for; unpacked when read."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from edgekv.checkpoint.tensors import Tensor, Tensors
from edgekv.checks import read_fields
from edgekv.errors import CheckpointError, ConfigError
from edgekv.types import F32, I8, I64, Array

Words = npt.NDArray[np.uint32]
Codes = npt.NDArray[np.int16]
BLOCKS = (128, 32)  # columns under one scale in the weight formats, the larger first
PIECE = 1 << 22  # elements unpacked at a time
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

    @classmethod
    def read(cls, raw: Any, where: str) -> Quantization:
        """Reads the object ``where`` of a config.json. Raises ConfigError as `read_fields`."""
        return read_fields(raw, cls, f"config.json: {where}", HINT)

    def width(self, method: str, *accepted: int) -> int:
        """Returns the bits of a weight: one of ``accepted``, else ConfigError."""
        bits = self.bits or 4
        if bits not in accepted:
            raise ConfigError(
                f"config.json: quantization_config: bits is {bits}; accepted for {method}: "
                f"{', '.join(map(str, accepted))}"
            )
        return bits


class TensorReader:
    """Takes arrays of a checkpoint that have the shape and type that a format needs, or raises CheckpointError."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def named(self, ending: str) -> Iterator[str]:
        """Yields what stands before this ending of a name, of each tensor that has it."""
        return (name.removesuffix(ending) for name in self.tensors if name.endswith(ending))

    def words(self, name: str) -> Words:
        """Returns (r, n) of 32-bit words."""
        array = self.tensors[name].read()
        if array.dtype.itemsize != 4 or array.dtype.kind not in "iu" or array.ndim != 2 or not array.size:
            raise self.wrong(name, "a matrix of 32-bit words")
        return array.view(np.uint32)

    def matrix(self, name: str) -> Array:
        """Returns an array of two axes that is not empty."""
        array = self.tensors[name].read()
        if array.ndim != 2 or not array.size:
            raise self.wrong(name, "a matrix")
        return array

    def shaped(self, name: str, *shapes: tuple[int, ...]) -> Array:
        """Returns an array of one of the shapes."""
        array = self.tensors[name].read()
        if array.shape not in shapes:
            raise self.wrong(name, " or ".join(map(str, shapes)))
        return array

    def wrong(self, name: str, accepted: str) -> CheckpointError:
        """Makes the error for a tensor of another type or shape than ``accepted`` says."""
        tensor = self.tensors[name]
        found = f"{tensor.dtype} {tensor.shape}"
        return CheckpointError(
            f"{self.tensors.path}: tensor {name!r} is {found}, expected {accepted}: download the checkpoint again"
        )

    def group_of(self, name: str, columns: int, groups: int) -> I64 | None:
        """Returns each column's group (columns,); None where the groups are neighbours of one size."""
        if name not in self.tensors:
            return None
        found = self.shaped(name, (columns,)).astype(np.int64)
        if found.min() < 0 or found.max() >= groups:
            raise self.wrong(name, f"numbers of {groups} groups")
        return None if np.array_equal(found, np.arange(columns) // -(-columns // groups)) else found

    def beside(self, module: str, *endings: str) -> list[str]:
        """Returns those of these tensors of a module that are there."""
        return [module + ending for ending in endings if module + ending in self.tensors]


class QuantizedTensor(Tensor):
    """One matrix, seen as float16. ``parts``: the checkpoint's tensors that hold it, and ``shared`` - 1 others."""

    nearest_format = "int8-32"  # loses little

    def __init__(
        self,
        reader: TensorReader,
        module: str,
        kind: str,
        shape: tuple[int, int],
        parts: Sequence[str],
        shared: int = 1,
    ) -> None:
        """kind: what a user calls its format."""
        self.kind, self.parts = kind, [reader.tensors[name] for name in parts]
        nbytes = sum(part.nbytes for part in self.parts) // shared
        super().__init__(reader.tensors.path, f"{module}.weight", "F16", shape, nbytes)

    @abc.abstractmethod
    def values(self, lo: int, hi: int) -> F32:
        """Returns rows lo..hi, (hi - lo, columns) float32."""

    def read(self) -> Array:
        rows, columns = self.shape
        out, step = np.empty(self.shape, np.float16), max(1, PIECE // columns)
        for a in range(0, rows, step):
            out[a : a + step] = self.values(a, min(a + step, rows))
        return out

    def rows(self, lo: int, hi: int, transposed: bool = False) -> Array:
        return self.values(lo, hi)

    def release(self) -> None:
        for part in self.parts:
            part.release()


class GroupedTensor(QuantizedTensor):
    """Whole numbers times the scale of their group of columns."""

    def __init__(
        self,
        reader: TensorReader,
        module: str,
        kind: str,
        shape: tuple[int, int],
        parts: Sequence[str],
        bits: int,
        group: int,
        zeros: Codes | None,
        group_of: I64 | None = None,
    ) -> None:
        """bits: of a number as it is stored. group: columns of one scale. zeros: the zero points of all groups,
        less half the range; None if all are 0. group_of: (columns,) where groups are not neighbours (act-order).
        """
        name = f"{kind} {bits}-bit" + (" act-order" if group_of is not None else "")
        super().__init__(reader, module, name, shape, parts)
        self._columns = np.arange(shape[1]) // group if group_of is None else group_of
        block = next((size for size in BLOCKS if group % size == 0), None)
        centred = zeros is None or not zeros.any()
        if block and group_of is None and (bits == 4 or centred):
            self.block, size = block, "" if block == 128 else "-32"
            fits = centred or zeros is None or (zeros.min() >= -8 and zeros.max() <= 7)
            self.exact_format = f"int{bits if fits else 8}{size}" + ("" if centred or not fits else "-zeros")
            self.nearest_format = self.exact_format

    @abc.abstractmethod
    def codes(self, lo: int, hi: int) -> Codes:
        """Returns whole numbers (hi - lo, columns), zero points taken off."""

    @abc.abstractmethod
    def scales(self, lo: int, hi: int) -> F32:
        """Returns (hi - lo, groups)."""

    def group_zeros(self, lo: int, hi: int) -> Codes:
        """Returns zero points (hi - lo, groups), less half the range."""
        return np.zeros((hi - lo, 1), np.int16)

    def values(self, lo: int, hi: int) -> F32:
        return self.codes(lo, hi) * self.scales(lo, hi)[:, self._columns]

    def blocks(self, lo: int, hi: int) -> tuple[I8, F32]:
        if self.exact_format is None:
            return super().blocks(lo, hi)
        columns = self.shape[1]
        n = -(-columns // self.block)
        codes = np.zeros((hi - lo, n * self.block), np.int8)
        step = max(1, PIECE // columns)
        for a in range(lo, hi, step):
            b = min(a + step, hi)
            codes[a - lo : b - lo, :columns] = self.codes(a, b)
        scales = np.ascontiguousarray(self.scales(lo, hi)[:, self._columns[:: self.block]])
        return codes.reshape(hi - lo, n, self.block), scales

    def zero_points(self, lo: int, hi: int) -> I8 | None:
        if not (self.exact_format or "").endswith("-zeros"):
            return None
        zeros: I8 = self.group_zeros(lo, hi)[:, self._columns[:: self.block]].astype(np.int8)
        return zeros


def unpack(words: Words, bits: int, order: Sequence[int] | None = None) -> Codes:
    """Unpacks words (r, n) to (r, n * 32 // bits) numbers, the low bits first.

    order: the numbers of a word are its order[0]th, order[1]th, ...
    """
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    if order is not None:
        shifts = shifts[np.argsort(order)]
    numbers = words[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    codes: Codes = numbers.reshape(len(words), -1).astype(np.int16)
    return codes
