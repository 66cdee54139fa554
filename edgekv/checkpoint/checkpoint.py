"""Checkpoints: the tensors, the config and the tokenizer folder behind the path that a user gives."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgekv.checkpoint.quantized import unpack_tensors
from edgekv.checkpoint.tensors import Tensors
from edgekv.errors import CheckpointError, ConfigError, EdgeKVError, TokenizerError
from edgekv.files import parse_object, read_object, user_path
from edgekv.models import stacks_experts
from edgekv.types import TaskProgress

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TEXT_FILES = (
    *(*TOKENIZER_FILES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""The files of a model's tokenizer and chat template."""
FOREIGN_SUFFIXES = (".bin", ".ckpt", ".h5", ".msgpack", ".npz", ".onnx", ".pt", ".pth")

GGUF = ".gguf"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, whose weights are mapped and not read.

    path: the user's path. folder: its folder, None for a bare file. tensors: its weights. config: the content of
    config.json. config_path: the config's file, None if it was in a file's `__metadata__`. tokenizer_folder: the
    folder of the tokenizer, None without one. identify: computes the `identity`, with a callback for progress.
    """

    path: Path
    folder: Path | None
    tensors: Tensors
    config: dict[str, Any]
    config_path: Path | None
    tokenizer_folder: Path | None
    identify: Callable[[TaskProgress | None], str]

    @property
    def identity(self) -> str:
        """A hash of the config and the weights' files, 16 hex digits.

        The first time, the files are read whole; their hashes are remembered.
        """
        return self.identify(None)


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Opens a Hugging Face folder (one file, or shards with an index), a bare .safetensors file, or a .gguf file.

    The config is `config` where it is given, else config.json beside the weights, else the JSON text under
    "config" in a file's `__metadata__`. The tokenizer is looked for in `tokenizer` (a folder, or a tokenizer file
    in it), else beside the weights. A .gguf file holds both by itself.

    Raises CheckpointError for the weights, ConfigError for the config, TokenizerError for `tokenizer`.
    """
    source = user_path(path)
    folder = source if os.path.isdir(source) else None
    if source.suffix == GGUF:
        from edgekv.checkpoint.gguf import import_gguf, open_gguf

        nearby, index = import_gguf(source)
        tensors = readable = open_gguf(source, index)
        config_path = None if config is None else user_path(config)
        values = index["config"] if config_path is None else read_config(config_path)
    else:
        if not folder and source.name.endswith(FOREIGN_SUFFIXES):
            raise _unreadable_weights(source, [source.name])
        nearby, tensors = folder or source.parent, _open_folder(folder) if folder else Tensors.open(source)
        values, config_path = _find_config(source, nearby, tensors, config)
        readable = unpack_tensors(tensors.unstacked() if stacks_experts(values) else tensors, values)

    def identify(progress: TaskProgress | None) -> str:
        hashes = [file.content_hash(progress) for file in tensors.files]
        return hashlib.sha256(json.dumps([values, hashes], sort_keys=True).encode()).hexdigest()[:16]

    tokenizer_folder = _find_tokenizer(nearby, tokenizer)
    return Checkpoint(Path(path), folder, readable, values, config_path, tokenizer_folder, identify)


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the object in a config.json. Raises ConfigError if it is missing, too big, damaged or no object."""
    return _read_object(user_path(path), ConfigError)


def _open_folder(folder: Path) -> Tensors:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed ({error.strerror}); give a readable folder") from error
    files = [name for name in names if name.endswith(".safetensors")]
    if SINGLE in files:
        return Tensors.open(folder / SINGLE)
    if INDEX in names:
        return _open_shards(folder)
    if len(files) == 1:
        return Tensors.open(folder / files[0])
    if files:
        raise CheckpointError(
            f"{folder}: holds {len(files)} safetensors files ({shorten_list(files)}) and no {INDEX}; "
            "add the index, or give one of the files"
        )
    if gguf := [name for name in names if name.endswith(GGUF)]:
        raise CheckpointError(f"{folder}: holds no safetensors weights; give its GGUF file: {folder / gguf[0]}")
    if foreign := [name for name in names if name.endswith(FOREIGN_SUFFIXES)]:
        raise _unreadable_weights(folder, foreign)
    raise CheckpointError(f"{folder}: holds no {SINGLE} and no {INDEX}; give a folder with safetensors weights")


def _open_shards(folder: Path) -> Tensors:
    """Opens the shards of an index, and checks that each holds the tensors that the index lists."""
    index = folder / INDEX
    homes = _read_object(index, CheckpointError).get("weight_map")
    if not isinstance(homes, dict) or not homes or not all(isinstance(shard, str) for shard in homes.values()):
        raise CheckpointError(f"{index}: has no weight_map of tensors to shards; download it again")
    shards = sorted(set(homes.values()))
    if foreign := [shard for shard in shards if Path(shard).name != shard]:
        raise CheckpointError(f"{index}: names the shard {foreign[0]!r}; accepted: file names of its own folder")
    if absent := [shard for shard in shards if not os.path.exists(folder / shard)]:
        problem = f"lacks {len(absent)} of {len(shards)} shards ({shorten_list(absent)})"
        raise CheckpointError(f"{folder}: {problem}; download them")
    tensors = Tensors.open(*(folder / shard for shard in shards))
    for name, shard in homes.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise CheckpointError(
                f"{folder / shard}: lacks tensor {name!r} that {INDEX} promises; download the checkpoint again"
            )
    return tensors


def _unreadable_weights(path: Path, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{path}: {shorten_list(names)} cannot be read, only safetensors weights can; download those, or convert "
        "with save_pretrained(..., safe_serialization=True) of transformers"
    )


def _find_config(
    source: Path, nearby: Path, tensors: Tensors, explicit: str | os.PathLike[str] | None
) -> tuple[dict[str, Any], Path | None]:
    """Returns the config and the path of its file, if it is in one."""
    path = user_path(explicit) if explicit is not None else nearby / "config.json"
    if explicit is not None or os.path.exists(path):
        return read_config(path), path
    for file in tensors.files:
        if "config" in file.metadata:
            try:
                return parse_object(file.metadata["config"]), None
            except ValueError as error:
                raise ConfigError(f"{file.path}: config in __metadata__ {error}; download it again") from None
    raise ConfigError(
        f"{source}: no config.json in {nearby} and no 'config' in the file's __metadata__",
        field="config",
        advice="give the model's shape with {config:models/NAME.json}",
    )


def _find_tokenizer(nearby: Path, explicit: str | os.PathLike[str] | None) -> Path | None:
    if explicit is None:
        return nearby if holds_tokenizer(nearby) else None
    path = user_path(explicit)
    folder = path.parent if path.name in TOKENIZER_FILES else path
    if not holds_tokenizer(folder):
        raise TokenizerError(f"{path}: holds no tokenizer", accepted=[*TOKENIZER_FILES, "their folder"])
    return folder


def holds_tokenizer(folder: Path) -> bool:
    """Returns whether the folder has a tokenizer."""
    return any(os.path.isfile(folder / name) for name in TOKENIZER_FILES)


def _read_object(path: Path, error_class: type[EdgeKVError]) -> dict[str, Any]:
    try:
        return read_object(path)
    except ValueError as error:
        raise error_class(f"{path}: {error}; download it again, or give another") from None


def shorten_list(names: Sequence[str], limit: int = 3) -> str:
    """Returns the first ``limit`` names, and how many more there are, for a message."""
    suffix = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + suffix
