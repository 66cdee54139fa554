"""GGUF files, read as the Hugging Face checkpoints that they were made from.

The header is read once; the index of the tensors and the tokenizer's files are kept in the cache folder. Blocks
that a weight format can hold are used without loss. Sources: llama.cpp's ggml/src/ggml-common.h (blocks), gguf-py
and conversion/ (names and keys, which are in each family's file).
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from edgekv.checkpoint.tensors import (
    DTYPES,
    MAX_LAYER_EXPERTS,
    MAX_TENSORS,
    MappedFile,
    MappedTensor,
    Tensor,
    Tensors,
)
from edgekv.errors import CheckpointError, ConfigError, EdgeKVError
from edgekv.files import Memo, cache_root, create_folder_once, open_regular
from edgekv.models import gguf_families
from edgekv.models.gguf import ROPE_FACTORS, GgufMetadata
from edgekv.types import F32, I8, I64, U8, Array

INDEX, VERSION = "gguf.json", 3
HEAD_BYTES = 1 << 20
MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_ELEMENTS = 1 << 23  # of all arrays together; a vocabulary with scores, types and merges has 1.3 million
MAX_DEPTH, MAX_DIMENSIONS, MAX_FACTORS = 4, 4, 4096
ALIGNMENT = "general.alignment"
STRING, ARRAY = 8, 9
SCALARS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?")))
SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
FLOATS = ("F32", "F16", "BF16", "F64")  # types that have the same names in safetensors
TABLE_TYPE = "F16"  # of unpacked embedding tables


def open_gguf(path: pathlib.Path, index: dict[str, Any]) -> Tensors:
    """Opens the tensors of a file, with the checkpoint's names, order of rows and orientation.

    index: the index of `imported`. Raises CheckpointError if the file is cut off.
    """
    file = MappedFile(path)
    file.metadata = {"config": json.dumps(index["config"])}
    tensors: dict[str, Tensor] = {name: GgufTensor(file, name, entry) for name, entry in index["tensors"].items()}
    return Tensors(tensors, [file], "gguf")


class GgufTensor(MappedTensor):
    """A tensor of a GGUF file; quantized ones are read as float32, embedding tables as float16."""

    def __init__(self, file: MappedFile, name: str, entry: dict[str, Any]) -> None:
        self._entry, self._type = entry, str(entry["kind"])
        is_float = self._type in FLOATS
        dtype = self._type if is_float else TABLE_TYPE if entry["table"] else "F32"
        super().__init__(file, name, dtype, tuple(entry["shape"]), int(entry["start"]), int(entry["nbytes"]))
        if self.start + self.nbytes > file.nbytes:
            raise CheckpointError(f"{file.path}: is cut off inside tensor {name!r}; download it again")
        if not is_float:
            self.kind = self._type
            kept = self._type if self._type in KEPT else None
            self.exact_format = UNPACKED[self._type][2] if self._type in UNPACKED else kept
            self.nearest_format = self.exact_format or NEAREST.get(self._type, "int4-32")

    def read(self) -> Array:
        """Returns all values (rows, columns), dequantized. Raises CheckpointError where they are not finite."""
        with np.errstate(over="ignore"):
            values = self.rows(0, self._entry["rows"]).astype(DTYPES[self.dtype], copy=False)
        self.require_finite(values if self.kind else None)
        return (values.T if self._entry["transposed"] else values).reshape(self.shape)

    def rows(self, lo: int, hi: int, transposed: bool = False) -> Array:
        raw, kind = self.raw_rows(lo, hi), self._type
        if kind in FLOATS:
            values, offset = raw.view(DTYPES[kind]), self._entry["offset"]
            return (values.astype(np.float32) - np.float32(offset)).astype(values.dtype) if offset else values
        with np.errstate(invalid="ignore", over="ignore"):  # infinite scales of a damaged file
            if kind not in UNPACKED:
                return dequantize(raw, kind)
            codes, scales, offsets = blocks_of(raw, kind)
            values = codes * scales[..., None]
            return (values if offsets is None else values + offsets[..., None]).reshape(len(raw), -1)

    def blocks(self, lo: int, hi: int) -> UnpackedBlocks:
        codes, scales, offsets = blocks_of(self.raw_rows(lo, hi), self._type)
        return codes if offsets is None else codes - np.int8(8), scales, offsets

    def raw_rows(self, lo: int, hi: int) -> U8:
        """Returns bytes (hi - lo, bytes of a row), in the checkpoint's order of rows.

        GGUF stores channel i of a rotated projection next to channel i + head_dim / 2.
        """
        n_rows, heads = self._entry["rows"], self._entry["interleaved_heads"]
        shape = n_rows, self.nbytes // n_rows
        raw: U8 = np.ndarray(shape, np.uint8, buffer=self.file.data, offset=self.start)
        if not heads:
            return raw[lo:hi]
        head_dim = n_rows // heads
        head, channel = np.divmod(np.arange(lo, hi), head_dim)
        second, pair = np.divmod(channel, head_dim // 2)
        rows: I64 = head * head_dim + 2 * pair + second
        return raw[rows]


UnpackedBlocks = tuple[I8, F32, F32 | None]
"""Codes (r, blocks, 32), their scales (r, blocks), and offsets (r, blocks) to add to codes from 0 on, or None."""


def _half(blocks: U8, at: int) -> F32:
    """Returns the half floats at byte ``at`` of each block, as float32."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(packed: U8) -> I8:
    """Returns the low nibbles of all bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).view(np.int8)


def _q4_0(blocks: U8) -> UnpackedBlocks:
    """Unpacks a half float, then 16 bytes: elements 0..15 in the low nibbles, 16..31 in the high ones, plus 8."""
    return _nibbles(blocks[..., 2:]) - np.int8(8), _half(blocks, 0), None


def _q4_1(blocks: U8) -> UnpackedBlocks:
    """Unpacks a scale and a minimum, then nibbles as in Q4_0."""
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: U8) -> UnpackedBlocks:
    return blocks[..., 2:].view(np.int8), _half(blocks, 0), None


def _q4_k(blocks: U8) -> UnpackedBlocks:
    """Unpacks 256 numbers: two half floats, 8 scales and 8 minima of 6 bits in 12 bytes, then 4 times 64 nibbles.

    A number is (first half float) * scale * nibble - (second half float) * minimum.
    """
    packed = blocks[..., 4:16]
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32))
    steps = _half(blocks, 0)[..., None] * scales
    offsets = -_half(blocks, 2)[..., None] * minima
    rows = len(blocks)
    return codes.reshape(rows, -1, 32), steps.reshape(rows, -1), offsets.reshape(rows, -1)


UNPACKED: dict[str, tuple[int, Callable[[U8], UnpackedBlocks], str]] = {
    "Q4_0": (18, _q4_0, "int4-32"),
    "Q8_0": (34, _q8_0, "int8-32"),
    "Q4_1": (20, _q4_1, "int4-32-offsets"),
    "Q4_K": (144, _q4_k, "int4-32-offsets"),
}
"""Lossless types: (bytes of a block, unpacking function, weight format)."""

KEPT = "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S"
"""Types of which a weight format of that name keeps the bytes."""

NEAREST = dict.fromkeys(("Q5_0", "Q5_1"), "int8-32")
"""Types with more than 4 bits are quantized again to 8 bits; all others to 4."""


def blocks_of(raw: U8, kind: str) -> UnpackedBlocks:
    """Unpacks rows (r, bytes) of a type in UNPACKED."""
    size, unpack, _ = UNPACKED[kind]
    with np.errstate(invalid="ignore"):  # infinite scales of a damaged file
        return unpack(np.ascontiguousarray(raw).reshape(len(raw), -1, size))


def dequantize(raw: U8, kind: str) -> F32:
    """Unpacks rows (r, bytes) of any quantized type to (r, columns) float32, with the gguf library."""
    gguf = library("this file's weights")
    try:
        values: F32 = gguf.quants.dequantize(np.ascontiguousarray(raw), gguf.GGMLQuantizationType[kind])
        return values
    except NotImplementedError:
        problem = f"weights of type {kind} can't be read by the gguf package"
        raise CheckpointError(f"{problem}; give the model in Q4_0, Q8_0, Q4_K or F16") from None


class HeaderTensor(NamedTuple):
    """A tensor in a header. shape: rows first. kind: GGML's number of its type. start: its position."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


class Header:
    """The header of a GGUF file: metadata and the positions of tensors. Raises ValueError for a damaged file.

    Source of the layout: ggml's docs/gguf.md. The gguf library can read it, but makes an array of every token and
    trusts the counts: 6 GiB for a file of 218 kB.
    """

    def __init__(self, path: pathlib.Path) -> None:
        with open_regular(path) as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position, self._n_elements, self.nbytes = 0, 0, len(self._data)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, HeaderTensor] = {}
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
            self.tensors[tensor.name] = tensor._replace(start=self.data_start + tensor.start)
        if len(self.tensors) < n_tensors:
            raise ValueError("two tensors have one name")

    def floats(self, tensor: HeaderTensor) -> list[float]:
        """Returns the values of a tensor of at most MAX_FACTORS float32. Raises ValueError for any other."""
        if tensor.kind != 0 or math.prod(tensor.shape) > MAX_FACTORS:
            found = f"{tensor.name} has type {tensor.kind} and the shape {tensor.shape}"
            raise ValueError(f"{found}; accepted: type 0 (F32), at most {MAX_FACTORS} values")
        self._position = tensor.start
        return self._numbers("<f4", math.prod(tensor.shape))

    def _require(self, nbytes: int) -> None:
        if nbytes > len(self._data) - self._position:
            problem = f"its header asks for {nbytes} from {self._position} on"
            raise ValueError(f"it has {len(self._data)} bytes, {problem}")

    def _take(self, nbytes: int) -> bytes:
        self._require(nbytes)
        begin, self._position = self._position, self._position + nbytes
        return self._data[begin : self._position]

    def _numbers(self, dtype: str, n: int = 1) -> list[Any]:
        numbers: list[Any] = np.frombuffer(self._take(n * np.dtype(dtype).itemsize), dtype).tolist()
        return numbers

    def _number(self, dtype: str) -> int:
        return int(self._numbers(dtype)[0])

    def _text(self) -> str:
        return self._take(self._number("<u8")).decode()

    def _value(self, kind: int, depth: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            return self._array(depth)
        if kind not in SCALARS:
            raise ValueError(f"a value of the unknown type {kind}")
        return self._numbers(SCALARS[kind])[0]

    def _array(self, depth: int) -> list[Any]:
        kind, length = self._number("<u4"), self._number("<u8")
        self._n_elements += length
        if self._n_elements > MAX_ELEMENTS or depth == MAX_DEPTH:
            raise ValueError(f"arrays of {self._n_elements} elements, {depth + 1} deep; accepted: {MAX_ELEMENTS}")
        if kind in SCALARS:
            return self._numbers(SCALARS[kind], length)
        return [self._value(kind, depth + 1) for _ in range(length)]

    def _tensor(self) -> HeaderTensor:
        name = self._text()
        n_dimensions = self._number("<u4")
        if not 1 <= n_dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {name[:60]!r} has {n_dimensions} dimensions")
        rows_first = tuple(reversed(self._numbers("<u8", n_dimensions)))
        tensor = HeaderTensor(name, rows_first, self._number("<u4"), self._number("<u8"))
        if not 1 <= math.prod(tensor.shape) <= 8 * len(self._data):  # no type has less than a bit
            raise ValueError(f"tensor {name[:60]!r} has the shape {tensor.shape}, more than the file holds")
        return tensor


def library(purpose: str) -> Any:
    """Imports gguf. Raises EdgeKVError if it or protobuf is missing. purpose: what needs it, for the message."""
    try:
        import gguf
        import google.protobuf  # noqa: F401  of sentencepiece, which writes the file's tokenizer
    except ImportError:
        raise EdgeKVError(f"{purpose}: GGUF needs gguf and protobuf: pip install gguf protobuf") from None
    return gguf


def import_gguf(path: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any]]:
    """Returns the folder with a GGUF file's tokenizer, and its index, which are made at the first call.

    Raises CheckpointError for a damaged file, ConfigError for an unsupported one.
    """
    folder = cache_root() / "gguf" / _key(path)
    memo = Memo(folder / INDEX, VERSION)
    index: dict[str, Any] | None = memo.read()
    if index is None:
        if folder.is_dir() and memo.read() is None:  # damaged, not just made by another process
            shutil.rmtree(folder, ignore_errors=True)
        create_folder_once(folder, lambda partial: _import(path, partial))
        index = memo.read()
    if index is None:
        raise CheckpointError(f"{folder}: was removed while it was read; try again")
    return folder, index


def _key(path: pathlib.Path) -> str:
    """Returns a key that changes with the file, without reading all of it."""
    try:
        with open_regular(path) as file:
            head, status = file.read(HEAD_BYTES), os.fstat(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give a readable .gguf file") from error
    if head[:4] != MAGIC:
        raise CheckpointError(f"{path}: is no GGUF file; download it again")
    facts = f"{VERSION} {status.st_size} {status.st_mtime_ns} ".encode()
    return hashlib.sha256(facts + head).hexdigest()[:24]


def _import(path: pathlib.Path, folder: pathlib.Path) -> None:
    from edgekv.text.gguf import write_tokenizer
    from edgekv.text.tokenizer import library_errors

    gguf = library(str(path))
    try:
        header = Header(path)
        Memo(folder / INDEX, VERSION).write(_index(header, gguf))
        with library_errors("its tokenizer can't be used", "give the model's own tokenizer"):
            write_tokenizer(header.metadata, folder)
    except EdgeKVError as error:
        raise type(error)(f"{path}: {error}") from None
    except (ValueError, TypeError, LookupError, OverflowError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not a whole, correct GGUF file ({error!r:.200}); download it again"
        ) from None


def _index(header: Header, gguf: Any) -> dict[str, Any]:
    """Returns the index: the config, and of each tensor its type, shape, position, order of rows and offset.

    Raises ConfigError for an unsupported architecture.
    """
    metadata, families = header.metadata, gguf_families()
    architecture = metadata.get("general.architecture")
    if architecture not in families:
        raise ConfigError(f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(families)}")
    family, heads = families[architecture], int(metadata[f"{architecture}.attention.head_count"])
    if metadata.get(f"{architecture}.expert_count") and not family.has_experts("ffn_up_exps"):
        problem = f"GGUF files of architecture {architecture!r} with experts are not supported"
        raise ConfigError(f"{problem}; give the model's safetensors checkpoint")
    n_heads = {"attn_q": heads, "attn_k": int(metadata.get(f"{architecture}.attention.head_count_kv", heads))}
    tensors, factors, n_expert_bytes = dict[str, dict[str, Any]](), dict[str, Any](), 0
    for tensor in header.tensors.values():
        if tensor.name in ROPE_FACTORS:
            factors[tensor.name] = header.floats(tensor)
            continue
        if tensor.kind not in gguf.GGML_QUANT_SIZES:
            what = f"{tensor.name} has type {tensor.kind}, which the gguf package does not know"
            raise ConfigError(f"{what}; update it, or give the model in another type")
        kind = gguf.GGMLQuantizationType(tensor.kind)
        role, shape, (block, block_bytes) = tensor.name.split(".")[-2], tensor.shape, gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ValueError(f"{tensor.name} has rows of {shape[-1]}, its type has blocks of {block}")
        n_experts = 1
        if family.has_experts(role):
            n_experts, shape = shape[0], shape[1:]
            if n_experts > MAX_LAYER_EXPERTS or len(shape) != 2:
                raise ValueError(f"{tensor.name} has the shape {tensor.shape}; accepted: experts, rows, columns")
            n_expert_bytes += math.prod(tensor.shape) // block * block_bytes
            if n_expert_bytes > header.nbytes or len(tensors) + n_experts > MAX_TENSORS:
                raise ValueError(f"its experts are more than its {header.nbytes:,} bytes hold")
        transposed = role in family.conv1d and len(shape) == 2
        interleaved = n_heads[role] if role in family.interleaved else 0
        if interleaved and (interleaved < 1 or shape[0] % (2 * interleaved)):
            raise ValueError(f"{tensor.name} has {shape[0]} rows for {interleaved} heads")
        nbytes = math.prod(shape) // block * block_bytes
        entry = {
            "kind": kind.name,
            "shape": shape[::-1] if transposed else shape,
            "nbytes": nbytes,
            "rows": shape[0],
            "table": role in ("token_embd", "position_embd"),
            "transposed": transposed,
            "interleaved_heads": interleaved,
            "offset": family.norm_offset if role.endswith("norm") else 0.0,
        }
        for expert in range(n_experts):
            name = family.checkpoint_name(tensor.name, expert)
            tensors[name] = entry | {"start": tensor.start + expert * nbytes}
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    config = family.config(GgufMetadata(metadata, shapes, factors))
    return {"config": config, "data_start": header.data_start, "tensors": tensors}
