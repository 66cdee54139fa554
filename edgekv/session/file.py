"""The session file: JSON and sparse arrays, written whole or not at all, every byte of it checksummed.

magic, format version, CRC-32 and size of the header     32 bytes
header    JSON: the content, and of each array its type, shape, the runs of bytes that are stored, and their CRC-32
data      the runs of all arrays, back to back

Arrays of a KV cache have room for the whole context and are zero where nothing was written: only the runs of
GRAIN bytes that are not all zero are stored.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import pathlib
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from edgekv.errors import SessionError
from edgekv.files import atomic_stream, open_regular, user_path
from edgekv.schema import shown
from edgekv.types import U8, Array

MAGIC, VERSION = b"edgekv session\r\n", 1
PREFIX = struct.Struct("<16sIIQ")
GRAIN = 1024

Runs = list[tuple[int, int]]
Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


@dataclasses.dataclass(frozen=True)
class ByteCoding:
    """How the stored bytes of an array of ``itemsize`` become bytes of the file, and back."""

    pack: Callable[[bytes, int], bytes]
    unpack: Callable[[bytes | memoryview, int, int], bytes | memoryview]
    """Of so many bytes as the header promises; ValueError for more or fewer, found without making more."""


def _huffman_pack(data: bytes, itemsize: int) -> bytes:
    """Huffman codes alone, without a search for repetitions: codes of a quantised cache hardly repeat.

    All first bytes of the elements come first, then all second ones: a float16's exponents have few values.
    """
    planes = np.frombuffer(data, np.uint8).reshape(-1, itemsize).T
    coder = zlib.compressobj(wbits=-zlib.MAX_WBITS, strategy=zlib.Z_HUFFMAN_ONLY)
    return coder.compress(planes.tobytes()) + coder.flush()


def _huffman_unpack(data: bytes | memoryview, itemsize: int, nbytes: int) -> bytes:
    coder = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    try:
        plain = coder.decompress(data, nbytes + 1)
    except zlib.error as error:
        raise ValueError(f"no Huffman codes ({error})") from None
    if len(plain) != nbytes or not coder.eof or coder.unused_data:
        raise ValueError(f"not the {nbytes} bytes that the header promises")
    return bytes(np.frombuffer(plain, np.uint8).reshape(itemsize, -1).T.tobytes())


def _plain(data: bytes | memoryview, itemsize: int, nbytes: int) -> bytes | memoryview:
    if len(data) != nbytes:
        raise ValueError(f"{len(data)} bytes, not the {nbytes} that the header promises")
    return data


CODINGS: dict[str, ByteCoding] = {
    "plain": ByteCoding(lambda data, itemsize: data, _plain),
    "huffman": ByteCoding(_huffman_pack, _huffman_unpack),
}


class ArrayEntry(msgspec.Struct):
    """An array in the header: what it is, the runs of its bytes that are stored, and their place in the file."""

    name: str
    dtype: str
    shape: list[Natural]
    runs: list[tuple[Natural, Natural]]
    size: Natural
    crc: Natural

    @property
    def n_stored(self) -> int:
        """Bytes of the runs, before they were coded."""
        return sum(b - a for a, b in self.runs)

    def check_runs(self, nbytes: int, itemsize: int) -> None:
        """ValueError unless the runs are whole elements, ascending, and within an array of so many bytes."""
        end = 0
        for a, b in self.runs:
            if not end <= a < b <= nbytes or a % itemsize or b % itemsize:
                raise ValueError(f"the run {a} to {b} of {nbytes} bytes")
            end = b


class SessionHeader(msgspec.Struct):
    """The header's JSON."""

    content: dict[str, Any]
    coding: str
    blobs: list[ArrayEntry]


def write(
    path: str | os.PathLike[str], content: Mapping[str, Any], arrays: Mapping[str, Array], coding: str = "plain"
) -> int:
    """Writes ``content`` (JSON) and C-contiguous arrays in one rename, and waits for the disk; returns the bytes.

    Raises CheckpointError when the file cannot be written: a full disk, a missing folder; SessionError for content
    that is no JSON.
    """
    try:
        text = json.dumps(content, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SessionError(
            f"{path}: the session's memo is no JSON ({error}); keep texts, finite numbers, lists and dicts in it",
            field="memo",
        ) from None
    blobs, pieces = [], []
    for name, array in arrays.items():
        flat = _flat(array)
        runs = nonzero_runs(flat)
        parts: list[bytes | memoryview] = [flat[a:b].data for a, b in runs]
        if coding != "plain":
            parts = [CODINGS[coding].pack(b"".join(parts), array.itemsize)]
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        size = sum(len(part) for part in parts)
        shape = list(array.shape)
        blobs.append(
            {"name": name, "dtype": array.dtype.str, "shape": shape, "runs": runs, "size": size, "crc": crc}
        )
        pieces += parts
    header = msgspec.json.encode({"content": msgspec.Raw(text), "coding": coding, "blobs": blobs})
    prefix = PREFIX.pack(MAGIC, VERSION, zlib.crc32(header), len(header))
    total = len(prefix) + len(header) + sum(len(piece) for piece in pieces)
    atomic_stream(path, total, [prefix, header, *pieces], private=True)
    return total


def nonzero_runs(flat: U8) -> Runs:
    """Ranges of bytes (start, stop), ascending and apart, outside of which ``flat`` (n,) is zero."""
    whole = len(flat) // GRAIN * GRAIN
    used = flat[:whole].view(np.uint64).reshape(-1, GRAIN // 8).any(axis=1)
    if whole < len(flat):
        used = np.append(used, flat[whole:].any())
    edges = np.flatnonzero(np.diff(np.concatenate([[False], used, [False]]).astype(np.int8))) * GRAIN
    return [(int(a), min(int(b), len(flat))) for a, b in edges.reshape(-1, 2)]


def copy_used(source: Array, target: Array) -> None:
    """Copies into an array of zeros without touching what is zero in both: that takes no memory."""
    if not isinstance(source, np.ndarray):  # a device's
        target[...] = source
        return
    old, new = _flat(source), _flat(target)
    for a, b in nonzero_runs(old):
        new[a:b] = old[a:b]


def _flat(array: Array) -> U8:
    flat: U8 = array.reshape(-1).view(np.uint8)
    return flat


class SessionFile:
    """An opened session file whose every byte has been checked.

    Raises SessionError when it is missing, foreign, of another version, truncated or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = user_path(path)
        self._data = _mapped(self.path)
        size = self._check_prefix()
        header = self._header(self._data[PREFIX.size : PREFIX.size + size])
        self.content = header.content
        self._coding = CODINGS[header.coding]
        self._blobs = {blob.name: blob for blob in header.blobs}
        self._starts: dict[str, int] = {}
        self._check_blobs(PREFIX.size + size)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self._data)

    def require(self, arrays: Mapping[str, Array]) -> None:
        """Raises SessionError unless the file holds just these arrays, of their types and shapes."""
        found = {name: f"{blob.dtype} {tuple(blob.shape)}" for name, blob in self._blobs.items()}
        needed = {name: f"{array.dtype.str} {array.shape}" for name, array in arrays.items()}
        for name in sorted(found.keys() | needed.keys()):
            if found.get(name) != needed.get(name):
                raise SessionError(
                    f"{self.path}: array {name} is {found.get(name, 'absent')}, this edgekv needs "
                    f"{needed.get(name, 'none')}; the file was written by another version: open it with that, or "
                    "start a new session"
                )

    def fill(self, name: str, array: Array) -> None:
        """The array's elements, as they were."""
        blob, flat = self._blobs[name], _flat(array)
        try:
            blob.check_runs(len(flat), array.itemsize)
            unpacked = self._coding.unpack(self._stored(name), array.itemsize, blob.n_stored)
        except ValueError as error:
            raise self._error(f"is damaged: {name} has {error}") from None
        data = np.frombuffer(unpacked, np.uint8)
        end = 0
        for a, b in [*blob.runs, (len(flat), len(flat))]:
            if flat[end:a].any():  # a write would take memory that zeros don't need
                flat[end:a] = 0
            flat[a:b], data = data[: b - a], data[b - a :]
            end = b

    def _stored(self, name: str) -> memoryview:
        start = self._starts[name]
        return memoryview(self._data)[start : start + self._blobs[name].size]

    def _check_prefix(self) -> int:
        """The header's size."""
        if len(self._data) < PREFIX.size:
            raise self._error(f"has {len(self._data)} bytes, too few for a session")
        magic, version, crc, size = PREFIX.unpack_from(self._data)
        if magic != MAGIC:
            raise self._error("is no edgekv session")
        if version != VERSION:
            raise self._error(f"has format version {version}, this edgekv reads {VERSION}")
        if len(self._data) < PREFIX.size + size:
            raise self._error(f"is cut off: {len(self._data)} bytes, its header alone needs {PREFIX.size + size}")
        if zlib.crc32(self._data[PREFIX.size : PREFIX.size + size]) != crc:
            raise self._error("is damaged: its header does not match its checksum")
        return int(size)

    def _header(self, data: bytes) -> SessionHeader:
        try:
            header = msgspec.json.decode(data, type=SessionHeader)  # refuses NaN and infinity
        except (ValueError, RecursionError) as error:
            raise self._error(f"is damaged: its header is no session's ({shown(str(error))})") from None
        if header.coding not in CODINGS or len({blob.name for blob in header.blobs}) < len(header.blobs):
            raise self._error(f"is damaged: its header names the coding {shown(header.coding)}, or an array twice")
        return header

    def _check_blobs(self, position: int) -> None:
        total = position + sum(blob.size for blob in self._blobs.values())
        if len(self._data) != total:
            what = "is cut off" if len(self._data) < total else "has bytes at its end that are not its own"
            raise self._error(f"{what}: {len(self._data)} bytes, its header promises {total}")
        for name, blob in self._blobs.items():
            self._starts[name] = position
            position += blob.size
            if zlib.crc32(self._stored(name)) != blob.crc:
                raise self._error(f"is damaged: {name} does not match its checksum")

    def _error(self, what: str) -> SessionError:
        return SessionError(f"{self.path}: {what}; give a file that `save` wrote, or start a new session")


def _mapped(path: pathlib.Path) -> mmap.mmap | bytes:
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise SessionError(
            f"{path}: cannot be read ({error.strerror}); give a session file, or start a new session"
        ) from error
