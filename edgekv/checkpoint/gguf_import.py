"""A GGUF file's header is read once: index and tokenizer are kept in the cache folder."""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
from typing import Any

from edgekv.cache_folder import Memo, cache_root
from edgekv.checkpoint.gguf_header import Header, Tensor
from edgekv.checkpoint.gguf_layout import ROPE_FACTORS, Facts, checkpoint_name, find_family, make_config
from edgekv.errors import CheckpointError, EdgeKVError
from edgekv.files import open_regular
from edgekv.folders import made_once

INDEX, VERSION = "gguf.json", 3
HEAD_BYTES = 1 << 20
MAGIC = b"GGUF"


def library(what: str) -> Any:
    """The gguf package. Raises EdgeKVError where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise EdgeKVError(f"{what}: GGUF needs the gguf package: pip install 'edgekv[gguf]'") from None
    return gguf


def imported(path: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any]]:
    """The folder with a GGUF file's tokenizer, and its index; made at the first call for this file.

    Raises CheckpointError for a damaged file, ConfigError for an unsupported one.
    """
    place = cache_root() / "gguf" / _key(path)
    index: dict[str, Any] | None = Memo(place / INDEX, VERSION).read()
    if index is None:
        shutil.rmtree(place, ignore_errors=True)  # damaged
        made_once(place, lambda partial: _import(path, partial))
        index = Memo(place / INDEX, VERSION).read()
    if index is None:
        raise CheckpointError(f"{place}: was removed while it was read; try again")
    return place, index


def _key(path: pathlib.Path) -> str:
    """Changes whenever the file does, without reading all of it."""
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
    from edgekv.tokenizer.gguf_files import write_tokenizer
    from edgekv.tokenizer.native import library_errors

    gguf = library(str(path))
    try:
        header = Header(path)
        Memo(folder / INDEX, VERSION).write(_index(header, gguf))
        with library_errors("its tokenizer can't be used", "give the model's own with tokenizer=PATH"):
            write_tokenizer(header.metadata, folder)
    except EdgeKVError as error:
        raise type(error)(f"{path}: {error}") from None
    except (ValueError, TypeError, LookupError, OverflowError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not a whole, correct GGUF file ({error!r:.200}); download it again"
        ) from None


def _index(header: Header, gguf: Any) -> dict[str, Any]:
    """Of each tensor, under the checkpoint's name: type, shape, where it is, how its rows are ordered, and what
    was added to it."""
    metadata = header.metadata
    family = find_family(metadata)
    architecture = metadata["general.architecture"]
    heads = int(metadata[f"{architecture}.attention.head_count"])
    n_heads = {"attn_q": heads, "attn_k": int(metadata.get(f"{architecture}.attention.head_count_kv", heads))}
    tensors, factors = {}, {}
    for tensor in header.tensors.values():
        if tensor.name in ROPE_FACTORS:
            factors[tensor.name] = header.floats(tensor)
            continue
        kind = gguf.GGMLQuantizationType(tensor.kind)
        role, shape = tensor.name.split(".")[-2], tensor.shape
        transposed = role in family.conv1d and len(shape) == 2
        interleaved = n_heads[role] if role in family.interleaved else 0
        if interleaved and (interleaved < 1 or shape[0] % (2 * interleaved)):
            raise ValueError(f"{tensor.name} has {shape[0]} rows for {interleaved} heads")
        tensors[checkpoint_name(family, tensor.name)] = {
            "kind": kind.name,
            "shape": shape[::-1] if transposed else shape,
            "start": tensor.start,
            "nbytes": _nbytes(tensor, *gguf.GGML_QUANT_SIZES[kind]),
            "rows": shape[0],
            "table": role in ("token_embd", "position_embd"),
            "transposed": transposed,
            "interleaved_heads": interleaved,
            "offset": family.norm_offset if role.endswith("norm") else 0.0,
        }
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    config = make_config(Facts(metadata, shapes, factors))
    return {"config": config, "data_start": header.data_start, "tensors": tensors}


def _nbytes(tensor: Tensor, block: int, block_bytes: int) -> int:
    if tensor.shape[-1] % block:
        raise ValueError(f"{tensor.name} has rows of {tensor.shape[-1]}, its type has blocks of {block}")
    return tensor.n_elements // block * block_bytes
