"""Conversations that decode together say what each says alone."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import json
import pathlib
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import golden_cases
import numpy as np
import pytest
from helpers import raises
from serving import serving

from edgekv import ConfigError, Session
from edgekv.session.turns import Together

SLOTS = 3


@pytest.mark.parametrize("case", ["llama31", "gpt2", "rope-dynamic"])
@pytest.mark.parametrize("kv", ["dense", "onebit", "h2o"])
def test_a_pass_of_several_conversations(case: str, kv: str, tmp_path: pathlib.Path) -> None:
    """Of different lengths, their tokens in one pass of the linear layers."""
    model = golden_cases.write_checkpoint(case, tmp_path)
    first = Session.load(model, kv=kv, weights="f32")
    sessions = [first, first.fork(), first.fork()]
    tokens = golden_cases.tokens(case)
    for n, session in zip((5, 20, 11), sessions, strict=True):
        session.prefill(tokens[:n])
    alone = [session.fork() for session in sessions]
    for session, other in zip(sessions, alone, strict=True):
        other.copy_from(session)
    for token in tokens[:8]:
        expected = [other.decoder.step(token, other.state.caches).copy() for other in alone]
        together = first.decoder.step_together([token] * 3, [session.state.caches for session in sessions])
        np.testing.assert_allclose(together, expected, atol=2e-3)


class Recorded:
    """A decoder's passes, by the number of conversations in each."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        decoder = session.decoder
        step, together = decoder.step, decoder.step_together

        def one(token: int, caches: Any) -> Any:
            self.rows.append(1)
            return step(token, caches)

        def several(tokens: Sequence[int], caches: Any) -> Any:
            self.rows.append(len(tokens))
            return together(tokens, caches)

        monkeypatch.setattr(decoder, "step", one)
        monkeypatch.setattr(decoder, "step_together", several)


def at_once(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Each in a thread of its own, begun together."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        barrier.wait()
        return work()

    with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


@pytest.mark.parametrize("kv", ["dense", "onebit", "h2o"])
def test_forks_generate_in_threads(kv: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of each alone, and each of their tokens in one pass; prompts are read in between."""
    model = golden_cases.write_checkpoint("llama31", tmp_path)
    session = Session.load(model, kv=kv, weights="f32", slots=SLOTS)
    tokens = golden_cases.tokens("llama31")
    prompts = [tokens[:n] for n in (5, 20, 11)]

    def text(fork: Session, prompt: Sequence[int]) -> list[int]:
        return [step.token for step in fork.generate(prompt, max_new_tokens=24)]

    expected = [text(session.fork(), prompt) for prompt in prompts]
    passes = Recorded(session, monkeypatch)
    forks = [session.fork() for _ in prompts]
    works = [functools.partial(text, *each) for each in zip(forks, prompts, strict=True)]
    assert at_once(works) == expected
    assert sum(passes.rows) == SLOTS * 23


class Slow:
    """A decoder whose passes say when they are made."""

    threads, chunk = 1, 256

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.fails = False

    def step(self, token: int, caches: Any) -> np.ndarray:
        return self.step_together([token], [caches])[0]

    def step_together(self, tokens: Sequence[int], caches: Any) -> np.ndarray:
        self.passes.append(list(tokens))
        if self.fails:
            raise MemoryError("no room")
        return np.repeat(np.float32(tokens)[:, None], 2, 1)


def turns_of(decoder: Slow) -> Together:
    return Together(decoder)  # type: ignore[arg-type]


def test_texts_share_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass has a token of every text that goes on."""
    monkeypatch.setattr("edgekv.session.turns.PATIENCE_S", 60)
    decoder = Slow()
    turns = turns_of(decoder)

    def write(first: int) -> None:
        for token in range(first, first + 8):
            np.testing.assert_array_equal(turns.step(token, ()), [token, token])
        turns.leave()

    threads = [threading.Thread(target=write, args=(100 * i,)) for i in range(SLOTS)]
    with turns.alone():
        for thread in threads:
            thread.start()
        while len(turns._asked) < SLOTS:
            time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert [len(tokens) for tokens in decoder.passes] == [SLOTS] * 8


def test_a_prompt_lets_tokens_go_first() -> None:
    """A token that was asked for while a prompt is read gets its logits at the next pause."""
    decoder = Slow()
    turns = turns_of(decoder)
    reading, asked = threading.Event(), threading.Event()
    logits: list[Any] = []

    def write() -> None:
        reading.wait()
        asked.set()
        logits.append(turns.step(7, ()))

    thread = threading.Thread(target=write)
    thread.start()
    with turns.alone() as pause:
        reading.set()
        asked.wait()
        while not decoder.passes:
            pause()
        assert decoder.passes == [[7]]
        thread.join()
    np.testing.assert_array_equal(logits[0], [7, 7])


def test_a_prompt_is_not_kept_out() -> None:
    """By a text that asks for its next token as soon as it has one."""
    decoder = Slow()
    turns = turns_of(decoder)
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            turns.step(1, ())

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(20):
        with turns.alone():
            pass
    ended.set()
    thread.join()


def test_who_does_not_come_is_not_waited_for() -> None:
    """A text whose reader went away without a word holds nobody up for more than a moment."""
    decoder = Slow()
    turns = turns_of(decoder)
    threading.Thread(target=turns.step, args=(1, ())).start()
    for token in (2, 3):
        np.testing.assert_array_equal(turns.step(token, ()), [token, token])
    assert sorted(itertools.chain.from_iterable(decoder.passes)) == [1, 2, 3]


def test_a_failed_pass_is_told_to_all() -> None:
    decoder = Slow()
    turns = turns_of(decoder)
    decoder.fails = True

    def fails(token: int) -> str:
        with pytest.raises(MemoryError) as caught:
            turns.step(token, ())
        return str(caught.value)

    assert at_once([lambda: fails(1), lambda: fails(2)]) == ["no room", "no room"]
    decoder.fails = False
    np.testing.assert_array_equal(turns.step(5, ()), [5, 5])


def test_options(tmp_path: pathlib.Path) -> None:
    with raises(ConfigError, field="slots"):
        Session.load("demo", slots=0)
    with raises(ConfigError, field="draft"):
        Session.load("demo", slots=2, draft="ngram")
    assert Session.load("demo", slots=2, draft="auto", ctx=64).runner.drafts is None


def test_a_server_with_slots(tmp_path: pathlib.Path) -> None:
    """Four clients, two at a time: the answers that each has alone."""
    with serving(tmp_path, "--kv", "onebit", "--slots", 2, "--weights", "f32") as server:

        def answer(prompt: str) -> str:
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "model": "demo"}
            request = urllib.request.Request(
                f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                return str(json.loads(reply.read())["choices"][0]["text"])

        prompts = ["It was a dark night", "The old man said that", "In the morning they", "She looked at the"]
        expected = [answer(prompt) for prompt in prompts]
        assert at_once([functools.partial(answer, prompt) for prompt in prompts]) == expected
        with urllib.request.urlopen(f"{server.url}/props", timeout=60) as reply:
            assert json.loads(reply.read())["total_slots"] == 2
