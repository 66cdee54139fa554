"""A restored session goes on as if nothing had happened; a damaged or foreign file is refused; kill -9."""

import functools
import io
import operator
import pathlib
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import golden_cases
import helpers
import numpy as np
import pytest
from helpers import SESSION_KV, Cli, raises
from session_parts import put, rewritten

from edgekv import EdgeKVError, SamplingParams, Session
from edgekv.engine.session_file import SessionFile, fixed_checksum, write
from edgekv.errors import CheckpointError, ConfigError, SessionError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import Geometry

CTX = 1400
SAMPLING = SamplingParams(temperature=1.0, seed=5)
text = functools.partial(helpers.text, sampling=SAMPLING)
PROMPT = [int(t) for t in np.random.default_rng(0).integers(0, golden_cases.VOCAB, 1200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model whose config allows contexts beyond every scheme's window and budget."""
    return golden_cases.write_checkpoint("llama31", tmp_path_factory.mktemp("m"), max_position_embeddings=CTX)


@pytest.fixture(scope="module")
def loaded(model: pathlib.Path) -> Session:
    return Session.load(model, ctx=CTX)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory, loaded: Session) -> Session:
    folder = tmp_path_factory.mktemp("mistral")
    return Session.load(golden_cases.write_checkpoint("mistral", folder, max_position_embeddings=CTX), ctx=CTX)


@pytest.mark.parametrize("kv", SESSION_KV)
def test_restored_text_equals_uninterrupted_text(loaded: Session, kv: str, tmp_path: pathlib.Path) -> None:
    straight, saved = loaded.fork(kv=kv), loaded.fork(kv=kv)
    for session in (straight, saved):
        session.caches[0].mark_images([(100, 900)])
    whole, first = text(straight, PROMPT, 160), text(saved, PROMPT, 70)
    size = saved.save(tmp_path / "session")
    assert size == (tmp_path / "session").stat().st_size
    restored = Session.restore(tmp_path / "session", loaded)
    assert restored.report().cache_bytes == saved.report().cache_bytes
    second = text(restored, [], 90, sampling=restored.last_sampler)
    assert first + second == whole
    assert len(set(whole)) > 30


@pytest.mark.parametrize("kv", ["h2o", "onebit", "visual_planes"])
def test_sliding_layers_and_image_tokens(
    kv: str, sliding: Session, loaded: Session, tmp_path: pathlib.Path
) -> None:
    """Saved 20 tokens before the second image is complete, and is packed."""
    base = loaded if kv == "visual_planes" else sliding
    straight, saved = base.fork(kv=kv), base.fork(kv=kv)
    for session in (straight, saved):
        for cache in session.caches:
            cache.mark_images([(10, 60), (1100, 1250)])
    whole, first = text(straight, PROMPT, 100), text(saved, PROMPT, 30)
    saved.save(tmp_path / "session")
    restored = Session.restore(tmp_path / "session", base)
    assert first + text(restored, [], 70, sampling=restored.last_sampler) == whole


@pytest.mark.parametrize("kv", SESSION_KV)
def test_restored_after_a_rewind(loaded: Session, kv: str, tmp_path: pathlib.Path) -> None:
    """The rewind leaves tokens in the arrays behind the last one, which do no harm."""
    texts = []
    for save in (False, True):
        session = loaded.fork(kv=kv)
        text(session, PROMPT, 20)
        session.rewind(700)
        if save:
            session.save(tmp_path / "session")
            session = Session.restore(tmp_path / "session", loaded)
        texts.append(text(session, [1, 2, 3], 60))
    assert texts[0] == texts[1]


def test_saved_between_two_steps_with_its_memo(loaded: Session, tmp_path: pathlib.Path) -> None:
    session = loaded.fork(kv="kivi2")
    session.memo["messages"] = [{"role": "user", "content": "héllo"}]
    steps = session.generate(PROMPT, max_new_tokens=60, sampling=SAMPLING)
    first = [next(steps).token for _ in range(25)]
    session.save(tmp_path / "session")
    rest = [step.token for step in steps]
    restored = Session.restore(tmp_path / "session", loaded)
    assert restored.memo == session.memo
    assert restored.tokens == PROMPT + first
    assert text(restored, [], 35, sampling=restored.last_sampler) == rest


@pytest.fixture(scope="module")
def file(loaded: Session, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    session = loaded.fork(kv="onebit")
    text(session, PROMPT[:300], 5)
    path = tmp_path_factory.mktemp("session") / "file"
    session.save(path)
    return path


def test_every_flipped_bit_and_every_cut_is_noticed(file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    data, rng = bytearray(file.read_bytes()), random.Random(0)
    damaged = tmp_path / "damaged"
    for position in [*range(40), *(rng.randrange(len(data)) for _ in range(150))]:
        bit = 1 << rng.randrange(8)
        data[position] ^= bit
        damaged.write_bytes(data)
        with raises(SessionError, match=r"damaged|no edgekv session|format version"):
            SessionFile(damaged)
        data[position] ^= bit
    for content in (*(data[:size] for size in (*range(0, len(data), len(data) // 20), -1)), data + b"x"):
        damaged.write_bytes(content)
        with pytest.raises(SessionError, match="damaged"):
            SessionFile(damaged)
    SessionFile(file)


def test_foreign_files(model: pathlib.Path, file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    newer = tmp_path / "newer"
    newer.write_bytes(file.read_bytes().replace(b'"edgekv_session":"2"', b'"edgekv_session":"3"'))
    for path, reason in (
        (model / "model.safetensors", "is no edgekv session"),
        (tmp_path / "absent", "there is no such file"),
        (tmp_path, "it is a folder"),
        (pathlib.Path("/dev/null"), "it is a device"),
        (newer, "format version '3', this edgekv reads 2"),
    ):
        with raises(SessionError, field="session", match=reason):
            Session.restore(path, model)


FIXED = {  # CRC-32 of what a seed fixes, by scheme and head_dim; another one reads older files wrongly
    ("f16", 64): "00000000",
    ("onebit", 64): "0916702a",
    ("planes:seed=7", 128): "7eed69de",
    ("planes", 96): "6eb2756a",
    ("h1b", 64): "f90ccf5a",
}


@pytest.mark.parametrize(("kv", "head_dim"), FIXED)
def test_what_a_seed_fixes_stays_as_it_was(kv: str, head_dim: int) -> None:
    if kv == "h1b":
        pytest.importorskip("edgekv.papers.h1b")
    cache = CacheSpec.parse(kv).layer(Geometry(2, 1, head_dim, 512))
    assert fixed_checksum([cache]) == FIXED[kv, head_dim]


def test_a_file_without_checksum_of_rotations(loaded: Session, file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    old = rewritten(file, tmp_path / "old", lambda content: content.pop("fixed") and None)
    assert Session.restore(old, loaded).tokens == Session.restore(file, loaded).tokens


# Honest checksums, lying content


def entry(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Returns a change that sets a field of the first array's entry."""

    def change(entries: dict[str, Any]) -> None:
        next(iter(entries.values()))[field] = value

    return change


def halved(entries: dict[str, Any]) -> None:
    """Halves the first array that can be, as half of its elements of twice the size."""
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
    **{
        f"{place} {value}"[:40]: put(place, value)
        for place, value in (
            *(("tokens", [10**400]), ("tokens/0", -1), ("ctx", 1e308 * 10), ("kv", {}), ("n_dropped", -5)),
            *(("layers", [3, 4, 5]), ("layers/0/counters", []), ("layers/0/counters/n_seen", "many")),
            *(("sampler", {"params": {"seed": []}, "state": {}}), ("sampler/state", [])),
            *(("memo", 3), ("memo", {"x": float("nan")}), ("memo", {"x": float("inf")})),
            ("spans", [[0, 5, "x"], [0, 5, "x"]]),
        )
    },
}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"identity": "0" * 16, "model": "other"}, "has the model other;"),
    "other weights": ({"weights": "int8"}, "has int8; leave `weights` out"),
    "a scheme that is gone": ({"kv": "h2b:sketch_bits=3"}, "'h2b': unknown"),
    "another version of the scheme": ({"kv_version": 0}, "version 0 of onebit"),
    "another shape of arrays": ({"kv": "onebit:sink=8"}, "can't take over \\(counters"),
    "fewer layers": ({"layers": []}, "0 layers"),
    "other rotations": ({"fixed": "12345678"}, "rotations that another NumPy or another adapter made"),
    "a sampler of the future": ({"sampler": {"params": {"mirostat": 1}}}, "mirostat"),
}
LIARS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    **{name: ("content", operator.methodcaller("update", change), why) for name, (change, why) in OTHERS.items()},
    **{f"content: {name}": ("content", change, "") for name, change in LIES.items()},
    **{f"entries: {name}": ("entries", change, "") for name, change in ENTRIES.items()},
}


@pytest.mark.parametrize("name", LIARS)
def test_a_file_that_belongs_to_something_else_or_lies(
    name: str, loaded: Session, file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    part, change, reason = LIARS[name]
    path = rewritten(file, tmp_path / "file", change, part)
    session = loaded.fork(kv="onebit")
    text(session, PROMPT[:40], 3)
    before = list(session.tokens)
    with raises(EdgeKVError, match=reason or None):
        Session.restore(path, loaded)
    with pytest.raises(EdgeKVError):
        session.load_state(path)
    assert session.tokens == before
    assert len(text(session, [1], 3)) == 3


@pytest.mark.parametrize(
    ("kv", "counter", "value"),
    [
        *(("onebit", "n_seen", 0), ("kivi2", "n_sink", 3), ("kivi2", "n_seen", 100), ("kivi2", "n_packed", 33)),
        *(("kivi2", "n_stored", 0), ("kivi2", "n_stored", CTX), ("kvcomp", "n_recent", 194)),
        *(("kvcomp", "n_stored", 128), ("h1b", "n_fitted", 300), ("snapkv:budget=100", "n_used", 101)),
    ],
)
def test_counters_that_lie(kv: str, counter: str, value: int, loaded: Session, tmp_path: pathlib.Path) -> None:
    """Counters lie in one layer, or in all alike, where other layers can't tell."""
    session, lie = loaded.fork(kv=kv), tmp_path / "file"
    session.prefill(PROMPT[:250])
    session.save(lie)
    assert session.caches[0].state().counters[counter] != value
    for i in range(len(session.caches)):
        rewritten(lie, lie, put(f"layers/{i}/counters/{counter}", value))
        with pytest.raises(SessionError):
            Session.restore(lie, loaded)


@pytest.mark.parametrize("memo", [{"x": float("nan")}, {"x": {1, 2}}, {"x": "\ud800"}])
def test_a_memo_that_is_no_json_is_not_saved(loaded: Session, memo: object, tmp_path: pathlib.Path) -> None:
    session = loaded.fork()
    session.prefill([1, 2])
    session.memo["x"] = memo
    with raises(SessionError, field="memo"):
        session.save(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_what_is_asked_for_must_be_the_files(model: pathlib.Path, file: pathlib.Path, loaded: Session) -> None:
    with raises(SessionError, field="kv", match=r"kv='f16': .* has onebit; leave `kv` out"):
        Session.restore(file, loaded, kv="dense")
    with raises(SessionError, field="ctx"):
        Session.restore(file, loaded, ctx=1000)
    with raises(SessionError, field="weights"):
        Session.restore(file, model, weights="int8")
    with raises(ConfigError, field="device"):
        Session.restore(file, loaded, device="numpy")
    assert Session.restore(file, model, kv="onebit").plan.kv == CacheSpec.parse("onebit")


WRITER = """
import sys, numpy as np
from edgekv.engine.session_file import write
path, k = sys.argv[1], 0
while True:
    k += 1
    arrays = {str(i): np.full(200_000 + 1000 * i, k, np.uint64) for i in range(5)}
    write(path, {"k": k}, arrays)
    print(k, flush=True)
"""


def started_and_killed(arguments: list[object], seconds: float) -> list[bytes]:
    """Returns what a Python program printed after its first line, until it is killed."""
    with subprocess.Popen([sys.executable, "-c", *map(str, arguments)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(seconds)
        process.kill()
        return process.stdout.read().split()


def test_kill_9_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path: pathlib.Path) -> None:
    path, rng = tmp_path / "session", random.Random(1)
    for _ in range(5):
        said = started_and_killed([WRITER, path], rng.random() * 0.15)
        file = SessionFile(path)
        k = file.content["k"]
        assert k in (int(said[-1]), int(said[-1]) + 1) if said else k in (1, 2)
        arrays = {str(i): np.empty(200_000 + 1000 * i, np.uint64) for i in range(5)}
        file.fill(arrays)
        assert (arrays["4"] == k).all()
    write(path, {"k": 0}, {})
    assert list(tmp_path.iterdir()) == [path]  # what the killed left is gone


def test_a_full_disk_keeps_the_old_file(loaded: Session, file: pathlib.Path) -> None:
    """RLIMIT_FSIZE makes write() fail as a full disk does; CPython ignores SIGXFSZ."""
    before, session = file.read_bytes(), Session.restore(file, loaded)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            session.save(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_the_command_goes_on_with_a_session(
    stories: pathlib.Path, tmp_path: pathlib.Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))  # nothing is piped

    run = ["run", "--model", stories, "--temperature", 1, "--seed", 3]
    prompt, session = ["--prompt", "Once upon a time", "--kv", "onebit"], ["--session", tmp_path / "file"]
    whole = cli(*run, *prompt, "--max-new-tokens", 50).out
    first = cli(*run, *prompt, *session, "--max-new-tokens", 20).out
    assert first[:-1] + cli(*run, *session, "--max-new-tokens", 30).out == whole
    assert "leave --kv out" in cli(*run, *session, "--kv", "dense", status=2).err
