"""Safetensors files, written as a stream of tensors; they appear whole or not at all."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.checkpoint.tensors import DTYPES
from edgekv.errors import CheckpointError
from edgekv.files import PartialFile

ALIGNMENT = 64
"""The tensors' data begins at a multiple of this many bytes: a cache line, and every vector register."""


class TensorWriter:
    """Writes a .safetensors file tensor by tensor, so that its size is not bound by memory.

    `specs` gives every tensor's safetensors type and shape in the order of the file; `metadata` becomes
    `__metadata__`. Use it in a `with` block and `write` each tensor in that order. The file appears at `path` when
    the block ends well with every tensor written; otherwise nothing appears. Raises CheckpointError for a type or
    a shape that contradicts `specs`, a missing tensor, or a disk that is full or cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Mapping[str, tuple[str, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self._specs = {name: (dtype, tuple(shape)) for name, (dtype, shape) in specs.items()}
        self._header, data_bytes = _header(self.path, self._specs, metadata or {})
        self.nbytes = len(self._header) + data_bytes
        self._waiting = list(reversed(self._specs))
        self._rows_written = 0

    def __enter__(self) -> "TensorWriter":
        self._partial = PartialFile(self.path, self.nbytes)
        try:
            self._partial.write(self._header)
        except BaseException:
            self._partial.discard()
            raise
        return self

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        """Write the next tensor: all of it, or its next rows (blocks along the first axis)."""
        if not self._waiting or name != self._waiting[-1]:
            due = repr(self._waiting[-1]) if self._waiting else "none"
            raise CheckpointError(f"{self.path}: tensor {name!r} was written out of order; the next one is {due}")
        dtype, shape = self._specs[name]
        rows = array.shape[0] if array.ndim else 1
        rows_left = (shape[0] if shape else 1) - self._rows_written
        if (
            array.dtype != DTYPES[dtype]
            or array.ndim != len(shape)
            or array.shape[1:] != shape[1:]
            or rows > rows_left
        ):
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is {dtype} {shape} with {rows_left} rows to come, "
                f"but {array.dtype} {array.shape} was written"
            )
        self._partial.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._rows_written += rows
        if rows == rows_left:
            self._waiting.pop()
            self._rows_written = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self._waiting:
                    raise CheckpointError(f"{self.path}: tensor {self._waiting[-1]!r} was not written whole")
                self._partial.commit()
        finally:
            self._partial.discard()


def _header(
    path: Path, specs: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, int]:
    """The file's first bytes, padded with spaces to the alignment, and the bytes of data that follow."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in specs.items():
        if dtype not in DTYPES:
            raise CheckpointError(f"{path}: tensor {name!r} is {dtype!r}; accepted are {', '.join(DTYPES)}")
        start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, end
