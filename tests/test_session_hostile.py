"""Session files whose checksums are right and whose content lies: SessionError, and no memory beyond it."""

import json
import pathlib
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import golden_cases
import numpy as np
import pytest
from helpers import raises

from edgekv import EdgeKVError, Session
from edgekv.errors import SessionError
from edgekv.session.file import MAGIC, PREFIX, VERSION, SessionFile, write

Header = dict[str, Any]


def rewritten(source: pathlib.Path, target: pathlib.Path, change: Callable[[Header], Any]) -> pathlib.Path:
    """The file with another header; the checksum is honest."""
    data = source.read_bytes()
    size = PREFIX.unpack_from(data)[3]
    header = json.loads(data[PREFIX.size : PREFIX.size + size])
    changed = change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(header if changed is None else changed).encode()
    prefix = PREFIX.pack(MAGIC, VERSION, zlib.crc32(text), len(text))
    target.write_bytes(prefix + text + data[PREFIX.size + size :])
    return target


def put(path: str, value: Any) -> Callable[[Header], None]:
    """Sets one entry: a/b/0 is header["a"]["b"][0]."""

    def change(header: Any) -> None:
        *parents, last = path.split("/")
        for key in parents:
            header = header[int(key) if isinstance(header, list) else key]
        header[int(last) if isinstance(header, list) else last] = value

    return change


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return golden_cases.write_checkpoint("llama1", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def saved(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, pathlib.Path]:
    """Plain, and compressed."""
    session = Session.load(model, kv="onebit", weights="f32", device="numpy")
    list(session.generate(list(range(1, 40)), max_new_tokens=3, temperature=1.0, seed=1))
    files = {}
    for compress in (False, True):
        files[compress] = tmp_path_factory.mktemp("saved") / "file"
        session.save(files[compress], compress=compress)
    return files


def stored(entry: str, value: Any) -> Callable[[Header], None]:
    """Sets an entry of the first array that holds anything."""

    def change(header: Header) -> None:
        next(blob for blob in header["blobs"] if blob["runs"])[entry] = value

    return change


LIES: dict[str, Callable[[Header], Any]] = {
    "no object": lambda header: [1],
    "empty": lambda header: {},
    "no text": lambda header: b"\xff\xfe",
    "deep": lambda header: b'{"content": ' + b"[" * 100_000,
    "huge number": lambda header: b'{"content": ' + b"9" * 5000 + b"}",
    "coding": put("coding", "zip"),
    "no coding": put("coding", []),
    "blobs": put("blobs", {}),
    "a blob": put("blobs/0", 3),
    "name": put("blobs/0/name", ["x"]),
    "twice": lambda header: header["blobs"].append(header["blobs"][0]),
    "type": put("blobs/0/dtype", "O"),
    "shape": put("blobs/0/shape", [1 << 60, 1 << 60]),
    "negative shape": put("blobs/0/shape", [-1]),
    "size": put("blobs/0/size", -1),
    "huge size": put("blobs/0/size", 10**30),
    "crc": put("blobs/0/crc", "x"),
    "run": stored("runs", [[0]]),
    "backward run": stored("runs", [[64, 0]]),
    "overlapping runs": stored("runs", [[0, 1024], [512, 2048]]),
    "long run": stored("runs", [[0, 1 << 61]]),
    "no runs": stored("runs", []),
    "runs of halves": stored("runs", [[0, 1]]),
    "content": put("content", []),
    "tokens": put("content/tokens", [10**400]),
    "negative token": put("content/tokens/0", -1),
    "ctx": put("content/ctx", 1e308 * 10),
    "kv": put("content/kv", {}),
    "layers": put("content/layers", [3, 4, 5]),
    "counters": put("content/layers/0/counters", []),
    "a counter": put("content/layers/0/counters/n_seen", "many"),
    "sampler": put("content/sampler", {"params": {"seed": []}, "state": {}}),
    "sampler state": put("content/sampler/state", []),
    "memo": put("content/memo", 3),
    "no number": put("content/memo", {"x": float("nan")}),
    "infinity": put("content/memo", {"x": float("inf")}),
    "dropped": put("content/n_dropped", -5),
    "first": put("content/n_first", -5),
    "spans": put("content/spans", [[0, 5, "x"], [0, 5, "x"]]),
}


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "compressed"])
@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(
    lie: str, compress: bool, saved: dict[bool, pathlib.Path], model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    path = rewritten(saved[compress], tmp_path / "file", LIES[lie])
    with pytest.raises(EdgeKVError) as error:
        Session.restore(path, model, device="numpy")
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = golden_cases.write_checkpoint("llama1", tmp_path_factory.mktemp("long"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 320}))
    return folder


@pytest.mark.parametrize(
    ("kv", "counter", "value"),
    [
        ("bitplane", "n_seen", 0),
        ("kivi2", "n_sink", 3),
        ("kivi2", "n_seen", 100),
        ("kivi2", "n_packed", 33),
        ("kivi2", "n_stored", 0),
        ("kivi2", "n_stored", 320),
        ("kvcomp", "n_recent", 194),
        ("kvcomp", "n_stored", 128),
        ("steps:budget=1000000", "n_stored", 256),
        ("h1b", "n_fitted", 300),
        ("snapkv:budget=100", "n_used", 101),
    ],
)
def test_counters_that_lie(
    kv: str, counter: str, value: int, long_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """In one layer; and in all of them alike, where they can't be told by the others."""
    session = Session.load(long_model, kv=kv, weights="f32", device="numpy")
    session.prefill([i % 90 for i in range(250)])
    session.save(tmp_path / "file")
    assert session.state.caches[0].state().counters[counter] != value
    layers = len(session.state.caches)
    for lying in (1, layers):

        def change(header: Header, lying: int = lying) -> None:
            for layer in header["content"]["layers"][:lying]:
                layer["counters"][counter] = value

        with pytest.raises(SessionError):
            Session.restore(rewritten(tmp_path / "file", tmp_path / "lie", change), long_model, device="numpy")


@pytest.mark.parametrize(("array", "value"), [("offsets", 1), ("bits", 64)])
def test_bit_strings_that_lie_elsewhere(
    array: str, value: int, long_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Within the pool still, but what is packed next would lie behind its end."""
    session = Session.load(long_model, kv="kvcomp:residual_length=0", weights="f32", device="numpy")
    session.prefill([i % 90 for i in range(250)])
    arrays = session.state.caches[0].state().arrays
    arrays[f"key.{array}"][:, : 3 if array == "offsets" else 1] += np.array(value, arrays[f"key.{array}"].dtype)
    session.save(tmp_path / "file")
    with pytest.raises(SessionError, match="what layer 0 holds"):
        Session.restore(tmp_path / "file", long_model, device="numpy")


def test_counters_by_their_former_names(long_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Files of before had n_bulk and n_packed for n_packed and n_stored."""
    session = Session.load(long_model, kv="kivi2:residual_length=32", weights="f32", device="numpy")
    session.prefill([i % 90 for i in range(250)])
    session.rewind(150)
    counters = session.state.caches[0].state().counters
    assert 0 < counters["n_packed"] < counters["n_stored"]

    def as_before(header: Header) -> None:
        for layer in header["content"]["layers"]:
            found = layer["counters"]
            found["n_bulk"], found["n_packed"] = found.pop("n_packed"), found.pop("n_stored")

    session.save(tmp_path / "file")
    path = rewritten(tmp_path / "file", tmp_path / "old", as_before)
    restored = Session.restore(path, long_model, device="numpy")
    assert [cache.state().counters for cache in restored.state.caches] == [counters] * 3
    np.testing.assert_array_equal(restored.logits([1, 2]), session.logits([1, 2]))


def test_unpacking_makes_no_more_than_is_stated(tmp_path: pathlib.Path) -> None:
    """A file of 12 MB whose codes stand for 100 MB."""
    path = tmp_path / "file"
    array = np.full(100_000_000, 7, np.uint8)
    write(path, {}, {"a": array}, "huffman")

    def less(header: Header) -> None:
        header["blobs"][0] |= {"shape": [4096], "runs": [[0, 4096]]}

    file = SessionFile(rewritten(path, path, less))
    target = np.zeros(4096, np.uint8)
    tracemalloc.start()
    with pytest.raises(SessionError, match="not the 4096 bytes"):
        file.fill("a", target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30_000_000  # the file, once more


@pytest.mark.parametrize("memo", [{"x": float("nan")}, {"x": {1, 2}}, {"x": "\ud800"}])
def test_a_memo_that_is_no_json_is_not_saved(model: pathlib.Path, memo: object, tmp_path: pathlib.Path) -> None:
    session = Session.load(model, weights="f32", device="numpy")
    session.prefill([1, 2])
    session.state.memo["x"] = memo
    with raises(SessionError, field="memo"):
        session.save(tmp_path / "file")
    assert not list(tmp_path.iterdir())
