"""Opening a path: folders, shards, bare files, their configs and tokenizers, and what is wrong with them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import CONFIG, one_line, sample, write_folder, write_index
from safetensors.numpy import save_file

from edgekv.checkpoint import tensors
from edgekv.checkpoint.checkpoint import open_checkpoint, read_config
from edgekv.errors import CheckpointError, ConfigError, TokenizerError


def test_single_file_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, {"model.safetensors": {"w": sample("F32")}})
    source = open_checkpoint(tmp_path)
    assert (source.path, source.folder, source.config) == (tmp_path, tmp_path, CONFIG)
    assert source.config_path == tmp_path / "config.json"
    assert source.tokenizer_folder is None
    assert list(source.tensors) == ["w"]
    assert sum(t.nbytes for t in source.tensors.values()) == sample("F32").nbytes
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_checkpoint(str(tmp_path)).tokenizer_folder == tmp_path


def test_one_file_of_another_name(tmp_path: Path) -> None:
    write_folder(tmp_path, {"weights.safetensors": {"w": sample("F32")}})
    assert list(open_checkpoint(tmp_path).tensors) == ["w"]
    save_file({"v": sample("F32")}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    one_line(error, "more.safetensors", "weights.safetensors", "index")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "m", {"model.safetensors": {"w": sample("F32")}})
    monkeypatch.setenv("HOME", str(tmp_path))
    source = open_checkpoint("~/m", config="~/m/config.json")
    assert (source.path, source.folder) == (Path("~/m"), tmp_path / "m")


SHARDS = {
    "model-00001-of-00002.safetensors": {"a": sample("F32"), "b": sample("F16")},
    "model-00002-of-00002.safetensors": {"c": sample("I8")},
}


def test_sharded_folder(tmp_path: Path) -> None:
    tensors = open_checkpoint(write_folder(tmp_path, SHARDS)).tensors
    assert sorted(tensors) == ["a", "b", "c"]
    assert sum(t.nbytes for t in tensors.values()) == 15 * (4 + 2 + 1)
    assert tensors["b"].dtype == "F16"
    np.testing.assert_array_equal(tensors.require("c", (3, 5)).read(), sample("I8"))
    with pytest.raises(CheckpointError) as error:
        tensors["d"].read()
    one_line(error, "'d'", "2 shards")


def test_missing_shards_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path, SHARDS)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    one_line(error, "1 of 2 shards", "model-00002-of-00002.safetensors")


def test_tensor_absent_from_its_shard(tmp_path: Path) -> None:
    write_folder(tmp_path, SHARDS)
    save_file({"a": sample("F32")}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    one_line(error, "'b'", "model-00001-of-00002.safetensors")


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    write_folder(tmp_path, SHARDS)
    save_file({"a": sample("F32"), "c": sample("I8")}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    one_line(error, "'a'", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/outside.safetensors", "sub/in.safetensors", ".."]
)
def test_shards_outside_the_folder_are_refused(tmp_path: Path, shard: str) -> None:
    folder = write_folder(tmp_path / "m", SHARDS)
    save_file({"a": sample("F32")}, tmp_path / "outside.safetensors")
    write_index(folder, {"a": shard})
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    one_line(error, shard)


@pytest.mark.parametrize("homes", [None, {}, [1], {"a": 3}])
def test_damaged_index(tmp_path: Path, homes: object) -> None:
    write_folder(tmp_path, SHARDS)
    write_index(tmp_path, homes)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    one_line(error, "index.json", "weight_map")


def test_index_that_is_not_json(tmp_path: Path) -> None:
    write_folder(tmp_path, SHARDS)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    one_line(error, "index.json", "not valid JSON")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_other_formats_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path)
        one_line(error, name, "safetensors", "convert")


def test_nothing_to_open(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    one_line(error, tmp_path, "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path / "absent")
    one_line(error, tmp_path / "absent", "No such file")


def test_bare_file_finds_its_config(tmp_path: Path) -> None:
    path = tmp_path / "bare.safetensors"
    save_file({"w": sample("F32")}, path)
    with pytest.raises(ConfigError) as error:
        open_checkpoint(path)
    one_line(error, path, "config.json", "__metadata__", "config=")
    assert error.value.field == "config"

    save_file({"w": sample("F32")}, path, metadata={"config": json.dumps({"from": "metadata"})})
    source = open_checkpoint(path)
    assert (source.folder, source.config_path, source.config) == (None, None, {"from": "metadata"})

    (tmp_path / "config.json").write_text('{"from": "beside"}')
    assert open_checkpoint(path).config == {"from": "beside"}

    (tmp_path / "other.json").write_text('{"from": "argument"}')
    source = open_checkpoint(path, config=tmp_path / "other.json")
    assert (source.config_path, source.config) == (tmp_path / "other.json", {"from": "argument"})


def test_damaged_config_in_metadata(tmp_path: Path) -> None:
    save_file({"w": sample("F32")}, tmp_path / "a.safetensors", metadata={"config": "{"})
    with pytest.raises(ConfigError) as error:
        open_checkpoint(tmp_path / "a.safetensors")
    one_line(error, "a.safetensors", "__metadata__")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[1]", "list"),
        (b"null", "NoneType"),
        (b" " * (5 << 20), "5,242,880"),
    ],
)
def test_damaged_config(tmp_path: Path, content: bytes, part: str) -> None:
    write_folder(tmp_path, {"model.safetensors": {"w": sample("F32")}})
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        open_checkpoint(tmp_path)
    one_line(error, tmp_path / "config.json", part)


def test_config_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(ConfigError) as error:
            read_config(path)
        one_line(error, path, "cannot be read")


def test_tokenizer_argument(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "m", {"model.safetensors": {"w": sample("F32")}})
    tokens = tmp_path / "t"
    tokens.mkdir()
    with pytest.raises(TokenizerError) as error:
        open_checkpoint(model, tokenizer=tokens)
    one_line(error, tokens, "tokenizer.json")
    (tokens / "tokenizer.model").write_bytes(b"x")
    assert open_checkpoint(model, tokenizer=tokens).tokenizer_folder == tokens
    assert open_checkpoint(model, tokenizer=tokens / "tokenizer.model").tokenizer_folder == tokens


def identity_of(folder: Path, middle: np.ndarray, config: object = CONFIG) -> str:
    tensors = {"first": np.ones(1 << 16, np.float32), "middle": middle, "zlast": np.ones(1 << 16, np.float32)}
    return open_checkpoint(write_folder(folder, {"model.safetensors": tensors}, config)).identity


def test_identity_follows_config_and_every_tensor(tmp_path: Path) -> None:
    middle = np.zeros(1 << 16, np.float32)
    same = [identity_of(tmp_path / name, middle, dict(CONFIG)) for name in "ab"]
    assert same[0] == same[1] == identity_of(tmp_path / "c", middle, dict(reversed(CONFIG.items())))
    assert len(same[0]) == 16
    assert int(same[0], 16) >= 0
    others = {
        identity_of(tmp_path / "d", middle + 1),
        identity_of(tmp_path / "e", middle[:-1]),
        identity_of(tmp_path / "f", middle.astype(np.float16)),
        identity_of(tmp_path / "g", middle, {**CONFIG, "hidden_size": 8}),
        same[0],
    }
    assert len(others) == 5


def test_identity_follows_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where size and time stay as they were; and all bytes are read once, not at every start."""
    first, middle = identity_of(tmp_path, np.zeros(1 << 16, np.float32)), tmp_path / "model.safetensors"
    status, data = middle.stat(), bytearray(middle.read_bytes())
    data[len(data) // 2] ^= 1
    middle.write_bytes(data)
    os.utime(middle, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = open_checkpoint(tmp_path).identity
    assert changed != first
    monkeypatch.setattr(tensors, "SETTLED_NS", 0)  # the files are new
    assert open_checkpoint(tmp_path).identity == changed
    monkeypatch.setattr(tensors, "hash_spans", None)
    assert open_checkpoint(tmp_path).identity == changed


def test_a_file_that_changes_while_it_is_open_has_no_identity(tmp_path: Path) -> None:
    write_folder(tmp_path, {"model.safetensors": {"w": np.zeros(9, np.float32)}}, CONFIG)
    source, path = open_checkpoint(tmp_path), tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        _ = source.identity
