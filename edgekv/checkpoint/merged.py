"""A checkpoint's tensors with low-rank changes added to some of them, in float32, when they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.checkpoint.tensor_set import TensorSet
from edgekv.checkpoint.tensors import TensorFile, TensorInfo, to_float32
from edgekv.errors import CheckpointError
from edgekv.types import F32, I8


@dataclasses.dataclass(frozen=True)
class Delta:
    """factor * B A: what is added to a projection of ``rows`` outputs.

    file: holds both; a: name of A (rank, inputs); b: name of B (outputs, rank). transposed: the checkpoint stores
    the projection as (inputs, outputs).
    """

    file: TensorFile
    a: str
    b: str
    factor: float
    rows: int
    transposed: bool

    @property
    def rank(self) -> int:
        """Of the product."""
        return self.file.info(self.a).shape[0]

    def matrices(self) -> tuple[F32, F32]:
        """A (rank, inputs), and factor * B (outputs, rank), float32; of a huge factor not finite."""
        with np.errstate(over="ignore"):
            b: F32 = to_float32(self.file.array(self.b)) * np.float32(self.factor)
        return to_float32(self.file.array(self.a)), b

    def outputs(self, lo: int, hi: int) -> F32:
        """(hi - lo, inputs) float32."""
        b = to_float32(self.file.array(self.b)[lo:hi])
        product: F32 = (b @ to_float32(self.file.array(self.a))) * np.float32(self.factor)
        return product


class MergedTensors(TensorFile):
    """A checkpoint's tensors, some of them with a `Delta`; those are F32. Packed ones are unpacked for it."""

    def __init__(self, tensors: TensorSet, deltas: Mapping[str, Delta]) -> None:
        """deltas: by the checkpoint's tensor."""
        first = tensors.files[0]
        self.path, self.metadata, self.method = Path(first.path), dict(first.metadata), first.method
        self.nbytes, self.data_start = tensors.nbytes_total, 0
        self._inner, self._deltas = tensors, dict(deltas)
        self._infos = {name: self._info(name) for name in tensors.names()}

    def _info(self, name: str) -> TensorInfo:
        info = self._inner.info(name)
        return dataclasses.replace(info, dtype="F32") if name in self._deltas else info

    def array(self, name: str) -> npt.NDArray[Any]:
        delta = self._deltas.get(name)
        if delta is None:
            return self._inner.array(name)
        whole = self.outputs(name, 0, delta.rows, delta.transposed)
        return whole.T if delta.transposed else whole

    def outputs(self, name: str, lo: int, hi: int, transposed: bool) -> npt.NDArray[Any]:
        rows, delta = self._inner.outputs(name, lo, hi, transposed), self._deltas.get(name)
        if delta is None:
            return rows
        with np.errstate(over="ignore", invalid="ignore"):  # is looked for below
            merged = delta.outputs(lo, hi)
            merged += to_float32(rows)
        if not np.isfinite(merged).all():
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is not finite with the LoRA of {delta.file.path} in it; give a "
                "smaller scale, or another `lora`",
                field="lora",
            )
        return merged

    def quantized(self, name: str) -> str | None:
        return self._inner.quantized(name)

    def forms(self, name: str) -> tuple[str | None, str]:
        exact, nearest = self._inner.forms(name)
        if name not in self._deltas:
            return exact, nearest
        return "f32", "f32" if self._inner.quantized(name) is None else "int8-32"

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        return self._inner.bytes_of(name)

    def blocks(self, name: str, lo: int, hi: int) -> tuple[I8, F32]:
        return super().blocks(name, lo, hi) if name in self._deltas else self._inner.blocks(name, lo, hi)

    def zero_points(self, name: str, lo: int, hi: int) -> I8 | None:
        return None if name in self._deltas else self._inner.zero_points(name, lo, hi)

    def offsets(self, name: str, lo: int, hi: int) -> F32 | None:
        return None if name in self._deltas else self._inner.offsets(name, lo, hi)

    def release(self, name: str) -> None:
        self._inner.release(name)
