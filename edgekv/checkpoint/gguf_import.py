"""Reading a GGUF file's header by the gguf library, once: index and tokenizer are kept in the cache folder.

The library walks through every token and merge of the header, which takes seconds for large vocabularies.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any

from edgekv.checkpoint.cache_folder import cache_root, made_once
from edgekv.checkpoint.gguf_layout import ROPE_FACTORS, checkpoint_name, find_family, make_config
from edgekv.errors import CheckpointError, EdgeKVError

INDEX, VERSION = "gguf.json", 1
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
    folder = made_once(cache_root() / "gguf" / _key(path), lambda partial: _import(path, partial))
    index: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
    return folder, index


def _key(path: pathlib.Path) -> str:
    """Changes whenever the file does, without reading all of it."""
    try:
        with open(path, "rb") as file:
            head, status = file.read(HEAD_BYTES), os.fstat(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give a readable .gguf file") from error
    if head[:4] != MAGIC:
        raise CheckpointError(f"{path}: is no GGUF file; download it again")
    facts = f"{VERSION} {status.st_size} {status.st_mtime_ns} ".encode()
    return hashlib.sha256(facts + head).hexdigest()[:24]


def _import(path: pathlib.Path, folder: pathlib.Path) -> None:
    from edgekv.tokenizer.gguf_files import write_tokenizer

    gguf = library(str(path))
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        (folder / INDEX).write_text(json.dumps(_index(reader, metadata)))
        write_tokenizer(metadata, folder)
    except EdgeKVError as error:
        raise type(error)(f"{path}: {error}") from None
    except Exception as error:  # the library checks little and raises whatever comes of it
        raise CheckpointError(
            f"{path}: not a whole, correct GGUF file ({error!r:.200}); download it again"
        ) from None


def _index(reader: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Of each tensor, under the checkpoint's name: type, shape, where it is, and how its rows are ordered."""
    family = find_family(metadata)
    architecture = metadata["general.architecture"]
    heads = int(metadata[f"{architecture}.attention.head_count"])
    n_heads = {"attn_q": heads, "attn_k": int(metadata.get(f"{architecture}.attention.head_count_kv", heads))}
    shapes = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    tensors, factors = {}, None
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
            factors = [float(x) for x in tensor.data]
            continue
        role, shape = tensor.name.split(".")[-2], shapes[tensor.name]
        transposed = role in family.conv1d and len(shape) == 2
        tensors[checkpoint_name(family, tensor.name)] = {
            "kind": tensor.tensor_type.name,
            "shape": shape[::-1] if transposed else shape,
            "start": int(tensor.data_offset),
            "nbytes": int(tensor.n_bytes),
            "rows": shape[0],
            "table": role in ("token_embd", "position_embd"),
            "transposed": transposed,
            "interleaved_heads": n_heads[role] if role in family.interleaved else 0,
        }
    config = make_config(metadata, shapes, factors)
    return {"config": config, "data_start": int(reader.data_offset), "tensors": tensors}
