"""What was read is kept on disk: the same text after a restart, this user's alone, bounded, and never an error."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import os
import pathlib
import resource
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import golden_cases
import lora_cases
import numpy as np
import pytest
from helpers import Cli, text, until
from serving import DEMO, engine_of, open_endpoints
from session_parts import parts, put, rewritten

from edgekv import SamplingParams, Session
from edgekv.engine import prefix_store
from edgekv.server import engine
from edgekv.server.engine import Cancelled
from edgekv.vision.model import Embeddings

CTX, SIZE = 1024, 64 << 20
rng = np.random.default_rng(4)
FIRST, SECOND, OTHER = ([int(t) for t in rng.integers(0, golden_cases.VOCAB, n)] for n in (600, 30, 500))


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of prefixes, of this test alone."""
    monkeypatch.setattr(prefix_store, "cache_root", lambda: tmp_path / "edgekv")
    return tmp_path / "edgekv" / "prefixes"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    root, write = tmp_path_factory.mktemp("models"), golden_cases.write_checkpoint
    return functools.cache(lambda name: write(name, root / name, max_position_embeddings=CTX))


@pytest.fixture
def model(models: Callable[[str], pathlib.Path]) -> pathlib.Path:
    return models("llama31")


@contextlib.contextmanager
def loaded(model: pathlib.Path, **options: Any) -> Iterator[Session]:
    given: Any = {"weights": "f32", "ctx": CTX, "kv": "onebit", "prefix_cache": SIZE, **options}
    with Session.load(model, **given) as session:
        yield session


def asked(session: Session, prompt: list[int]) -> list[int]:
    return text(session, session.align(prompt), 8, sampling=SamplingParams(0.0, repetition_penalty=1.3))


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        *(("llama31", kv) for kv in ("f16", "planes", "onebit", "q8")),
        *(("mistral", "f16"), ("mistral", "onebit"), ("lfm2", "f16"), ("qwen3_5", "onebit")),
    ],
)
def test_a_restart_changes_no_text(
    name: str, kv: str, models: Callable[[str], pathlib.Path], folder: pathlib.Path
) -> None:
    """A conversation that goes on, and one that only begins alike, as where the first was still in memory."""
    with loaded(models(name), kv=kv, prefix_cache=None) as session:
        answer, expected = asked(session, FIRST), []
        prompts = [*FIRST, *answer, *SECOND], [*FIRST[:-20], *SECOND]
        for prompt in prompts:
            session.reset()
            assert asked(session, FIRST) == answer
            expected.append((asked(session, prompt), session.n_read))
    assert names(folder) == []
    with loaded(models(name), kv=kv) as session:
        assert asked(session, FIRST) == answer
    (file,) = folder.iterdir()
    kept = file.read_bytes()
    for prompt, (said, n_read) in zip(prompts, expected, strict=True):
        file.write_bytes(kept)
        with loaded(models(name), kv=kv) as session:
            assert (asked(session, prompt), session.n_read) == (said, n_read)
            assert n_read < len(FIRST)


def test_only_what_it_was_read_with(
    models: Callable[[str], pathlib.Path], folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Another LoRA, scheme, context, weights, or model reads all of the prompt."""
    loras: dict[str, Any] = {"loras": {"mine": lora_cases.write("llama", tmp_path / "lora")}}

    def n_read(name: str = "llama31", lora: str | None = None, **options: Any) -> int:
        with loaded(models(name), **options) as session:
            session.use_lora(lora)
            asked(session, FIRST)
            return session.n_read

    assert n_read(lora="mine", **loras) == len(FIRST)
    for options in (loras, {"kv": "planes", **loras}, {"ctx": CTX - 1}, {"weights": "int8"}, {"name": "llama1"}):
        assert n_read(**options) == len(FIRST)
    assert n_read(lora="mine", **loras) < 300


def test_what_its_owner_said_stays_with_its_owner(model: pathlib.Path, folder: pathlib.Path) -> None:
    with loaded(model) as session:
        session.memo["messages"] = "secret"
        list(session.generate(session.align(FIRST), max_new_tokens=4, temperature=1.0, seed=77))
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    content = parts(file.read_bytes())[0]
    assert (content["memo"], content["sampler"]) == ({}, None)
    assert content["tokens"] == FIRST + content["tokens"][len(FIRST) :]
    assert len(content["tokens"]) == len(FIRST) + 3  # the last one is not in the cache
    with loaded(model) as session:
        session.memo["mine"] = 1
        session.align(FIRST)
        assert (session.memo, session.last_sampler) == ({"mine": 1}, None)


def lying(place: str, value: object) -> Callable[[pathlib.Path], object]:
    return lambda file: rewritten(file, file, put(place, value))


DAMAGES: dict[str, Callable[[pathlib.Path], object]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "a bit": lambda file: file.write_bytes(file.read_bytes()[:-9] + b"\xff" + file.read_bytes()[-8:]),
    "foreign": lambda file: file.write_bytes(b"GIF89a" * 100),
    "another's name": lambda file: file.rename(file.with_name(file.name[:-4] + "0.kv")),
    "tokens": lying("tokens", FIRST[:-3]),
    "no tokens": lying("tokens", "many"),
    "huge tokens": lying("tokens/0", 1 << 80),
    "counters": lying("layers/0/counters/n_packed", 1),
    "layers": lying("layers", []),
    "rotations": lying("fixed", "0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_file_is_as_good_as_none(damage: str, model: pathlib.Path, folder: pathlib.Path) -> None:
    with loaded(model) as session:
        said = asked(session, FIRST)
    before = names(folder)
    DAMAGES[damage](folder / before[0])
    with loaded(model) as session:
        assert (asked(session, FIRST), session.n_read) == (said, len(FIRST))
        assert names(folder) == []
    assert names(folder) == before


def test_folders_of_others_are_left_alone(
    model: pathlib.Path, folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_all() -> bool:
        with loaded(model) as session:
            asked(session, FIRST)
            return session.n_read == len(FIRST)

    (tmp_path / "elsewhere").mkdir()
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert read_all()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    folder.unlink()
    folder.mkdir(mode=0o777)
    assert read_all()
    assert folder.stat().st_mode & 0o777 == 0o700
    file = folder / names(folder)[0]
    file.rename(tmp_path / "file")
    file.symlink_to(tmp_path / "file")
    assert read_all()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert read_all()
    monkeypatch.setattr(prefix_store, "cache_root", lambda: pathlib.Path("/proc/none"))
    assert read_all()


def test_the_least_recently_used_goes(model: pathlib.Path, folder: pathlib.Path) -> None:
    prompts = [[*OTHER[:i], *FIRST] for i in range(1, 4)]
    with loaded(model) as session:
        asked(session, prompts[0])
    size = (folder / names(folder)[0]).stat().st_size
    bound, first = 2 * size + size // 2, names(folder)
    for prompt in (prompts[1], prompts[0], prompts[2]):
        with loaded(model, prefix_cache=bound) as session:
            asked(session, prompt)
        for file in folder.iterdir():  # a minute passes
            os.utime(file, (0, file.stat().st_mtime - 60))
    assert len(names(folder)) == 2
    assert first[0] in names(folder)
    with loaded(model, prefix_cache=size // 2) as session:  # holds none, and takes none away
        asked(session, OTHER)
    assert len(names(folder)) == 2


def test_a_conversation_that_grows_is_one_file_seldom_written(model: pathlib.Path, folder: pathlib.Path) -> None:
    seen = []
    with loaded(model) as session:
        for n in (200, 300, 320, 500, 600, 940):
            session.align([*FIRST, *OTHER][:n])
            session.prefill([*FIRST, *OTHER][len(session.tokens) : n])
            session.keep_prefix()
            seen.append([len(parts((folder / name).read_bytes())[0]["tokens"]) for name in names(folder)])
            for name in names(folder):
                os.utime(folder / name, (0, 0))
    assert seen == [[], [300], [300], [300], [600], [940]]
    with loaded(model) as session:
        asked(session, FIRST[:300])
        os.utime(folder / names(folder)[0], (0, 0))
    assert (folder / names(folder)[0]).stat().st_mtime > 0  # used from memory as well


def test_pictures_are_not_kept(model: pathlib.Path, folder: pathlib.Path) -> None:
    with loaded(model) as session:
        picture = Embeddings(np.ones((3, session.config.hidden_size), np.float32))
        session.prefill(session.align([*FIRST, picture, 5]))
    assert names(folder) == []
    with loaded(model) as session:
        session.prefill(session.align([*FIRST, 5]))
    with loaded(model) as session:  # but the text before one may come from a file
        rest = session.align([*FIRST, picture, 5])
        assert rest[-2:] == [picture, 5]
        assert len(session.tokens) == len(FIRST)


def test_a_full_disk_is_fine(model: pathlib.Path, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a tenth of what is free bounds what is kept."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with loaded(model) as session:
        said = asked(session, FIRST)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # write() fails as on a full disk
        try:
            session.keep_prefix()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert names(folder) == []
        usage = shutil.disk_usage("/")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    assert names(folder) == []
    with loaded(model) as session:
        assert asked(session, FIRST) == said


def test_several_write_at_once(model: pathlib.Path, folder: pathlib.Path) -> None:
    """Stores that know nothing of each other, as those of processes, keep few files; each is whole or absent."""
    with loaded(model, slots=4) as base:
        sessions = [base.fork() for _ in range(4)]
        for session in sessions:
            session._prefixes = prefix_store.PrefixStore(base.model, 1 << 20)

        def work(i: int) -> set[int]:
            found = set()
            for k in range(6):
                prompt = [*OTHER[: (i + k) % 3], *FIRST]
                sessions[i].align(prompt)
                found.add(len(sessions[i].tokens))
                sessions[i].prefill(prompt[len(sessions[i].tokens) :] or prompt[-1:])
                sessions[i].keep_prefix()
                sessions[i].reset()
            return found

        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            assert any(found - {0} for found in threads.map(work, range(4)))
        for name in names(folder):
            assert prefix_store.SavedState(folder / name).tokens[-20:]
    assert not [name for name in names(folder) if "partial" in name]


# The server


@pytest.fixture(scope="module")
def demo() -> Session:
    return Session.load(DEMO, ctx=CTX, prefix_cache=SIZE)


LONG = "It was a dark night, and the old man went to the sea. " * 55


def cached(session: Session, folder: pathlib.Path) -> int:
    """Asks a server about a long text, and waits for its file; returns how many tokens of the prompt it had."""
    with open_endpoints(session, pool_bytes=1 << 20) as client:
        body = {"prompt": LONG, "max_tokens": 4, "temperature": 0}
        usage = client.post("/v1/completions", json=body).json()["usage"]
        until(lambda: bool(names(folder)))
        return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_restart_of_a_server(demo: Session, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "IDLE_S", 0.01)
    assert cached(demo, folder) == 0
    assert cached(demo, folder) > 256


def test_a_request_interrupts_the_writing(demo: Session, folder: pathlib.Path) -> None:
    pool = engine_of(demo.fork()).pool
    session, rest = pool.acquire(list(range(400)))
    session.prefill(rest)
    pool.release(session)
    times = itertools.count()

    def is_wanted() -> bool:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # what is written can't be taken meanwhile
            assert not thread.submit(lambda: session not in pool._pinned).result()
        return next(times) > 8

    with pytest.raises(Cancelled):
        pool.keep_prefixes(is_wanted)
    assert names(folder) == []
    assert pool.acquire([*range(400), 5]) == (session, [5])
    pool.release(session)
    pool.keep_prefixes(lambda: False)
    assert len(names(folder)) == 1


def test_once_copied_a_session_may_be_taken(demo: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another request copies by the time the file is durable stays reserved for it."""
    pool = engine_of(demo.fork()).pool
    session = pool.base

    def keep_prefix(_: Session, between: Callable[[bool], None]) -> None:
        between(True)
        pool.release(pool.borrow(None))  # else waits for ever
        pool._pinned.append(session)

    monkeypatch.setattr(Session, "keep_prefix", keep_prefix)
    pool.keep_prefixes(lambda: False)
    assert pool._pinned == [session]


def test_the_options(cli: Cli) -> None:
    for command in ("serve", "chat"):
        said = cli(command, "--model", DEMO, "--prefix-cache", "some", status=2)
        assert "--prefix-cache some: accepted: " in said.err
