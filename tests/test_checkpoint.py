"""Checkpoints on disk: tensors are what was written and are not read before they are asked for; damage is told."""

import errno
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import CONFIG, entry, raw_file, sample, write_folder, write_index
from helpers import raises
from safetensors.numpy import save_file

from edgekv.checkpoint import tensors
from edgekv.checkpoint.checkpoint import open_checkpoint, read_config
from edgekv.checkpoint.tensors import DTYPES, Tensors, TensorWriter, to_float32
from edgekv.errors import CheckpointError, ConfigError, EdgeKVError, TokenizerError


def refuses(path: Path, *parts: object, kind: type[EdgeKVError] = CheckpointError, **given: Any) -> EdgeKVError:
    """Asserts that opening the checkpoint fails in one line that has these parts."""
    with raises(kind, *parts) as error:
        open_checkpoint(path, **given)
    return error.value


# Files of tensors


def test_every_dtype_round_trips(tmp_path: Path) -> None:
    shapes = {"matrix": (3, 5), "vector": (7,), "scalar": (), "none": (0, 4)}
    specs = {f"{name} {dtype}": (dtype, shape) for dtype in DTYPES for name, shape in shapes.items()}
    with TensorWriter(tmp_path / "a", specs) as writer:
        for name, spec in specs.items():
            writer.write(name, sample(*spec))
    file = Tensors.open(tmp_path / "a")
    for name, (dtype, shape) in specs.items():
        found, expected = file[name].read(), sample(dtype, shape)
        assert (found.dtype, found.shape) == (expected.dtype, shape)
        np.testing.assert_array_equal(found, expected)
        assert (file[name].dtype, file[name].nbytes) == (dtype, expected.nbytes)


def test_arrays_are_read_only_views_in_file_order(tmp_path: Path) -> None:
    """An array may begin at a place that is no multiple of a number's size."""
    text = json.dumps({"late": entry(8, 16), "early": entry(0, 8)}).encode()
    text += b" " * (-len(text) % 8 + 1)
    file = Tensors.open(raw_file(tmp_path / "a", text, np.arange(4, dtype=np.float32).tobytes()))
    assert list(file) == ["early", "late"]
    late, array = file["late"], file["late"].read()
    assert late.start % 4 == 1
    np.testing.assert_array_equal(array, [2, 3])
    assert (array.flags.writeable, array.flags.owndata, file.files[0].metadata) == (False, False, {})


def test_lying_headers(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    lies: tuple[tuple[Any, int], ...] = (  # header, bytes of data
        (b"not JSON", 0),
        ({"unknown dtype": entry(0, 8, "Q9")}, 8),
        ({"a": entry(0, 8), "overlaps": entry(4, 12)}, 12),
        ({"a": entry(0, 8), "behind a hole": entry(12, 20)}, 20),
        ({"bytes left over": entry(0, 8)}, 12),
        ({"negative offset": entry(-8, 0)}, 8),
        ({"shape overflows": entry(0, 8, shape=(2**62, 2**62))}, 8),
        ({"shape against offsets": entry(0, 8, shape=(3,))}, 8),
        ({"new\nline": entry(4, 12)}, 12),
    )
    for header, n in lies:
        refuses(raw_file(path, header, bytes(n)), path, "download")
    for length in (1 << 63, 200):
        refuses(raw_file(path, {}, length=length), path, "download")


def test_files_that_are_cut_or_can_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": sample("F32")}, path)
    for size in (path.stat().st_size - 1, 40, 8, 3, 0):
        os.truncate(path, size)
        refuses(path, path, "download")
    refuses(tmp_path / "absent", "absent", "No such file")
    os.mkfifo(tmp_path / "pipe")
    refuses(tmp_path / "pipe", "pipe", "not a regular file")
    forbidden = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr("os.open", mock.Mock(side_effect=forbidden))  # root may read a file of mode 0
    refuses(tmp_path / "secret.safetensors", "secret.safetensors", "Permission denied")


def resident(kind: str) -> int:
    """Returns bytes of this process in memory: RssFile, of mapped files; VmRSS, all."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith(kind))


def test_what_is_resident(tmp_path: Path) -> None:
    """Opening 13 GB reads nothing, and release gives pages back."""
    n = 64 << 20
    entries = {"w": entry(0, 13 << 30, "F16", (13 << 29,)), "x": entry(13 << 30, 13 << 30, shape=(0,))}
    path = raw_file(tmp_path / "a", entries)
    os.truncate(path, path.stat().st_size + (13 << 30))  # sparse
    before, file = resident("VmRSS"), Tensors.open(path)
    array = file["w"].read()
    assert (array.nbytes, array[-1]) == (13 << 30, 0)
    assert resident("VmRSS") - before < 16 << 20
    assert not array[: n // 2].any()
    touched = resident("RssFile")
    file["w"].release()
    file["x"].release()
    assert resident("RssFile") < touched - n // 2
    assert not array[: n : 1 << 20].any()


def test_to_float32() -> None:
    special = [0.0, -0.0, 1.5, -2.75, np.inf, -np.inf, np.nan, 6e-8, 3e4]
    arrays = [np.array([special, special[::-1]]).astype(DTYPES[dtype]) for dtype in ("F64", "F32", "F16")]
    for array in (*arrays, np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(2, -1)):
        for part in (np.s_[:], np.s_[:, ::2], np.s_[0, 0]):
            piece, expected = np.asarray(array[part]), array.astype(np.float32)[part]
            np.testing.assert_array_equal(to_float32(piece), expected)
            out = np.full((2, *piece.shape), -1, np.float32)
            assert to_float32(piece, out[1, ...]).base is out
            np.testing.assert_array_equal(out[1], expected)
    with pytest.raises(CheckpointError, match=r"int8 .* BF16"):
        to_float32(np.zeros(2, np.int8))


# Folders and files that a user names

SHARDS = {
    "model-00001-of-00002.safetensors": {"a": sample("F32"), "b": sample("F16")},
    "model-00002-of-00002.safetensors": {"c": sample("I8")},
}
FIRST, SECOND = SHARDS


def test_a_folder_with_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "m", {"weights.safetensors": {"w": sample("F32")}})
    source = open_checkpoint(folder)
    assert (source.path, source.folder, source.config) == (folder, folder, CONFIG)
    assert (source.config_path, source.tokenizer_folder) == (folder / "config.json", None)
    assert list(source.tensors) == ["w"]
    (folder / "tokenizer.json").write_text("{}")
    assert open_checkpoint(str(folder)).tokenizer_folder == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    source = open_checkpoint("~/m", config="~/m/config.json")
    assert (source.path, source.folder) == (Path("~/m"), folder)
    save_file({"v": sample("F32")}, folder / "more.safetensors")
    refuses(folder, "more.safetensors", "weights.safetensors", "index")


def test_shards(tmp_path: Path) -> None:
    found = open_checkpoint(write_folder(tmp_path, SHARDS)).tensors
    assert {name: tensor.nbytes for name, tensor in found.items()} == {"a": 60, "b": 30, "c": 15}
    np.testing.assert_array_equal(found.require("c", (3, 5)).read(), sample("I8"))
    with raises(CheckpointError, "'c'", "(3, 5)", "(5, 3)"):
        found.require("c", (5, 3))
    with raises(CheckpointError, "'d'", "2 shards"):
        found["d"]
    save_file({"a": sample("F32"), "c": sample("I8")}, tmp_path / SECOND)
    refuses(tmp_path, "'a'", FIRST, SECOND)  # in both
    save_file({"a": sample("F32")}, tmp_path / FIRST)
    save_file({"c": sample("I8")}, tmp_path / SECOND)
    refuses(tmp_path, "'b'", FIRST)  # in none
    (tmp_path / SECOND).unlink()
    refuses(tmp_path, "1 of 2 shards", SECOND)


def test_an_index_that_lies(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", SHARDS)
    save_file({"a": sample("F32")}, tmp_path / "outside.safetensors")
    for shard in ("../outside.safetensors", "/etc/outside.safetensors", "sub/in.safetensors", ".."):
        write_index(folder, {"a": shard})
        refuses(folder, shard)
    for homes in (None, {}, [1], {"a": 3}):
        write_index(folder, homes)
        refuses(folder, "index.json", "weight_map")
    (folder / "model.safetensors.index.json").write_text("{")
    refuses(folder, "index.json", "not valid JSON")


def test_nothing_to_open(tmp_path: Path) -> None:
    refuses(tmp_path, tmp_path, "model.safetensors")
    for name in ("pytorch_model.bin", "consolidated.00.pth"):
        (tmp_path / name).write_bytes(b"x")
        for path in (tmp_path, tmp_path / name):
            refuses(path, name, "safetensors", "convert")
        (tmp_path / name).unlink()


def test_a_bare_file_finds_its_config(tmp_path: Path) -> None:
    path = tmp_path / "bare.safetensors"
    save_file({"w": sample("F32")}, path)
    assert refuses(path, path, "config.json", "__metadata__", "config=", kind=ConfigError).field == "config"
    save_file({"w": sample("F32")}, path, metadata={"config": "{"})
    refuses(path, path, "__metadata__", kind=ConfigError)
    save_file({"w": sample("F32")}, path, metadata={"config": json.dumps({"from": "metadata"})})
    source = open_checkpoint(path)
    assert (source.folder, source.config_path, source.config) == (None, None, {"from": "metadata"})
    (tmp_path / "config.json").write_text('{"from": "beside"}')
    assert open_checkpoint(path).config == {"from": "beside"}
    (tmp_path / "other.json").write_text('{"from": "argument"}')
    source = open_checkpoint(path, config=tmp_path / "other.json")
    assert (source.config_path, source.config) == (tmp_path / "other.json", {"from": "argument"})


def test_damaged_configs(tmp_path: Path) -> None:
    write_folder(tmp_path, {"model.safetensors": {"w": sample("F32")}})
    broken = ((content, "not valid JSON") for content in (b"{", b"", b"\xff\xfe", b"[" * 200_000))
    for content, part in (*broken, (b"[1]", "list"), (b"null", "NoneType"), (b" " * (5 << 20), "5,242,880")):
        (tmp_path / "config.json").write_bytes(content)
        refuses(tmp_path, tmp_path / "config.json", part, kind=ConfigError)
    for path in (tmp_path / "absent.json", tmp_path):
        with raises(ConfigError, path, "cannot be read"):
            read_config(path)


def test_a_tokenizer_elsewhere(tmp_path: Path) -> None:
    model, words = write_folder(tmp_path / "m", {"model.safetensors": {"w": sample("F32")}}), tmp_path / "t"
    words.mkdir()
    refuses(model, words, "tokenizer.json", kind=TokenizerError, tokenizer=words)
    (words / "tokenizer.model").write_bytes(b"x")
    for given in (words, words / "tokenizer.model"):
        assert open_checkpoint(model, tokenizer=given).tokenizer_folder == words


# Identities


def identity_of(folder: Path, middle: np.ndarray, config: object = CONFIG) -> str:
    ones = np.ones(1 << 16, np.float32)
    whole = {"first": ones, "middle": middle, "zlast": ones}
    return open_checkpoint(write_folder(folder, {"model.safetensors": whole}, config)).identity


def test_identity_follows_config_and_every_tensor(tmp_path: Path) -> None:
    middle = np.zeros(1 << 16, np.float32)
    same = {identity_of(tmp_path, middle), identity_of(tmp_path, middle, dict(reversed(CONFIG.items())))}
    others = {identity_of(tmp_path, each) for each in (middle + 1, middle[:-1], middle.astype(np.float16))}
    others.add(identity_of(tmp_path, middle, {**CONFIG, "hidden_size": 8}))
    assert (len(same), len(others | same), len(min(same))) == (1, 5, 16)


def test_identity_follows_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Size and time may stay as they were; and all bytes are read once, not at every start."""
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
