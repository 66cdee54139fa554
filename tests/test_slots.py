"""Conversations that decode together have the text that each has alone."""

from __future__ import annotations

import concurrent.futures
import functools
import pathlib

import golden_cases
import numpy as np
import pytest
from helpers import raises, text
from slot_cases import SLOTS, Recorded, at_once

from edgekv import ConfigError, Session, SessionError
from edgekv.engine.loading import find_device
from edgekv.kernels.interface import GEMV_ROWS


@pytest.mark.parametrize(
    ("case", "kv", "weights"),
    [
        *(("llama31", "dense", "q4"), ("llama31", "onebit", "f32"), ("gpt2", "onebit", "int8")),
        *(("rope-longrope", "h2o", "f32"), ("mixtral", "dense", "int8"), ("gpt-oss", "dense", "q4")),
    ],
)
def test_a_token_has_the_logits_it_has_alone(case: str, kv: str, weights: str, tmp_path: pathlib.Path) -> None:
    """Beside however many others, of other lengths: to the bit, but for float32 products."""
    model = golden_cases.write_checkpoint(case, tmp_path)
    first, tokens = Session.load(model, kv=kv, weights=weights), golden_cases.tokens(case)
    form = first.model.weight_format(weights)
    decoder = find_device("cpu").decoder(first.model, form, first.plan.ctx, 1, None)
    alone, sessions = ([first.fork() for _ in range(2 * GEMV_ROWS + 3)] for _ in range(2))
    for i, both in enumerate(zip(alone, sessions, strict=True)):
        for session in both:
            session.prefill(tokens[i : 2 * i + 3])
    for n in (2, 3, GEMV_ROWS, len(sessions)):
        expected = [decoder.step(tokens[n], each.caches).copy() for each in alone[:n]]
        together = decoder.step_batch([tokens[n]] * n, [each.caches for each in sessions[:n]])
        np.testing.assert_allclose(together, expected, rtol=0, atol=2e-3 if weights == "f32" else 0)


@pytest.mark.parametrize("kv", ["dense", "onebit", "h2o"])
def test_forks_generate_in_threads(kv: str, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of each alone, and each of their tokens in one pass; prompts are read in between."""
    session = Session.load(model, kv=kv, weights="f32", slots=SLOTS)
    prompts = [golden_cases.tokens("llama31")[:n] for n in (5, 20, 11)]
    expected = [text(session.fork(), prompt, 24) for prompt in prompts]
    passes, forks = Recorded(session, monkeypatch), [session.fork() for _ in prompts]
    works = [functools.partial(text, *each, 24) for each in zip(forks, prompts, strict=True)]
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
    with raises(ConfigError, field="draft"):
        Session.load("demo", slots=2, draft="ngram")
    Session.load("demo", slots=2, draft="auto", ctx=64)
