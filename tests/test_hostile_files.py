"""Lying stores, tokenizers and GGUF files end in one line each, and take no more memory than their size."""

import json
import pathlib
import struct
import tracemalloc
from typing import Any
from unittest import mock

import gguf as library
import golden_cases
import numpy as np
import pytest
import tokenizers
from gguf_writer import write_gguf, write_vocabulary
from helpers import Cli, raises
from session_parts import put

from edgekv import EdgeKVError
from edgekv.checkpoint.gguf import Header, import_gguf, open_gguf
from edgekv.engine.model import Model
from edgekv.errors import CheckpointError, ConfigError, TokenizerError
from edgekv.models import architecture, gguf_families
from edgekv.models.gguf import GgufMetadata
from edgekv.text import load_tokenizer
from edgekv.weights.formats import ModelFormat
from edgekv.weights.store import WeightStore

CONVERTED = json.loads((pathlib.Path(__file__).parent / "golden" / "gguf.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return golden_cases.write_checkpoint("llama2-gqa", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(folder: pathlib.Path) -> bytes:
    """A GGUF file."""
    return write_gguf(folder, folder / "model.gguf", "Q8_0").read_bytes()


# Stores

STORE_LIES: tuple[tuple[str, Any], ...] = (  # a place in store.json, and what is put there
    *(("format", "one"), ("weights", ["int8"]), ("identity", None), ("config", [1]), ("config/model_type", [])),
    *(("config/num_hidden_layers", 1_000_000), ("linears", {"0.qkv": "int8"}), ("linears", {"0.qkv": "int9"})),
)


def test_stores_whose_json_lies(folder: pathlib.Path, tmp_path: pathlib.Path, cli: Cli) -> None:
    store = tmp_path / "store"
    cli("quantize", "--model", folder, "--weights", "int8", "--output", store)
    manifest = (store / "store.json").read_text()
    for name, lie in STORE_LIES:
        changed = json.loads(manifest)
        put(name, lie)(changed)
        (store / "store.json").write_text(json.dumps(changed))
        with pytest.raises(EdgeKVError):
            pytest.fail(f"{name}: {Model.open(store)}")
    (store / "store.json").write_text(json.dumps(json.loads(manifest) | {"weights": "q9"}))
    with pytest.raises(CheckpointError, match=r"weights 'q9' are unknown; accepted are f32, int8, .* quantize"):
        Model.open(store)
    for text in ("[]", "{", "[" * 100_000, "\0", "3"):
        (store / "store.json").write_text(text)
        with pytest.raises(CheckpointError, match="not a weight store"):
            Model.open(store)
    (store / "store.json").write_text(manifest)
    weights = store / "weights.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"embed":{"dtype":"F', b'"embed":{"dtype":"U'))
    with pytest.raises(CheckpointError, match=r"'embed' is U\d+ .* expected F"):
        Model.open(store)


def test_a_store_that_another_start_has_made_anew_stays(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, form = Model.open(folder), ModelFormat("int8")
    store = model.store(form).folder

    def slow(path: pathlib.Path) -> WeightStore:
        monkeypatch.setattr("edgekv.weights.store.WeightStore", WeightStore)
        try:
            return WeightStore(path)
        finally:
            assert model.store(form).folder == path
            (path / "mark").touch()

    (store / "store.json").write_text("{}")
    monkeypatch.setattr("edgekv.weights.store.WeightStore", slow)
    assert model.store(form).form == form
    assert (store / "mark").exists()
    assert not list(store.parent.glob("*.partial-*"))


# Tokenizers


def tokenizer_json(**changes: Any) -> str:
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, [], byte_fallback=False))
    made.decoder = tokenizers.decoders.ByteLevel()
    return json.dumps(json.loads(made.to_str()) | changes)


def test_odd_tokenizers(tmp_path: pathlib.Path) -> None:
    for changes in (
        {"model": {"type": "BPE", "vocab": {"a": 1 << 31}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a z"]}},
        {"decoder": {"type": "Sequence", "decoders": []}},
        {"decoder": None},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
    ):
        (tmp_path / "tokenizer.json").write_text(tokenizer_json(**changes))
        with pytest.raises(TokenizerError):
            load_tokenizer(tmp_path).encode("ab" * 10)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    bad_names: tuple[Any, ...] = (3, [], {"content": []})
    for declared in ({"add_bos_token": "yes"}, *({"bos_token": name} for name in bad_names), {"eos_token": []}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
        with pytest.raises(TokenizerError):
            load_tokenizer(tmp_path)


def test_panics_are_errors(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rust's panics are no Exceptions."""
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    opened, panic = load_tokenizer(tmp_path), mock.Mock(side_effect=BaseException("index out of bounds"))
    monkeypatch.setattr(opened, "_encode", panic)
    with pytest.raises(TokenizerError, match="index out of bounds"):
        opened.encode("x")
    monkeypatch.setattr(tokenizers.Tokenizer, "from_buffer", panic)
    with pytest.raises(TokenizerError, match="index out of bounds"):
        load_tokenizer(tmp_path)


# GGUF files: counts


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf(entries: bytes, n_entries: int = 1, n_tensors: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_entries) + entries + rest


COUNTS = {
    "entries": gguf(b"", n_entries=1 << 60),
    "tensors": gguf(b"", n_entries=0, n_tensors=1 << 60),
    "a text": gguf(struct.pack("<Q", 1 << 62) + b"x" * 100),
    "an array": gguf(text(b"a") + struct.pack("<IIQ", 9, 0, 1 << 40) + b"\1" * 200_000),
    "arrays in arrays": gguf(text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1 << 20) * 1000),
    "a shape": gguf(b"", 0, 1, text(b"t") + struct.pack("<IQQIQ", 2, 1 << 62, 1 << 62, 0, 0)),
    "an alignment": gguf(text(b"general.alignment") + struct.pack("<II", 4, 0)),
    "experts": gguf(
        text(b"general.architecture")
        + struct.pack("<I", 8)
        + text(b"qwen3moe")
        + text(b"qwen3moe.attention.head_count")
        + struct.pack("<II", 4, 4),
        2,
        30,
        b"".join(
            text(b"blk.%d.ffn_up_exps.weight" % i) + struct.pack("<IQQQIQ", 3, 1, 1, 1 << 14, 0, 0)
            for i in range(30)
        )
        + bytes(1 << 16),
    ),
    "a type": gguf(text(b"a") + struct.pack("<II", 99, 0)),
    "cut off": gguf(text(b"a") + struct.pack("<I", 4)),
}


def test_gguf_counts_beyond_the_file(tmp_path: pathlib.Path) -> None:
    """The library took 6 GiB for a file of 218 kB."""
    tracemalloc.start()
    for name, data in COUNTS.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        tracemalloc.reset_peak()
        with pytest.raises(CheckpointError, match="not a whole, correct GGUF file"):
            Model.open(path)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


def test_experts_without_bytes(tmp_path: pathlib.Path) -> None:
    """Tensors of all experts, which are split into one for each."""
    shape = {"dtype": "F32", "shape": [1 << 14, 0, 4], "data_offsets": [0, 0]}
    header = json.dumps({f"model.layers.{i}.mlp.experts.down_proj": shape for i in range(60)}).encode()
    path = golden_cases.write_checkpoint("gpt-oss", tmp_path / "model")
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="more experts than its bytes"):
        Model.open(path)
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


def test_a_gguf_header_is_read_whole(whole: bytes, tmp_path: pathlib.Path) -> None:
    """Against the library's own reader."""
    path = tmp_path / "x.gguf"
    path.write_bytes(whole)
    header, reader = Header(path), library.GGUFReader(path)
    for name, value in header.metadata.items():
        assert reader.fields[name].contents() == value
    assert header.data_start == reader.data_offset
    for tensor in reader.tensors:
        ours, shape = header.tensors[tensor.name], tuple(int(n) for n in reversed(tensor.shape))
        assert (ours.shape, ours.kind, ours.start) == (shape, tensor.tensor_type, tensor.data_offset)


# GGUF files: damaged, cut off, or of what edgekv does not support


def refuses(path: pathlib.Path, data: bytes, match: str, kind: type[EdgeKVError] = CheckpointError) -> None:
    path.write_bytes(data)
    with raises(kind, path, match=match):
        Model.open(path)


def test_rope_factors_are_a_few_float32(tmp_path: pathlib.Path) -> None:
    for values in (np.ones(16, np.float16), np.ones(4097, np.float32)):
        path = write_vocabulary(tmp_path, lambda w, values=values: w.add_tensor("rope_freqs.weight", values))
        match = rf"has type [01] and the shape \({len(values)},\); accepted: type 0 \(F32\), at most 4096 values"
        with raises(CheckpointError, path, "rope_freqs.weight", match=match):
            Model.open(path)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the library computes sizes from what it finds
def test_damaged_gguf_files(whole: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "damaged.gguf"
    for size in (4, 20, 300, len(whole) // 2, len(whole) - 1):
        refuses(path, whole[:size], "download it again")
    refuses(path, b"PK\x03\x04" + whole[4:], "no GGUF file")
    refuses(path, b"", "no GGUF file")
    refuses(path, whole[:4] + b"\x63" + whole[5:], "correct GGUF file")
    refuses(path, whole.replace(b"llama", b"mamba"), "'mamba' is not supported; supported: llama", ConfigError)
    for model, cuts, match in (
        ("gpt2", "tekken", "cuts texts like 'tekken'"),
        ("bert", "default", "tokenizer 'bert' is not supported"),
    ):

        def fill(writer: library.GGUFWriter, model: str = model, cuts: str = cuts) -> None:
            writer.add_token_list(["a", "b"])
            writer.add_tokenizer_model(model)
            writer.add_tokenizer_pre(cuts)

        refuses(path, write_vocabulary(tmp_path, fill).read_bytes(), match, TokenizerError)
    with raises(CheckpointError, field="model"):
        Model.open(tmp_path / "absent.gguf")
    path.write_bytes(whole)
    index = import_gguf(path)[1]
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="cut off inside tensor"):
        open_gguf(path, index)
    with pytest.raises(CheckpointError, match=r"give its GGUF file: .*\.gguf"):
        Model.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        ("olmo2", {"attention.sliding_window": 16}, "OLMo 3"),
        ("granite", {"rope.scaling.finetuned": False}, "without rotations"),
        ("gemma3", {"attention.sliding_window_pattern": [True]}, "layer_types has 1 entries"),
        ("phi3", {"rope.dimension_count": 32}, "partial_rotary_factor"),
        ("phi3-longrope", {"without": "rope_factors_short.weight"}, "no tensor rope_factors_short"),
    ],
)
def test_what_a_gguf_file_may_not_say(name: str, values: dict[str, Any], match: str) -> None:
    case = CONVERTED[name]
    own = case["architecture"]
    metadata = {"general.architecture": own, **case["metadata"]}
    metadata |= {f"{own}.{key}": value for key, value in values.items()}
    shapes = {tensor: tuple(shape) for tensor, (shape, _) in case["tensors"].items()}
    names = (tensor for tensor in shapes if tensor.startswith("rope_factors") and tensor != values.get("without"))
    factors = {tensor: [1.0] * shapes[tensor][0] for tensor in names}
    with pytest.raises(ConfigError, match=match):
        architecture(gguf_families()[own].config(GgufMetadata(metadata, shapes, factors)))
