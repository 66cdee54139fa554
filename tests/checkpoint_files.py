"""Checkpoints on disk, right and wrong, for the tests of checkpoints."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from edgekv.checkpoint.tensors import DTYPES

CONFIG = {"model_type": "llama", "hidden_size": 4}


def raw_file(path: Path, header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """Writes a file with this header and data, however wrong, and this header length instead of the true one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(start: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write_folder(folder: Path, files: dict[str, dict[str, np.ndarray]], config: object = CONFIG) -> Path:
    """Writes a Hugging Face folder; with several files, an index too."""
    folder.mkdir(exist_ok=True)
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    if len(files) > 1:
        homes = {tensor: name for name, tensors in files.items() for tensor in tensors}
        write_index(folder, homes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_index(folder: Path, homes: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))


def sample(dtype: str, shape: tuple[int, ...] = (3, 5)) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 100, shape).astype(DTYPES[dtype])
