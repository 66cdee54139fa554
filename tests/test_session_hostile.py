"""Session files whose checksums are right and whose content lies: SessionError, and no memory beyond it."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import golden_cases
import numpy as np
import pytest
from helpers import raises
from session_parts import joined, parts

from edgekv import EdgeKVError, Session
from edgekv.engine.session_file import SessionFile, write
from edgekv.errors import SessionError

Content = dict[str, Any]


def rewritten(
    source: pathlib.Path, target: pathlib.Path, change: Callable[[Any], Any], part: str = "content"
) -> pathlib.Path:
    """The file with other content, or other ``entries``; the checksum is honest."""
    content, entries, arrays = parts(source.read_bytes())
    given = {"content": content, "entries": entries}
    changed = change(given[part])
    given |= {} if changed is None else {part: changed}
    target.write_bytes(joined(given["content"], given["entries"], arrays))
    return target


def put(path: str, value: Any) -> Callable[[Content], None]:
    """Sets one entry: a/b/0 is content["a"]["b"][0]."""

    def change(content: Any) -> None:
        *parents, last = path.split("/")
        for key in parents:
            content = content[int(key) if isinstance(content, list) else key]
        content[int(last) if isinstance(content, list) else last] = value

    return change


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return golden_cases.write_checkpoint("llama1", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def saved(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    session = Session.load(model, kv="onebit", weights="f32", device="numpy")
    list(session.generate(list(range(1, 40)), max_new_tokens=3, temperature=1.0, seed=1))
    path = tmp_path_factory.mktemp("saved") / "file"
    session.save(path)
    return path


def entry(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets a field of the first array's entry."""

    def change(entries: dict[str, Any]) -> None:
        next(iter(entries.values()))[field] = value

    return change


def halved(entries: dict[str, Any]) -> None:
    """The first array that can be as half of its elements of twice the size."""
    found = next(each for each in entries.values() if each["dtype"] == "U8" and each["shape"][-1] % 2 == 0)
    found["dtype"], found["shape"][-1] = "U16", found["shape"][-1] // 2


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "no object": lambda entries: [1],
    "an entry": lambda entries: entries.update({"0/x": 3}),
    "none": lambda entries: {},
    "a name": lambda entries: entries.update({"9/x": entries.pop(next(iter(entries)))}),
    "a type": entry("dtype", "O"),
    "another type": halved,
    "shape": entry("shape", [1 << 60, 1 << 60]),
    "negative shape": entry("shape", [-1]),
    "offsets": entry("data_offsets", [0, -1]),
    "huge offsets": entry("data_offsets", [0, 10**30]),
    "backward": entry("data_offsets", [64, 0]),
}
LIES: dict[str, Callable[[Any], Any]] = {
    "no object": lambda content: [1],
    "empty": lambda content: {},
    "no text": lambda content: b"\xff\xfe",
    "deep": lambda content: b'{"tokens": ' + b"[" * 100_000,
    "huge number": lambda content: b'{"tokens": ' + b"9" * 5000 + b"}",
    "tokens": put("tokens", [10**400]),
    "negative token": put("tokens/0", -1),
    "ctx": put("ctx", 1e308 * 10),
    "kv": put("kv", {}),
    "layers": put("layers", [3, 4, 5]),
    "counters": put("layers/0/counters", []),
    "a counter": put("layers/0/counters/n_seen", "many"),
    "sampler": put("sampler", {"params": {"seed": []}, "state": {}}),
    "sampler state": put("sampler/state", []),
    "memo": put("memo", 3),
    "no number": put("memo", {"x": float("nan")}),
    "infinity": put("memo", {"x": float("inf")}),
    "dropped": put("n_dropped", -5),
    "first": put("n_first", -5),
    "spans": put("spans", [[0, 5, "x"], [0, 5, "x"]]),
}


@pytest.mark.parametrize(
    ("part", "lie"), [*(("content", lie) for lie in LIES), *(("entries", lie) for lie in ENTRIES)]
)
def test_lies_are_refused(
    part: str, lie: str, saved: pathlib.Path, model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    path = rewritten(saved, tmp_path / "file", (LIES if part == "content" else ENTRIES)[lie], part)
    with pytest.raises(EdgeKVError) as error:
        Session.restore(path, model, device="numpy")
    assert "\n" not in str(error.value)


def test_a_larger_array_is_refused_before_it_is_read(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "file", {}, {"a": np.ones((4, 4096), np.uint8)})
    file, small = SessionFile(tmp_path / "file"), np.zeros((4, 1024), np.uint8)
    with pytest.raises(SessionError, match="array 'a' is U8"):
        file.fill({"a": small})
    file.fill({"a": np.zeros((8, 5000), np.uint8)})


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = golden_cases.write_checkpoint("llama1", tmp_path_factory.mktemp("long"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 320}))
    return folder


@pytest.mark.parametrize(
    ("kv", "counter", "value"),
    [
        ("onebit", "n_seen", 0),
        ("kivi2", "n_sink", 3),
        ("kivi2", "n_seen", 100),
        ("kivi2", "n_packed", 33),
        ("kivi2", "n_stored", 0),
        ("kivi2", "n_stored", 320),
        ("kvcomp", "n_recent", 194),
        ("kvcomp", "n_stored", 128),
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
    assert session.caches[0].state().counters[counter] != value
    layers = len(session.caches)
    for lying in (1, layers):

        def change(content: Content, lying: int = lying) -> None:
            for layer in content["layers"][:lying]:
                layer["counters"][counter] = value

        with pytest.raises(SessionError):
            Session.restore(rewritten(tmp_path / "file", tmp_path / "lie", change), long_model, device="numpy")


@pytest.mark.parametrize("memo", [{"x": float("nan")}, {"x": {1, 2}}, {"x": "\ud800"}])
def test_a_memo_that_is_no_json_is_not_saved(model: pathlib.Path, memo: object, tmp_path: pathlib.Path) -> None:
    session = Session.load(model, weights="f32", device="numpy")
    session.prefill([1, 2])
    session.memo["x"] = memo
    with raises(SessionError, field="memo"):
        session.save(tmp_path / "file")
    assert not list(tmp_path.iterdir())
