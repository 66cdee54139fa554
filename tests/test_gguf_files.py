"""GGUF files that are damaged, cut off, or say what edgekv does not support."""

import contextlib
import json
import pathlib
from typing import Any

import gguf
import gguf_writer
import golden_cases
import numpy as np
import pytest
from helpers import raises

from edgekv.checkpoint.gguf import imported, open_gguf
from edgekv.engine.model import Model
from edgekv.errors import CheckpointError, ConfigError, EdgeKVError, TokenizerError
from edgekv.models import architecture, gguf_families
from edgekv.models.gguf import GgufMetadata

CONVERTED = json.loads((pathlib.Path(__file__).parent / "golden" / "gguf.json").read_text())


def vocabulary_only(folder: pathlib.Path, strings: dict[str, str]) -> pathlib.Path:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "b"])
        for key, value in strings.items():
            writer.add_string(key, value)

    return gguf_writer.write_vocabulary(folder, fill)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    checkpoint = golden_cases.write_checkpoint("llama2-gqa", folder / "folder")
    return gguf_writer.write_gguf(checkpoint, folder / "model.gguf", "Q8_0").read_bytes()


def refused(path: pathlib.Path, data: bytes, match: str, kind: type[EdgeKVError] = CheckpointError) -> None:
    path.write_bytes(data)
    with pytest.raises(kind, match=match) as error:
        Model.open(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the library computes sizes from what it finds
def test_damaged_files(whole: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "damaged.gguf"
    for size in (4, 20, 300, len(whole) // 2, len(whole) - 1):
        refused(path, whole[:size], "download it again")
    refused(path, b"PK\x03\x04" + whole[4:], "no GGUF file")
    refused(path, b"", "no GGUF file")
    refused(path, whole[:4] + b"\x63" + whole[5:], "correct GGUF file")
    with raises(CheckpointError, field="model"):
        Model.open(tmp_path / "absent.gguf")
    rng = np.random.default_rng(0)
    for _ in range(60):  # whatever it is, it is one of ours
        data = bytearray(whole)
        for position in rng.integers(0, 1500, 3):
            data[position] = rng.integers(256)
        path.write_bytes(data)
        with contextlib.suppress(EdgeKVError):
            Model.open(path)


def test_unsupported_files(shared: pathlib.Path, whole: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "other.gguf"
    refused(path, whole.replace(b"llama", b"mamba"), "'mamba' is not supported; supported: llama", ConfigError)
    for key, value, match in (
        ("tokenizer.ggml.pre", "tekken", "cuts texts like 'tekken'"),
        ("tokenizer.ggml.model", "bert", "tokenizer 'bert' is not supported"),
    ):
        strange = vocabulary_only(tmp_path, {"tokenizer.ggml.model": "gpt2"} | {key: value})
        refused(path, strange.read_bytes(), match, TokenizerError)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"give its GGUF file: .*a\.gguf"):
        Model.open(folder)


def test_a_shorter_file_than_its_index(whole: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    _, index = imported(path)
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="cut off inside tensor"):
        open_gguf(path, index)


@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        ("olmo2", {"attention.sliding_window": 16}, "OLMo 3"),
        ("granite", {"rope.scaling.finetuned": False}, "without rotations"),
        ("gemma3", {"block_count": 1 << 60}, "num_hidden_layers"),
        ("gemma3", {"attention.sliding_window_pattern": [True]}, "layer_types has 1 entries"),
        ("phi3", {"rope.dimension_count": 32}, "partial_rotary_factor"),
        ("phi3-longrope", {"rope.scaling.attn_factor": -1.0}, "attention_factor"),
    ],
)
def test_what_a_file_may_not_say(name: str, values: dict[str, Any], match: str) -> None:
    case = CONVERTED[name]
    own = case["architecture"]
    metadata = {"general.architecture": own, **case["metadata"]}
    metadata |= {f"{own}.{key}": value for key, value in values.items()}
    shapes = {tensor: tuple(shape) for tensor, (shape, _) in case["tensors"].items()}
    factors = {tensor: [1.0] * shapes[tensor][0] for tensor in shapes if tensor.startswith("rope_factors")}
    with pytest.raises(ConfigError, match=match):
        architecture(gguf_families()[own].config(GgufMetadata(metadata, shapes, factors)))


def test_longrope_needs_both_sets() -> None:
    metadata = {"general.architecture": "phi3", **CONVERTED["phi3-longrope"]["metadata"]}
    shapes = {"token_embd.weight": (96, 64)}
    with pytest.raises(ConfigError, match="no tensor rope_factors_short"):
        gguf_families()["phi3"].config(GgufMetadata(metadata, shapes, {"rope_factors_long.weight": [1.0] * 8}))
