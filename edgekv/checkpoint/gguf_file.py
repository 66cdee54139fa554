"""A GGUF file seen as the Hugging Face checkpoint that it was made from; nothing is read before it is used."""

from __future__ import annotations

import json
import mmap
import os
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.checkpoint.gguf_blocks import FLOATS, LAYOUTS, NEAREST, blocks_of, dequantize
from edgekv.checkpoint.tensors import DTYPES, TensorFile, TensorInfo
from edgekv.errors import CheckpointError
from edgekv.files import open_regular
from edgekv.types import Array

TABLE_TYPE = "F16"  # of quantized tables, whose rows are looked up


class GgufFile(TensorFile):
    """Tensors under the checkpoint's names, in its row order and orientation.

    index: what `gguf_import.read_index` found. Quantized tensors appear as float32, tables as float16.
    """

    method = "gguf"

    def __init__(self, path: pathlib.Path, index: dict[str, Any]) -> None:
        self.path = path
        with open_regular(path) as file:
            self._map, self._status = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), os.fstat(file.fileno())
        self.nbytes, self.data_start = len(self._map), int(index["data_start"])
        self.metadata = {"config": json.dumps(index["config"])}
        self._entries: dict[str, dict[str, Any]] = index["tensors"]
        self._infos = {name: _info(entry) for name, entry in self._entries.items()}
        self._starts = {name: int(entry["start"]) for name, entry in self._entries.items()}
        for name, start in self._starts.items():
            if start + self._infos[name].nbytes > self.nbytes:
                raise CheckpointError(f"{path}: is cut off inside tensor {name!r}; download it again")

    def kind(self, name: str) -> str:
        """GGUF's type of a tensor: Q4_K."""
        return str(self._entries[name]["kind"])

    def array(self, name: str) -> Array:
        self.info(name)  # or an error that names it
        entry = self._entries[name]
        values = self._values(name, 0, entry["rows"])
        if entry["kind"] not in FLOATS:
            values = values.astype(DTYPES[self._infos[name].dtype])
        values = values.T if entry["transposed"] else values
        return values.reshape(self._infos[name].shape)

    def outputs(self, name: str, lo: int, hi: int, transposed: bool) -> Array:
        return self._values(name, lo, hi)

    def quantized(self, name: str) -> str | None:
        kind = self.kind(name)
        return None if kind in FLOATS else kind

    def forms(self, name: str) -> tuple[str | None, str]:
        kind = self.quantized(name)
        if kind is None:
            return None, "f32"
        if kind in LAYOUTS:
            return (LAYOUTS[kind][2],) * 2
        return None, NEAREST.get(kind, "int4-32")

    def blocks(self, name: str, lo: int, hi: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
        return blocks_of(self._raw(name, lo, hi), self.kind(name))[:2]

    def offsets(self, name: str, lo: int, hi: int) -> npt.NDArray[np.float32] | None:
        kind = self.kind(name)
        return blocks_of(self._raw(name, lo, hi), kind).offsets if kind in LAYOUTS else None

    def _values(self, name: str, lo: int, hi: int) -> Array:
        """Rows lo..hi of (rows, columns) as the file has them, in the checkpoint's order."""
        raw, kind = self._raw(name, lo, hi), self.kind(name)
        if kind in FLOATS:
            values, offset = raw.view(DTYPES[FLOATS[kind]]), self._entries[name]["offset"]
            return (values.astype(np.float32) - np.float32(offset)).astype(values.dtype) if offset else values
        if kind in LAYOUTS:
            codes, scales, offsets = blocks_of(raw, kind)
            values = codes * scales[..., None]
            return (values if offsets is None else values + offsets[..., None]).reshape(len(raw), -1)
        return dequantize(raw, kind)

    def _raw(self, name: str, lo: int, hi: int) -> npt.NDArray[np.uint8]:
        """Bytes (hi - lo, bytes of a row)."""
        entry = self._entries[name]
        shape = entry["rows"], self._infos[name].nbytes // entry["rows"]
        raw: npt.NDArray[np.uint8] = np.ndarray(shape, np.uint8, buffer=self._map, offset=self._starts[name])
        heads = entry["interleaved_heads"]
        return raw[interleaved_rows(shape[0] // heads, lo, hi)] if heads else raw[lo:hi]


def interleaved_rows(head_dim: int, lo: int, hi: int) -> npt.NDArray[np.int64]:
    """Where GGUF has rows lo..hi of a rotated projection: it puts channel i next to channel i + head_dim / 2."""
    head, channel = np.divmod(np.arange(lo, hi), head_dim)
    second, pair = np.divmod(channel, head_dim // 2)
    rows: npt.NDArray[np.int64] = head * head_dim + 2 * pair + second
    return rows


def _info(entry: dict[str, Any]) -> TensorInfo:
    kind = FLOATS.get(entry["kind"], TABLE_TYPE if entry["table"] else "F32")
    return TensorInfo(kind, tuple(entry["shape"]), int(entry["nbytes"]))
