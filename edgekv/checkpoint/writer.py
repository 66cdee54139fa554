"""Files that appear whole or not at all: small ones at once, safetensors files as a stream of tensors."""

import contextlib
import fcntl
import glob
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.checkpoint.tensors import DTYPES
from edgekv.errors import CheckpointError

ALIGNMENT = 64
"""The tensors' data begins at a multiple of this many bytes: a cache line, and every vector register."""


def atomic_write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a small file so that `path` holds all of it or what it held before.

    A device or a pipe (/dev/stdout) is written to directly. Raises CheckpointError when it cannot be written.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        try:
            target.write_bytes(data)
        except OSError as error:
            raise _unwritable(target, len(data), error) from error
        return
    partial = _Partial(target, len(data))
    try:
        partial.write(data)
        partial.commit()
    except BaseException:
        partial.discard()
        raise


def atomic_stream(path: str | os.PathLike[str], nbytes: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file of ``nbytes`` bytes piece by piece, so that `path` holds all of it or what it held before.

    It is on the disk, not only in the page cache, when this returns. Raises CheckpointError when it cannot be
    written.
    """
    partial = _Partial(Path(path), nbytes)
    try:
        for piece in pieces:
            partial.write(piece)
        partial.commit()
    except BaseException:
        partial.discard()
        raise


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
        self._partial = _Partial(self.path, self.nbytes)
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


class _Partial:
    """A file under a temporary name beside `path`, which `commit` makes durable and renames to it.

    It stays locked while it is written: an unlocked one was left by a killed process and can be removed.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._target = Path(os.path.realpath(path))
        self._nbytes = nbytes
        self._path = self._target.with_name(f"{self._target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            _remove_abandoned(self._target)
            free = shutil.disk_usage(self._target.parent).free
            if nbytes > free:
                raise CheckpointError(
                    f"{path}: needs {nbytes:,} bytes, {free:,} are free; free some space or write elsewhere"
                )
            self._file = open(self._path, "xb")  # noqa: SIM115 - closed by commit or discard
            with contextlib.suppress(OSError):  # a filesystem without locks
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _unwritable(self._target, nbytes, error) from error

    def write(self, data: "bytes | memoryview") -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise _unwritable(self._target, self._nbytes, error) from error

    def commit(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._path, self._target)
        except OSError as error:
            raise _unwritable(self._target, self._nbytes, error) from error
        _sync_folder(self._target.parent)

    def discard(self) -> None:
        """Remove what was not committed."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


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


def _remove_abandoned(target: Path) -> None:
    for path in target.parent.glob(f"{glob.escape(target.name)}.partial-*"):
        with contextlib.suppress(OSError), open(path, "rb") as file:  # OSError: its writer holds the lock
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where the filesystem can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unwritable(path: Path, nbytes: int, error: OSError) -> CheckpointError:
    try:
        free = f"{shutil.disk_usage(path.parent).free:,}"
    except OSError:
        free = "an unknown number"
    return CheckpointError(
        f"{path}: cannot be written ({error.strerror or error}); it needs {nbytes:,} bytes, {free} are free: "
        "free some space or write elsewhere"
    )
