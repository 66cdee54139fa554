"""The tensors of a checkpoint, in memory-mapped files that are checked when opened and read on access.

Format: https://huggingface.co/docs/safetensors (a length, a JSON header, then the tensors without gaps).
"""

from __future__ import annotations

import abc
import contextlib
import difflib
import hashlib
import json
import math
import mmap
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from edgekv.errors import CheckpointError
from edgekv.files import Memo, PartialFile, open_regular
from edgekv.machine import all_cores
from edgekv.types import F32, I8, U8, Array, TaskProgress

Shape = tuple[int, ...]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WIDTHS = {"F": (8, 4, 2), "I": (8, 4, 2, 1), "U": (8, 4, 2, 1)}
DTYPES: dict[str, np.dtype[Any]] = {"BF16": BFLOAT16} | {
    f"{kind}{8 * n}": np.dtype(f"{kind.lower()}{n}") for kind, widths in WIDTHS.items() for n in widths
}
"""NumPy's type for each safetensors type that can be read."""
FLOATS = tuple(DTYPES[name] for name in ("F64", "F32", "F16", "BF16"))
ALIGNMENT = 64  # bytes, of the data in a written file: a cache line
HASHING = "hashing"  # the task's name in progress
SPAN_BYTES, READ_BYTES = 8 << 20, 1 << 20  # that a thread hashes as one span, and reads at a time
MAX_HASHES = 256  # that are remembered
SETTLED_NS = 2_000_000_000  # a file that changed within may change again with the same time stamp
STACKED = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?$")
MAX_LAYER_EXPERTS = 1 << 14
MAX_TENSORS = 1 << 17  # with each expert's; the largest models have 70,000
EXPERT_PARTS = {"gate_up_proj": (("gate_proj", 0, 2), ("up_proj", 1, 2)), "down_proj": (("down_proj", 0, 1),)}
"""The projections in a tensor of all experts: name, first of its outputs, and the step between them."""


class Tensor(abc.ABC):
    """A tensor of a checkpoint in any storage.

    path: the file, for errors. dtype: safetensors' name of the type that `read` returns. nbytes: its bytes in the
    file. kind: the type of its quantized blocks ("Q4_K"), None: not quantized. exact_format: the weight format
    with the same values, None: there is none. nearest_format: the default weight format.
    """

    kind: str | None = None
    exact_format: str | None = None
    nearest_format = "f32"

    def __init__(self, path: Path, name: str, dtype: str, shape: Shape, nbytes: int) -> None:
        self.path, self.name, self.dtype, self.shape, self.nbytes = path, name, dtype, shape, nbytes

    @abc.abstractmethod
    def read(self) -> Array:
        """Returns all values, such as (rows, columns), mapped where possible; CheckpointError for other dtypes."""

    def rows(self, lo: int, hi: int, transposed: bool = False) -> Array:
        """Returns outputs lo..hi of a projection, (hi - lo, inputs), that may be stored transposed."""
        stored = self.read()
        return stored[:, lo:hi].T if transposed else stored[lo:hi]

    def raw(self) -> U8:
        """Returns the bytes of a tensor of any type: (rows, columns) of one-byte types, (nbytes,) of others."""
        raise self.error("is not stored by itself")

    def blocks(self, lo: int, hi: int) -> tuple[I8, F32, Array | None]:
        """Returns rows lo..hi in ``exact_format``: codes (rows, blocks, block), scales (rows, blocks), and None.

        In place of None zero points -8..7 (rows, blocks) that were subtracted from 4-bit codes, or offsets to add
        to scales times codes, which are 8 more than here.
        """
        raise self.error("has no blocks of a weight format")

    def raw_rows(self, lo: int, hi: int) -> U8:
        """Returns bytes (hi - lo, bytes of a row), where ``exact_format`` is a type of the file's own blocks."""
        raise self.error("has no blocks that are kept as they are")

    @abc.abstractmethod
    def release(self) -> None:
        """Releases its mapped pages, to keep the resident memory small; arrays stay valid and are read again."""

    def advise(self, advice: int, first: int = 0, n: int | None = None) -> None:  # noqa: B027 - only a hint
        """Advises how entries first..first + n of the first axis (None: all) will be read (`mmap.MADV_...`)."""

    def require_readable(self) -> None:
        """Raises CheckpointError for a type that `read` can't return."""
        if self.dtype not in DTYPES:
            raise self.error(f"is {self.dtype}; accepted are {', '.join(DTYPES)}; convert the checkpoint")

    def require_finite(self, *arrays: Array | None, below: float = math.inf) -> None:
        """Raises CheckpointError for a number in arrays of this tensor that is not finite, or too large."""
        if not all(x is None or -below < x.min(initial=0) <= x.max(initial=0) < below for x in arrays):
            problem = "has a number that is not finite" + f", or not below {below:g}" * (below < math.inf)
            raise self.error(f"{problem}; download the checkpoint again")

    def error(self, problem: str) -> CheckpointError:
        """Returns an error about this tensor. problem: what is wrong with it."""
        return CheckpointError(f"{self.path}: tensor {self.name!r} {problem}")


class MappedFile:
    """A memory-mapped file. nbytes: its size. metadata: the `__metadata__` of a safetensors header."""

    def __init__(self, path: Path, *, is_safetensors: bool = False) -> None:
        """Maps a file. Raises CheckpointError if it can't be read, or its safetensors header is invalid."""
        self.path, self.metadata = path, dict[str, str]()
        try:
            with (
                open_regular(path) as file,
                safe_open(str(path), framework="np") if is_safetensors else contextlib.nullcontext(),
            ):
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self.status = os.fstat(file.fileno())
        except SafetensorError as error:
            reason = " ".join(str(error).removeprefix("Error while deserializing header: ").split())
            raise CheckpointError(
                f"{path}: not a whole, correct safetensors file ({reason[:200]}); download or convert it again"
            ) from error
        except OSError as error:
            hint = "give a readable .safetensors file or its folder"
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); {hint}") from error
        self.nbytes = len(self.data)
        self._hash: str | None = None

    def content_hash(self, progress: TaskProgress | None = None) -> str:
        """Returns the SHA-256 of the hashes of all spans of the file, in hex; it is remembered.

        Raises CheckpointError if the file has changed since it was opened, or can't be read.
        """
        if self._hash is None:
            memo, path, facts = Memo("hashes.json", 1), os.path.realpath(self.path), _file_facts(self.status)
            *file_facts, digest = (memo.read() or {}).get(path, [None])
            if file_facts != facts:
                begun_ns, digest = time.time_ns(), self._hashed(progress)
                if abs(begun_ns - self.status.st_ctime_ns) > SETTLED_NS:
                    other_files = {key: value for key, value in (memo.read() or {}).items() if key != path}
                    memo.keep(dict(list(other_files.items())[1 - MAX_HASHES :]) | {path: [*facts, digest]})
            self._hash = str(digest)
        return self._hash

    def _hashed(self, progress: TaskProgress | None) -> str:
        try:
            with open_regular(self.path) as file:
                digest = hash_spans(file.fileno(), self.status.st_size, progress)
                if _file_facts(os.fstat(file.fileno())) == _file_facts(self.status):
                    return digest
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror or error}); try again") from error
        raise CheckpointError(f"{self.path}: changed while it was in use; try again when it is whole")


class MappedTensor(Tensor):
    """A tensor at byte ``start`` of a mapped file; `read` returns a read-only view of the file."""

    def __init__(self, file: MappedFile, name: str, dtype: str, shape: Shape, start: int, nbytes: int) -> None:
        super().__init__(file.path, name, dtype, shape, nbytes)
        self.file, self.start = file, start

    def read(self) -> Array:
        """Returns a view of the file, such as (rows, columns)."""
        self.require_readable()
        try:
            view: Array = np.ndarray(self.shape, DTYPES[self.dtype], buffer=self.file.data, offset=self.start)
        except (OverflowError, ValueError) as error:
            raise self.error(f"has the impossible shape {self.shape}; download the file again") from error
        return view

    def raw(self) -> U8:
        """Returns (rows, columns) of one-byte types, (nbytes,) of others."""
        view: U8 = np.ndarray((self.nbytes,), np.uint8, buffer=self.file.data, offset=self.start)
        return view.reshape(self.shape) if math.prod(self.shape) == self.nbytes else view

    def release(self) -> None:
        self.advise(mmap.MADV_DONTNEED)

    def advise(self, advice: int, first: int = 0, n: int | None = None) -> None:
        row, n = (self.nbytes, 1) if n is None else (self.nbytes // self.shape[0], n)
        start = self.start + first * row
        aligned = start // mmap.PAGESIZE * mmap.PAGESIZE
        if row:
            self.file.data.madvise(advice, aligned, start + n * row - aligned)


class StackedTensor(Tensor):
    """A projection or bias of one expert, (outputs, inputs), within a tensor of all experts."""

    def __init__(self, stacked: Tensor, name: str, expert: int, first: int, step: int) -> None:
        shape = tuple(reversed((*stacked.shape[1:-1], len(range(first, stacked.shape[-1], step)))))
        nbytes = stacked.nbytes // stacked.shape[0] // step
        super().__init__(stacked.path, name, stacked.dtype, shape, nbytes)
        self._stacked, self._place = stacked, (expert, ..., slice(first, None, step))

    def read(self) -> Array:
        """Returns the expert's values, (outputs, inputs) or (outputs,)."""
        single: Array = self._stacked.read()[self._place].T
        return single

    def release(self) -> None:
        self._stacked.release()


class Tensors(dict[str, Tensor]):
    """The tensors of a checkpoint by name, file by file in the order of their data.

    files: their mapped files. method: the quantization method of the weights ("gptq"), "" for none. A missing name
    raises CheckpointError with the closest names.
    """

    def __init__(self, tensors: Mapping[str, Tensor], files: Sequence[MappedFile], method: str = "") -> None:
        super().__init__(tensors)
        self.files, self.method = tuple(files), method

    @classmethod
    def open(cls, *paths: str | os.PathLike[str]) -> Tensors:
        """Maps .safetensors files and checks their headers; nothing else is read.

        Raises CheckpointError for a file that is missing, truncated, or whose header is damaged or lies (overlaps,
        holes, overflows, offsets past the end), and where two files hold a tensor of one name.
        """
        tensors: dict[str, Tensor] = {}
        files = [MappedFile(Path(path), is_safetensors=True) for path in paths]
        for file in files:
            begin = 8 + int.from_bytes(file.data[:8], "little")
            header = json.loads(file.data[8:begin])
            file.metadata = header.pop("__metadata__", None) or {}
            for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
                (start, end), shape = entry["data_offsets"], tuple(entry["shape"])
                tensor = MappedTensor(file, name, entry["dtype"], shape, begin + start, end - start)
                if name in tensors:
                    raise tensor.error(f"is in {tensors[name].path.name} too; download the checkpoint again")
                tensors[name] = tensor
        return cls(tensors, files)

    def __missing__(self, name: str) -> Tensor:
        where = self.path if len(self.files) == 1 else f"{len(self.files)} shards"
        close = ", ".join(map(repr, difflib.get_close_matches(name, self, n=3))) or "none"
        hint = "give the whole checkpoint and its own config.json"
        raise CheckpointError(f"{where}: tensor {name!r} is missing, close names there: {close}; {hint}")

    @property
    def path(self) -> Path:
        """The path of the first file."""
        return self.files[0].path

    def with_tensors(self, changed: Mapping[str, Tensor]) -> Tensors:
        """Returns these tensors, with others added or replaced."""
        return Tensors({**self, **changed}, self.files, self.method)

    def require(self, name: str, shape: Sequence[int]) -> Tensor:
        """Returns a tensor of the given shape. Raises CheckpointError for another shape or an unreadable type."""
        tensor = self[name]
        if tensor.shape != tuple(shape):
            raise tensor.error(
                f"has shape {tensor.shape}, but its config asks for {tuple(shape)}; give the config.json that "
                "belongs to these weights"
            )
        tensor.require_readable()
        return tensor

    def unstacked(self) -> Tensors:
        """Returns the tensors with one per expert, ``experts.E....``, in place of those of all experts (GPT-OSS).

        ``experts.gate_up_proj`` (experts, inputs, 2 * outputs) alternates gate and up, ``experts.down_proj`` is
        (experts, inputs, outputs), and each has a bias (experts, outputs).
        """
        single: dict[str, Tensor] = {}
        for name, tensor in self.items():
            match = STACKED.match(name)
            if match is None:
                single[name] = tensor
                continue
            base, projection, bias = match.groups()
            axes, end = (2, "bias") if bias else (3, "weight")
            if len(tensor.shape) != axes or not 1 <= tensor.shape[0] <= MAX_LAYER_EXPERTS:
                problem = f"has shape {tensor.shape}, expected {axes} axes, the first of experts"
                raise tensor.error(f"{problem}: download the checkpoint again")
            if tensor.shape[0] > tensor.nbytes or len(single) + 2 * tensor.shape[0] > MAX_TENSORS:
                raise tensor.error("has more experts than its bytes or a model hold: download it again")
            for part, first, step in EXPERT_PARTS[projection]:
                for e in range(tensor.shape[0]):
                    full_name = f"{base}.{e}.{part}.{end}"
                    single[full_name] = StackedTensor(tensor, full_name, e, first, step)
        return Tensors(single, self.files, self.method)


def to_float32(array: Array, out: F32 | None = None) -> F32:
    """Returns F64, F32, F16 or BF16 weights, (rows, columns) or another shape, as float32, in ``out`` if given.

    Without ``out``, float32 input is returned as it is. Raises CheckpointError for another type.
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


def hash_spans(descriptor: int, nbytes: int, progress: TaskProgress | None = None) -> str:
    """Hashes an open file as `content_hash` does, on all cores. Raises OSError."""

    def span(start: int) -> bytes:
        digest = hashlib.sha256()
        for offset in range(start, end := min(start + SPAN_BYTES, nbytes), READ_BYTES):
            data = os.pread(descriptor, min(READ_BYTES, end - offset), offset)
            if len(data) < min(READ_BYTES, end - offset):
                raise OSError(0, "it ends before its size")
            digest.update(data)
        return digest.digest()

    total_digest = hashlib.sha256(nbytes.to_bytes(8, "little"))
    starts = range(0, nbytes, SPAN_BYTES)
    with ThreadPoolExecutor(all_cores()) as pool:
        for start, digest in zip(starts, pool.map(span, starts), strict=True):
            total_digest.update(digest)
            if progress and nbytes > SPAN_BYTES:
                progress(HASHING, min(start + SPAN_BYTES, nbytes), nbytes)
    return total_digest.hexdigest()


def _file_facts(status: os.stat_result) -> list[int]:
    """Returns file properties that change with its content; no program can set the last one."""
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


class TensorWriter:
    """A writer of a .safetensors file, tensor by tensor, so that memory does not limit its size.

    `specs` gives every tensor's safetensors type and shape in the order of the file; `metadata` becomes
    `__metadata__`; private: as of `PartialFile`. Use it in a `with` block and `write` each tensor in that order.
    The file appears at `path` when the block ends well with every tensor written; otherwise nothing appears.
    Raises CheckpointError for a type or a shape that contradicts `specs`, a missing tensor, or a disk that is full
    or cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Mapping[str, tuple[str, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
        private: bool = False,
    ) -> None:
        self.path, self._private = Path(path), private
        self._specs = {name: (dtype, tuple(shape)) for name, (dtype, shape) in specs.items()}
        self._header, data_bytes = _header(self.path, self._specs, metadata or {})
        self.nbytes = len(self._header) + data_bytes
        self._waiting = list(reversed(self._specs))
        self._rows_written = 0

    def __enter__(self) -> TensorWriter:
        self._partial = PartialFile(self.path, self.nbytes, self._private)
        try:
            self._partial.write(self._header)
        except BaseException:
            self._partial.discard()
            raise
        return self

    def write(self, name: str, array: Array) -> None:
        """Writes the next tensor: all of it, or its next rows (blocks along the first axis)."""
        if not self._waiting or name != self._waiting[-1]:
            due = repr(self._waiting[-1]) if self._waiting else "none"
            raise CheckpointError(f"{self.path}: tensor {name!r} was written out of order; the next one is {due}")
        dtype, shape = self._specs[name]
        rows, rows_left = (array.shape or (1,))[0], (shape or (1,))[0] - self._rows_written
        is_part = array.ndim == len(shape) and array.shape[1:] == shape[1:] and rows <= rows_left
        if array.dtype != DTYPES[dtype] or not is_part:
            problem = f"is {dtype} {shape} with {rows_left} rows to come, not {array.dtype} {array.shape}"
            raise CheckpointError(f"{self.path}: tensor {name!r} {problem}")
        self._partial.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._rows_written += rows
        if rows == rows_left:
            self._waiting.pop()
            self._rows_written = 0

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                if self._waiting:
                    raise CheckpointError(f"{self.path}: tensor {self._waiting[-1]!r} was not written whole")
                self._partial.commit()
        finally:
            self._partial.discard()


def _header(path: Path, specs: Mapping[str, tuple[str, Shape]], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """Returns the file's header, padded with spaces to the alignment, and the number of bytes of data."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in specs.items():
        if dtype not in DTYPES:
            raise CheckpointError(f"{path}: tensor {name!r} is {dtype!r}; accepted are {', '.join(DTYPES)}")
        start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, end
