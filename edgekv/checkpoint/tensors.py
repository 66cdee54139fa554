"""Memory-mapped .safetensors files: checked when opened, read only where an array is touched.

Format: https://huggingface.co/docs/safetensors (a length, a JSON header, then the tensors without gaps).
"""

import difflib
import json
import math
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from edgekv.checkpoint.content_hash import content_hash
from edgekv.errors import CheckpointError
from edgekv.files import open_regular
from edgekv.types import TaskProgress

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
}
"""NumPy's type for each safetensors type that `array` can return."""

FLOATS = tuple(DTYPES[name] for name in ("F64", "F32", "F16", "BF16"))


@dataclass(frozen=True)
class TensorInfo:
    """What the header says of a tensor: its safetensors type ("BF16"), its shape and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class TensorFile:
    """One memory-mapped .safetensors file.

    Opening reads and checks the header alone. Raises CheckpointError when the file is missing, unreadable,
    truncated, or when its header is damaged or lies (overlaps, holes, overflows, offsets past the end).

    path: the file; data_start: where the tensors begin, in bytes; nbytes: the size of the file;
    metadata: the header's `__metadata__`. method: by which its weights are quantized, where they are.
    """

    method = ""
    _hash: str | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map, self._status = _map_checked(self.path)
        self.nbytes = len(self._map)
        self.data_start = 8 + int.from_bytes(self._map[:8], "little")
        header = json.loads(self._map[8 : self.data_start])
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        entries = sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"]))
        self._infos = {name: _info(entry) for name, entry in entries}
        self._starts = {name: self.data_start + int(entry["data_offsets"][0]) for name, entry in entries}

    def names(self) -> list[str]:
        """The tensors' names, in the order of their data."""
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Type, shape and bytes of one tensor, of any type. Raises CheckpointError when it is absent."""
        if name not in self._infos:
            raise missing_tensor(name, self._infos, self.path)
        return self._infos[name]

    def array(self, name: str) -> npt.NDArray[Any]:
        """A read-only view of one tensor on the mapped file; nothing is copied.

        Raises CheckpointError when the tensor is absent, or its type is not one of `DTYPES`.
        """
        info = self.info(name)
        self.require_type(name)
        try:
            view: npt.NDArray[Any] = np.ndarray(
                info.shape, DTYPES[info.dtype], buffer=self._map, offset=self._starts[name]
            )
        except (OverflowError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has the impossible shape {info.shape}; download the file again"
            ) from error
        return view

    def require_type(self, name: str) -> None:
        """CheckpointError where `array` can't return the tensor's type."""
        kind = self.info(name).dtype
        if kind not in DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is {kind}; accepted are {', '.join(DTYPES)}; convert the checkpoint"
            )

    def outputs(self, name: str, lo: int, hi: int, transposed: bool) -> npt.NDArray[Any]:
        """Rows lo..hi (outputs) of a projection that may be stored transposed: (hi - lo, inputs)."""
        stored = self.array(name)
        return stored[:, lo:hi].T if transposed else stored[lo:hi]

    def quantized(self, name: str) -> str | None:
        """The type of a tensor that is stored in quantized blocks; None: as plain numbers."""
        return None

    def forms(self, name: str) -> tuple[str | None, str]:
        """The weight format that holds the same values (None: there is none), and the one to take by itself."""
        return None, "f32"

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor of any type; of one-byte types in its shape, of others flat."""
        info = self.info(name)
        view: npt.NDArray[np.uint8] = np.ndarray(
            (info.nbytes,), np.uint8, buffer=self._map, offset=self._starts[name]
        )
        return view.reshape(info.shape) if math.prod(info.shape) == info.nbytes else view

    def blocks(self, name: str, lo: int, hi: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
        """Of a quantized projection's rows: whole numbers (rows, blocks, block), their scales (rows, blocks)."""
        raise CheckpointError(f"{self.path}: tensor {name!r} is not quantized")

    def zero_points(self, name: str, lo: int, hi: int) -> npt.NDArray[np.int8] | None:
        """What the 4-bit numbers of `blocks` had been taken off: (rows, blocks) in -8..7, None where it is 0."""
        return None

    def offsets(self, name: str, lo: int, hi: int) -> npt.NDArray[np.float32] | None:
        """What is added to the products of `blocks`: (rows, blocks), None where it is 0."""
        return None

    def release(self, name: str) -> None:
        """Give a tensor's mapped pages back, so that streaming a big file keeps the resident memory small.

        Its arrays stay valid: touching them again reads from the page cache or the disk.
        """
        nbytes = self.info(name).nbytes
        start = self._starts[name] // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes:
            self._map.madvise(mmap.MADV_DONTNEED, start, self._starts[name] + nbytes - start)

    def advise(self, name: str, advice: int, first: int = 0, n: int | None = None) -> None:
        """Says how entries first..first + n of a tensor's first axis will be read: a constant of `mmap`, MADV_...

        n None: all of them.
        """
        info = self.info(name)
        row = info.nbytes // info.shape[0] if info.nbytes else 0
        start = self._starts[name] + first * row
        end = start + row * (info.shape[0] if n is None else n)
        aligned = start // mmap.PAGESIZE * mmap.PAGESIZE
        if row:
            self._map.madvise(advice, aligned, end - aligned)

    def content_hash(self, progress: TaskProgress | None = None) -> str:
        """As the function of that name, of the file that was opened; for files alone, not what is made of them."""
        if self._hash is None:
            self._hash = content_hash(self.path, self._status, progress)
        return self._hash


def to_float32(array: npt.NDArray[Any], out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
    """A float32 copy of F64, F32, F16 or BF16 weights of any shape, in `out` (same shape) where it is given.

    Without `out`, float32 input is returned as it is. Raises CheckpointError for another type.
    """
    if array.dtype not in FLOATS:
        raise CheckpointError(f"weights of type {array.dtype} are not supported; accepted are F64, F32, F16, BF16")
    if out is None:
        if array.dtype == np.float32:
            return array
        out = np.empty(array.shape, np.float32)
    if array.dtype == BFLOAT16:  # bfloat16 is the upper half of a float32
        bits = out.view(np.uint32)
        bits[...] = array.view(np.uint16)
        np.left_shift(bits, np.uint32(16), out=bits)
    else:
        out[...] = array
    return out


def _map_checked(path: Path) -> tuple[mmap.mmap, os.stat_result]:
    """Map a file whose header the safetensors library accepts; and its status."""
    try:
        with open_regular(path) as file, safe_open(str(path), framework="np"):
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), os.fstat(file.fileno())
    except SafetensorError as error:
        reason = " ".join(str(error).removeprefix("Error while deserializing header: ").split())
        raise CheckpointError(
            f"{path}: not a whole, correct safetensors file ({reason[:200]}); download or convert it again"
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _info(entry: dict[str, Any]) -> TensorInfo:
    start, end = entry["data_offsets"]
    return TensorInfo(entry["dtype"], tuple(entry["shape"]), end - start)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    reason = error.strerror or error
    return CheckpointError(f"{path}: cannot be read ({reason}); give a readable .safetensors file or its folder")


def missing_tensor(name: str, names: Iterable[str], where: Path | str) -> CheckpointError:
    """The error for a tensor that is not among ``names`` of ``where``, with the closest ones."""
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"; close names there: {', '.join(map(repr, close))}" if close else ""
    return CheckpointError(
        f"{where}: tensor {name!r} is missing{hint}; give the whole checkpoint and its own config.json"
    )
