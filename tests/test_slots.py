"""Conversations that decode together say what each says alone."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import pathlib
import urllib.request
from collections.abc import Sequence

import golden_cases
import numpy as np
import pytest
from helpers import raises
from serving import serving
from slot_cases import SLOTS, Recorded, at_once

from edgekv import ConfigError, Session, SessionError
from edgekv.engine.decoder import FEW_ROWS


@pytest.mark.parametrize(
    ("case", "kv"), [("llama31", "dense"), ("llama31", "onebit"), ("gpt2", "onebit"), ("rope-yarn", "h2o")]
)
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
        expected = [other._runner.decoder.step(token, other.caches).copy() for other in alone]
        together = first._runner.decoder.step_together([token] * 3, [session.caches for session in sessions])
        np.testing.assert_allclose(together, expected, atol=2e-3)


@pytest.mark.parametrize(
    ("case", "weights"),
    [
        ("mixtral", "int8"),
        ("mixtral", "int4"),
        ("gpt-oss", "int4"),
        ("qwen3-moe", "int8"),
        ("llama31", "int4"),
        ("gpt2", "int8"),
    ],
)
def test_a_token_has_the_logits_that_it_has_alone(case: str, weights: str, tmp_path: pathlib.Path) -> None:
    """To the bit, beside however many others; so the float32 products of a router are those of each row."""
    model = golden_cases.write_checkpoint(case, tmp_path)
    first, tokens = Session.load(model, kv="dense", weights=weights), golden_cases.tokens(case)
    alone, sessions = ([first.fork() for _ in range(2 * FEW_ROWS + 3)] for _ in range(2))
    for i, both in enumerate(zip(alone, sessions, strict=True)):
        for session in both:
            session.prefill(tokens[i : 2 * i + 3])
    for n in (2, 3, FEW_ROWS, len(sessions)):
        expected = [each._runner.decoder.step(tokens[n], each.caches).copy() for each in alone[:n]]
        together = first._runner.decoder.step_together([tokens[n]] * n, [each.caches for each in sessions[:n]])
        np.testing.assert_array_equal(together, expected)


@pytest.mark.parametrize("kv", ["dense", "onebit", "h2o"])
def test_forks_generate_in_threads(kv: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of each alone, and each of their tokens in one pass; prompts are read in between."""
    model = golden_cases.write_checkpoint("llama31", tmp_path)
    session = Session.load(model, kv=kv, weights="f32", slots=SLOTS)
    tokens = golden_cases.tokens("llama31")
    prompts = [tokens[:n] for n in (5, 20, 11)]

    def text(fork: Session, prompt: Sequence[int]) -> list[int]:
        return [step.token for step in fork.generate(prompt, max_new_tokens=24, temperature=0.0)]

    expected = [text(session.fork(), prompt) for prompt in prompts]
    passes = Recorded(session, monkeypatch)
    forks = [session.fork() for _ in prompts]
    works = [functools.partial(text, *each) for each in zip(forks, prompts, strict=True)]
    assert at_once(works) == expected
    assert sum(passes.rows) == SLOTS * 23


def test_threads_need_slots() -> None:
    """Without them, who computes meanwhile is told so, and may ask again."""
    session = Session.load("demo", ctx=64)
    fork = session.fork()
    session.prefill("Once")
    with session.exclusive(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        waits = pool.submit(fork.prefill, "Once")
        with raises(SessionError, field="slots"):
            waits.result(60)
    assert not fork.tokens
    np.testing.assert_array_equal(fork.prefill("Once"), session.fork().prefill("Once"))


def test_options(tmp_path: pathlib.Path) -> None:
    with raises(ConfigError, field="slots"):
        Session.load("demo", slots=0)
    with raises(ConfigError, field="draft"):
        Session.load("demo", slots=2, draft="ngram")
    assert Session.load("demo", slots=2, draft="auto", ctx=64)._runner.drafts is None


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
