"""A GGUF file's header: metadata and where the tensors lie. Counts are checked against the bytes that are there.

Source of the layout: ggml's docs/gguf.md. The gguf library reads it too, but makes an array of every token and
believes the counts: 6 GiB from a file of 218 kB.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import pathlib
import struct
from typing import Any

import numpy as np

from edgekv.files import open_regular

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_ELEMENTS = 1 << 23  # of all arrays together: a vocabulary with scores, types and merges has 1.3 million
MAX_DEPTH, MAX_DIMENSIONS = 4, 4
BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
ALIGNMENT = "general.alignment"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Rows first; ``start`` is its place in the file. ``kind`` is GGML's number of its type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def n_elements(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)


class Header:
    """Raises ValueError where the file is cut off or its counts can't be true."""

    def __init__(self, path: pathlib.Path) -> None:
        with open_regular(path) as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position, self._n_elements = 0, 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("<u4")
        if version not in VERSIONS:
            raise ValueError(f"version {version}; accepted: 2 and 3, little-endian")
        n_tensors, n_entries = self._number("<u8"), self._number("<u8")
        self._require(n_tensors * 24 + n_entries * 13)  # the least that each takes
        for _ in range(n_entries):
            key = self._text()
            self.metadata[key] = self._value(self._number("<u4"), 0)
        found = [self._tensor() for _ in range(n_tensors)]
        alignment = self.metadata.get(ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20:
            raise ValueError(f"{ALIGNMENT} is {alignment!r}")
        self.data_start = -(-self._position // alignment) * alignment
        for tensor in found:
            self.tensors[tensor.name] = dataclasses.replace(tensor, start=self.data_start + tensor.start)
        if len(self.tensors) < n_tensors:
            raise ValueError("two tensors have one name")

    def floats(self, tensor: Tensor) -> list[float]:
        """Values of a small float32 tensor."""
        self._position = tensor.start
        values: list[float] = np.frombuffer(self._take(4 * tensor.n_elements), "<f4").tolist()
        return values

    def _require(self, nbytes: int) -> None:
        if nbytes > len(self._data) - self._position:
            raise ValueError(
                f"it has {len(self._data)} bytes, its header asks for {nbytes} from {self._position} on"
            )

    def _take(self, nbytes: int) -> bytes:
        self._require(nbytes)
        begin, self._position = self._position, self._position + nbytes
        return self._data[begin : self._position]

    def _number(self, dtype: str) -> int:
        return int(np.frombuffer(self._take(np.dtype(dtype).itemsize), dtype)[0])

    def _text(self) -> str:
        (length,) = struct.unpack("<Q", self._take(8))
        return self._take(length).decode()

    def _value(self, kind: int, depth: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            return self._array(depth)
        if kind not in SCALARS:
            raise ValueError(f"a value of the unknown type {kind}")
        dtype = np.dtype(SCALARS[kind])
        value = np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()
        return bool(value) if kind == BOOL else value

    def _array(self, depth: int) -> list[Any]:
        kind, length = self._number("<u4"), self._number("<u8")
        self._n_elements += length
        if self._n_elements > MAX_ELEMENTS or depth == MAX_DEPTH:
            raise ValueError(f"arrays of {self._n_elements} elements, {depth + 1} deep; accepted: {MAX_ELEMENTS}")
        if kind not in SCALARS:
            return [self._value(kind, depth + 1) for _ in range(length)]
        dtype = np.dtype(SCALARS[kind])
        values = np.frombuffer(self._take(length * dtype.itemsize), dtype)
        elements: list[Any] = (values != 0 if kind == BOOL else values).tolist()
        return elements

    def _tensor(self) -> Tensor:
        name = self._text()
        n_dimensions = self._number("<u4")
        if not 1 <= n_dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {name[:60]!r} has {n_dimensions} dimensions")
        columns_first = struct.unpack(f"<{n_dimensions}Q", self._take(8 * n_dimensions))
        tensor = Tensor(name, columns_first[::-1], self._number("<u4"), self._number("<u8"))
        if not 1 <= tensor.n_elements <= 8 * len(self._data):  # no type has less than a bit
            raise ValueError(f"tensor {name[:60]!r} has the shape {tensor.shape}, more than the file holds")
        return tensor
