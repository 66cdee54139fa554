"""Stores, tokenizers and GGUF files that lie: one line each, and no more memory than the file can stand for."""

import json
import pathlib
import struct
import subprocess
import tracemalloc
from collections.abc import Callable
from typing import Any

import golden_cases
import pytest
import tokenizers
from gguf_writer import write_gguf
from test_session_hostile import put

from edgekv import EdgeKVError
from edgekv.checkpoint.gguf import Header
from edgekv.cli import main
from edgekv.engine.model import Model
from edgekv.errors import CheckpointError, TokenizerError
from edgekv.files import cache_root
from edgekv.text import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return golden_cases.write_checkpoint("llama1", tmp_path_factory.mktemp("model"))


@pytest.fixture
def store(folder: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    assert (
        main(["quantize", "--model", str(folder), "--weights", "int8", "--output", str(tmp_path / "store")]) == 0
    )
    return tmp_path / "store"


STORE_LIES: dict[str, Callable[[Any], None]] = {
    "format": put("format", "one"),
    "weights": put("weights", ["int8"]),
    "identity": put("identity", None),
    "config": put("config", [1]),
    "its model": put("config/model_type", []),
    "its layers": put("config/num_hidden_layers", 1_000_000),
    "its width": put("config/hidden_size", 128),
    "linears": put("linears", {"0.qkv": "int8"}),
    "a format": put("linears", {"0.qkv": "int9"}),
    "no linears": put("linears", [1]),
}


@pytest.mark.parametrize("lie", STORE_LIES)
def test_a_store_whose_json_lies(lie: str, store: pathlib.Path) -> None:
    manifest = json.loads((store / "store.json").read_text())
    STORE_LIES[lie](manifest)
    (store / "store.json").write_text(json.dumps(manifest))
    with pytest.raises(EdgeKVError):
        Model.open(store)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, "\0", "3"])
def test_a_store_without_json(text: str, store: pathlib.Path) -> None:
    (store / "store.json").write_text(text)
    with pytest.raises(CheckpointError, match="not a weight store"):
        Model.open(store)


def tokenizer_json(**changes: Any) -> str:
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, [], byte_fallback=False))
    library.decoder = tokenizers.decoders.ByteLevel()
    return json.dumps(json.loads(library.to_str()) | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "BPE", "vocab": {"a": 1 << 31}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a z"]}},
        {"model": []},
        {"decoder": {"type": "Sequence", "decoders": []}},
        {"decoder": None},
        {"added_tokens": [{"id": -1, "content": "x"}]},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
    ],
)
def test_odd_tokenizers(changes: dict[str, Any], tmp_path: pathlib.Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(**changes))
    with pytest.raises(TokenizerError):
        load_tokenizer(tmp_path).encode("ab" * 10)


class Panic(BaseException):
    """As Rust's panics arrive: no Exception."""


def test_panics_are_errors(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    opened = load_tokenizer(tmp_path)

    def panic(*arguments: object, **options: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(opened, "_encode", panic)
    with pytest.raises(TokenizerError, match="index out of bounds"):
        opened.encode("x")
    monkeypatch.setattr(tokenizers.Tokenizer, "from_buffer", panic)
    with pytest.raises(TokenizerError, match="index out of bounds"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "declared", [{"add_bos_token": "yes"}, {"bos_token": 3}, {"eos_token": []}, {"bos_token": {"content": []}}]
)
def test_odd_tokenizer_configs(declared: dict[str, Any], tmp_path: pathlib.Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    with pytest.raises(TokenizerError):
        load_tokenizer(tmp_path)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf(entries: bytes, n_entries: int = 1, n_tensors: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_entries) + entries + rest


COUNTS = {
    "entries": gguf(b"", n_entries=1 << 60),
    "tensors": gguf(b"", n_entries=0, n_tensors=1 << 60),
    "a text": gguf(struct.pack("<Q", 1 << 62) + b"x" * 100),
    "an array": gguf(text(b"a") + struct.pack("<IIQ", 9, 0, 1 << 40) + b"\1" * 200_000),
    "texts": gguf(text(b"a") + struct.pack("<IIQ", 9, 8, 1 << 22) + text(b"") * 1000),
    "arrays in arrays": gguf(text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1 << 20) * 1000),
    "dimensions": gguf(b"", 0, 1, text(b"t") + struct.pack("<I", 1 << 31) + b"\1" * 64),
    "a shape": gguf(b"", 0, 1, text(b"t") + struct.pack("<IQQIQ", 2, 1 << 62, 1 << 62, 0, 0)),
    "an alignment": gguf(text(b"general.alignment") + struct.pack("<II", 4, 0)),
    "a type": gguf(text(b"a") + struct.pack("<II", 99, 0)),
    "cut off": gguf(text(b"a") + struct.pack("<I", 4)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_gguf_counts_beyond_the_file(name: str, tmp_path: pathlib.Path) -> None:
    """The library took 6 GiB for a file of 218 kB."""
    path = tmp_path / "x.gguf"
    path.write_bytes(COUNTS[name])
    tracemalloc.start()
    with pytest.raises(ValueError):  # noqa: PT011 - of any kind: the next test has its words
        Header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000
    with pytest.raises(CheckpointError, match="not a whole, correct GGUF file"):
        Model.open(path)


def test_a_gguf_header_is_read_whole(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Against the library's own reader."""
    import gguf as library

    path = write_gguf(folder, tmp_path / "x.gguf", "Q8_0", tokenizer=False)
    header, reader = Header(path), library.GGUFReader(path)
    for name, value in header.metadata.items():
        assert reader.fields[name].contents() == value
    assert header.data_start == reader.data_offset
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert (ours.shape, ours.kind, ours.start) == (
            tuple(int(n) for n in reversed(tensor.shape)),
            tensor.tensor_type,
            tensor.data_offset,
        )


def test_partial_imports_of_killed_processes_go(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = write_gguf(folder, tmp_path / "x.gguf", tokenizer=False)
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = cache_root() / "gguf" / f"0123.partial-{dead.pid}"
    left.mkdir(parents=True)
    Model.open(path)
    assert not left.exists()
