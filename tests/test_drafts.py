"""A text is the same with drafts as without, whatever is guessed, and nothing of a wrong guess stays."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Sequence

import golden_cases
import numpy as np
import pytest
from cache_cases import attend_singly, draw, make, read_prompt
from helpers import SCHEMES, SESSION_KV, n_cached, text

from edgekv import SamplingParams, Session
from edgekv.engine.drafts import MAX_DRAFT_TOKENS, NGramDrafts

HEADS = (4, 2, 64)
CAPACITY = 600
BUDGETED = {"h2o", "tova", "mikv", "snapkv"}  # attention weights decide there what stays
SMALL = dict.fromkeys(BUDGETED, "budget=200") | {
    "streaming": "budget=450", "fier": "k=64", "quest": "k=64", "onebit": "residual_length=64",
}  # fmt: skip


class Scripted(NGramDrafts):
    """Drafts that guess a known text, but for every third token."""

    name = "scripted"

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)
        self.seen: list[tuple[int, int]] = []

    def begin(self, tokens: Sequence[int]) -> None:
        self.start = len(tokens)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        at = len(tokens) - self.start
        guesses = self.text[at : at + most]
        return [token ^ 1 if (at + i) % 3 == 2 else token for i, token in enumerate(guesses)]

    def learn(self, n_proposed: int, n_accepted: int) -> None:
        self.seen.append((n_proposed, n_accepted))


def reset(session: Session, drafts: NGramDrafts | None) -> None:
    session.reset()
    session._runner.drafts = drafts


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_taken_back_leaves_no_trace(name: str) -> None:
    """Right and wrong tokens, the latter taken back: the cache is as if it had seen the right ones alone."""
    kv = f"{name}:{SMALL[name]}" if name in SMALL else name
    plain, drafted = (make(kv, HEADS, CAPACITY) for _ in range(2))
    tokens, wrong = (draw(HEADS, CAPACITY, seed=seed) for seed in (1, 2))
    for cache in (plain, drafted):
        read_prompt(cache, tokens, 300)
    at, n_wrong = 300, 0
    while at < CAPACITY - MAX_DRAFT_TOKENS:
        n_right = 1 + at % 3
        n = min(1 + MAX_DRAFT_TOKENS, drafted.rollback_tokens())
        if n > n_right:
            right = [x[:, at : at + n_right] for x in tokens]
            both = zip(right, (x[:, : n - n_right] for x in wrong), strict=True)
            drafted.attend(*(np.concatenate(pair, axis=1) for pair in both))
            drafted.advance(n_right - n)
            n_wrong += n - n_right
        else:
            attend_singly(drafted, tokens, at, at + n_right)
        attend_singly(plain, tokens, at, at + n_right)
        at += n_right
        assert drafted.state().counters == plain.state().counters
    np.testing.assert_array_equal(*(attend_singly(cache, tokens, at, at + 1) for cache in (plain, drafted)))
    assert drafted.extra_state() == plain.extra_state()
    assert (n_wrong > 0) == (name not in BUDGETED)


@pytest.mark.parametrize(
    ("kv", "temperature"), [(kv, float(i % 2)) for i, kv in enumerate((*SESSION_KV, "dense", "onebit"))]
)
def test_a_drafted_text_is_the_plain_one(model: pathlib.Path, kv: str, temperature: float) -> None:
    prompt, sampling = golden_cases.tokens("llama31")[:20], SamplingParams(temperature=temperature, seed=5)
    session = Session.load(model, kv=kv, weights="f32")
    plain = text(session, prompt, 40, sampling=sampling)
    state = n_cached(session), list(session.tokens), session.last_sampler.state()
    reset(session, Scripted(plain))
    drafted = text(session, prompt, 40, sampling=sampling)
    assert drafted == plain
    assert (n_cached(session), session.tokens, session.last_sampler.state()) == state
    counts, n_decoded = session.report().drafts, len(session.report().decode_latencies_s)
    assert n_decoded == 39
    assert counts.passes + counts.accepted - n_decoded in (0, 1)  # the last token may be a draft itself
    if counts.proposed:
        assert 0 < counts.accepted < counts.proposed
    assert (counts.proposed > 0) == all(cache.rollback_tokens() > 0 for cache in session.caches)


@pytest.mark.parametrize(
    ("case", "weights"),
    [("phi3-longrope", "f32"), ("mistral", "int8"), ("gpt2", "q4"), ("mixtral", "f32"), ("gpt-oss", "q4")],
)
def test_other_models(case: str, weights: str, tmp_path: pathlib.Path) -> None:
    """Rotation by length allows no drafts; a sliding window, learned positions and experts do."""
    session = Session.load(golden_cases.write_checkpoint(case, tmp_path), weights=weights)
    prompt = golden_cases.tokens(case)[:10]
    plain = text(session, prompt, 20)
    reset(session, Scripted(plain))
    assert text(session, prompt, 20) == plain
    assert (session.report().drafts.accepted > 0) == (case != "phi3-longrope")


@pytest.mark.parametrize("overflow", ["stop", "slide"])
def test_at_the_end_of_the_context(model: pathlib.Path, overflow: str) -> None:
    session, texts = Session.load(model, weights="f32", ctx=30, overflow=overflow), []
    for drafts in (None, NGramDrafts()):
        reset(session, drafts)
        texts.append(text(session, [1, 2, 3, 1, 2], 50))
        assert n_cached(session) <= 30
    assert texts[0] == texts[1]
    assert len(texts[0]) == (26 if overflow == "stop" else 50)


def test_a_text_that_is_left_or_saved_within_a_pass(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    prompt = golden_cases.tokens("llama31")[:20]
    session = Session.load(model, weights="f32")
    plain = text(session, prompt, 12)
    reset(session, Scripted(plain))
    steps = session.generate(prompt, max_new_tokens=12, temperature=0.0)
    first = [step.token for step in itertools.islice(steps, 2)]
    assert n_cached(session) > len(prompt) + 1  # drafts beyond the first token
    session.save(tmp_path / "session")
    copy = session.fork()
    copy.copy_from(session)
    rest = [step.token for step in steps]
    assert first + rest == plain
    restored = Session.restore(tmp_path / "session", session)
    for other in (copy, restored):
        assert other.tokens == [*prompt, *first]
        assert text(other, [], 10) == plain[2:]
    session.reset()
    left = session.generate(prompt, max_new_tokens=12, temperature=0.0)
    assert [step.token for step in itertools.islice(left, 2)] == first
    left.close()
    assert n_cached(session) == 21
    assert text(session, [], 10) == plain[2:]


def test_tokens_of_a_pass_share_its_time(model: pathlib.Path) -> None:
    session = Session.load(model, weights="f32")
    plain = text(session, [1, 2, 3], 12)
    reset(session, Scripted(plain))
    steps = list(session.generate([1, 2, 3], max_new_tokens=12, temperature=0.0))
    report = session.report()
    assert sum(report.decode_latencies_s) == pytest.approx(sum(step.latency_s for step in steps[1:]))
    assert len(set(report.decode_latencies_s)) == report.drafts.passes
    assert report.as_dict()["drafts"]["accepted"] == report.drafts.accepted


def test_a_draft_is_what_followed_the_longest_match() -> None:
    text = [9, 1, 2, 3, 4, 5, 6, 7, 2, 3, 8, 8, 8, 1, 2, 3]
    assert NGramDrafts().propose(text, 1) == [4]  # behind 1 2 3, not behind the later 2 3
    assert NGramDrafts().propose([*text, 9], 1) == [1]  # 3 9 is new, but 9 is rare
    assert NGramDrafts().propose([1, 2, 1, 3, 1, 4, 1, 5, 6, 1], 4) == []  # and 1 is not
    assert NGramDrafts().propose([5], 4) == NGramDrafts().propose([], 4) == []


def test_a_repetition_goes_on() -> None:
    repeated = [1, 2, 3] * 4
    assert NGramDrafts().propose(repeated, 4) == [1, 2, 3, 1][: len(NGramDrafts().propose(repeated, 4))]
    drafts = NGramDrafts()
    for _ in range(10):
        drafts.propose(repeated, 4)
        drafts.learn(4, 4)
    assert drafts.propose(repeated, 4) == [1, 2, 3, 1]
    drafts.begin([])
    assert len(drafts.propose(repeated, 4)) < 4  # what was learned belongs to the text
