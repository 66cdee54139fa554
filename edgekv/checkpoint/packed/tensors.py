"""Weights that a checkpoint holds packed, seen as the plain tensors that they stand for; unpacked when read."""

from __future__ import annotations

import abc
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.checkpoint.tensor_set import TensorSet
from edgekv.checkpoint.tensors import TensorFile, TensorInfo
from edgekv.errors import CheckpointError
from edgekv.types import F32, I8

Words = npt.NDArray[np.uint32]
Codes = npt.NDArray[np.int16]
BLOCKS = (128, 32)  # columns under one scale in the weight formats, the larger first
PIECE = 1 << 22  # elements unpacked at a time


class Packed(abc.ABC):
    """One matrix. kind: what a user calls its format. parts: the checkpoint's tensors that it is made of."""

    kind: str
    exact: str | None = None  # the weight format that holds the same values, if one does
    nearest = "int8-32"  # else, that which loses little
    shared = 1  # matrices that are made of the same tensors

    def __init__(self, shape: tuple[int, int], parts: Sequence[str]) -> None:
        self.shape, self.parts = shape, tuple(parts)

    @abc.abstractmethod
    def values(self, lo: int, hi: int) -> F32:
        """(hi - lo, columns) float32 of the rows lo..hi."""

    def blocks(self, lo: int, hi: int) -> tuple[I8, F32]:
        """What `TensorFile.blocks` gives, where ``exact`` is a format."""
        raise NotImplementedError


class Grouped(Packed):
    """Whole numbers times the scale of their group of columns.

    bits: of a number as it is stored. group: columns of one scale. group_of: (columns,) of each column its group,
    where groups are not neighbours (act-order). zeros: the zero points of all groups, less half the range; None if
    all are 0.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        parts: Sequence[str],
        bits: int,
        group: int,
        zeros: Codes | None,
        group_of: npt.NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(shape, parts)
        self._columns = np.arange(shape[1]) // group if group_of is None else group_of
        block = next((size for size in BLOCKS if group % size == 0), None)
        centred = zeros is None or not zeros.any()
        if block and group_of is None and (bits == 4 or centred):
            self.block, size = block, "" if block == 128 else "-32"
            fits = centred or zeros is None or (zeros.min() >= -8 and zeros.max() <= 7)
            self.exact = f"int{bits if fits else 8}{size}" + ("" if centred or not fits else "-zeros")

    @abc.abstractmethod
    def codes(self, lo: int, hi: int) -> Codes:
        """Whole numbers (hi - lo, columns), zero points taken off."""

    @abc.abstractmethod
    def scales(self, lo: int, hi: int) -> F32:
        """(hi - lo, groups)."""

    def zero_points(self, lo: int, hi: int) -> Codes:
        """(hi - lo, groups), less half the range."""
        return np.zeros((hi - lo, 1), np.int16)

    def values(self, lo: int, hi: int) -> F32:
        return self.codes(lo, hi) * self.scales(lo, hi)[:, self._columns]

    def blocks(self, lo: int, hi: int) -> tuple[I8, F32]:
        """What `TensorFile.blocks` gives, where ``exact`` is a format."""
        columns = self.shape[1]
        n = -(-columns // self.block)
        codes = np.zeros((hi - lo, n * self.block), np.int8)
        step = max(1, PIECE // columns)
        for a in range(lo, hi, step):
            b = min(a + step, hi)
            codes[a - lo : b - lo, :columns] = self.codes(a, b)
        scales = np.ascontiguousarray(self.scales(lo, hi)[:, self._columns[:: self.block]])
        return codes.reshape(hi - lo, n, self.block), scales

    def block_zeros(self, lo: int, hi: int) -> I8:
        """What `TensorFile.zero_points` gives."""
        zeros: I8 = self.zero_points(lo, hi)[:, self._columns[:: self.block]].astype(np.int8)
        return zeros


def unpack(words: Words, bits: int, order: Sequence[int] | None = None) -> Codes:
    """(r, n) words -> (r, n * 32 // bits) numbers, the low bits first; those of a word are its order[0]th, ..."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    if order is not None:
        shifts = shifts[np.argsort(order)]
    numbers = words[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    codes: Codes = numbers.reshape(len(words), -1).astype(np.int16)
    return codes


class PackedTensors(TensorFile):
    """A checkpoint's tensors with the packed ones under the names of what they stand for.

    Matrices that are looked up by row appear in float16.
    """

    def __init__(self, tensors: TensorSet, packed: Mapping[str, Packed], method: str, plain_form: str) -> None:
        """method: by which it is packed. plain_form: the weight format for matrices that are not packed."""
        self.method = method
        self.path = Path(tensors.files[0].path)
        self.metadata = dict(tensors.files[0].metadata)
        self.nbytes, self.data_start = tensors.nbytes_total, 0
        self._inner, self._packed, self._plain_form = tensors, packed, plain_form
        hidden = {part for matrix in packed.values() for part in matrix.parts}
        plain = [name for name in tensors.names() if name not in hidden]
        self._infos = {name: self._packed_info(name) for name in packed} | {n: tensors.info(n) for n in plain}

    def _packed_info(self, name: str) -> TensorInfo:
        matrix = self._packed[name]
        nbytes = sum(self._inner.info(part).nbytes for part in matrix.parts)
        return TensorInfo("F16", matrix.shape, nbytes // matrix.shared)

    def hide(self, pattern: re.Pattern[str]) -> None:
        """Leaves out tensors of this pattern, which hold no weights."""
        self._infos = {name: info for name, info in self._infos.items() if not pattern.search(name)}

    def array(self, name: str) -> npt.NDArray[Any]:
        self.info(name)  # or an error that names it
        if name not in self._packed:
            return self._inner.array(name)
        matrix = self._packed[name]
        rows, columns = matrix.shape
        out, step = np.empty(matrix.shape, np.float16), max(1, PIECE // columns)
        for a in range(0, rows, step):
            out[a : a + step] = matrix.values(a, min(a + step, rows))
        return out

    def outputs(self, name: str, lo: int, hi: int, transposed: bool) -> npt.NDArray[Any]:
        matrix = self._packed.get(name)
        return self._inner.outputs(name, lo, hi, transposed) if matrix is None else matrix.values(lo, hi)

    def quantized(self, name: str) -> str | None:
        return self._packed[name].kind if name in self._packed else None

    def forms(self, name: str) -> tuple[str | None, str]:
        matrix = self._packed.get(name)
        return (None, self._plain_form) if matrix is None else (matrix.exact, matrix.exact or matrix.nearest)

    def blocks(self, name: str, lo: int, hi: int) -> tuple[I8, F32]:
        matrix = self._packed.get(name)
        if matrix is None or matrix.exact is None:
            raise CheckpointError(f"{self.path}: tensor {name!r} has no blocks of a weight format")
        return matrix.blocks(lo, hi)

    def zero_points(self, name: str, lo: int, hi: int) -> I8 | None:
        matrix = self._packed.get(name)
        has_own = isinstance(matrix, Grouped) and (matrix.exact or "").endswith("-zeros")
        return matrix.block_zeros(lo, hi) if has_own and isinstance(matrix, Grouped) else None

    def release(self, name: str) -> None:
        for part in self._packed[name].parts if name in self._packed else (name,):
            self._inner.release(part)
