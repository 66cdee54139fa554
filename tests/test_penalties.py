"""Penalties that count, biases, and log probabilities, against the formulas by which they are defined."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from helpers import raises

from edgekv import SamplingParams, Session
from edgekv.cli import main
from edgekv.engine.sampling import Sampler, token_logprob
from edgekv.errors import ConfigError, EdgeKVError

VOCAB = 50


def logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32) * 2


@pytest.mark.parametrize(("frequency", "presence"), [(0.7, 0.0), (0.0, 1.5), (-0.3, -0.4), (2.0, 2.0)])
def test_penalties_are_openais_formula(frequency: float, presence: float) -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, c counting sampled tokens, not those of the prompt."""
    params = SamplingParams(0.0, frequency_penalty=frequency, presence_penalty=presence)
    sampler, counts = Sampler(params, VOCAB), Counter[int]()
    given = logits(1)
    before = given.copy()
    for _ in range(30):
        c = np.array([counts[j] for j in range(VOCAB)])
        expected = int(np.argmax(given - c * frequency - (c > 0) * presence))
        assert sampler.sample(given, [int(np.argmax(given))] * 5) == expected
        counts[expected] += 1
    assert (given == before).all()
    assert (len(counts) > 1) == (presence >= 0)  # a reward repeats the first


def test_a_bias_forbids_or_forces_a_token() -> None:
    best = int(np.argmax(logits(2)))
    second = int(np.argsort(-logits(2))[1])
    assert Sampler(SamplingParams(0.0, logit_bias={best: -100}), VOCAB).sample(logits(2)) == second
    assert Sampler(SamplingParams(1.0, seed=1, logit_bias={"3": 100}), VOCAB).sample(logits(2)) == 3


def test_a_bias_beyond_the_vocabulary() -> None:
    with raises(ConfigError, field="logit_bias"):
        Sampler(SamplingParams(logit_bias={VOCAB: 1}), VOCAB)


def test_log_probabilities_are_those_of_the_model() -> None:
    """Before temperature, penalties and filters."""
    sampler = Sampler(SamplingParams(0.5, top_k=3, seed=1, presence_penalty=1.0), VOCAB, n_logprobs=4)
    given = logits(3)
    x = given.astype(np.float64)
    expected = x - np.log(np.exp(x).sum())
    for i in range(5):
        token = sampler.sample(given)
        found = sampler.logprobs[i]
        assert found.token == token
        assert found.logprob == pytest.approx(expected[token], abs=1e-12)
        assert [t for t, _ in found.top] == list(np.argsort(-expected)[:4])
        assert [p for _, p in found.top] == pytest.approx(list(np.sort(expected)[::-1][:4]), abs=1e-12)
    assert token_logprob(given, 7, 0).top == ()
    assert Sampler(SamplingParams(), VOCAB).logprobs == []


def test_counts_are_saved_with_the_sampler() -> None:
    params = SamplingParams(1.0, seed=5, frequency_penalty=1.0)
    sampler, other = Sampler(params, VOCAB), Sampler(params, VOCAB)
    for i in range(10):
        sampler.sample(logits(i))
    other.load_state(json.loads(json.dumps(sampler.state())))
    assert [sampler.sample(logits(6)) for _ in range(20)] == [other.sample(logits(6)) for _ in range(20)]
    for counts in ([[VOCAB, 1]], [[1]], "x", [["a", 1]], [[1, -1]]):
        with pytest.raises(EdgeKVError):
            other.load_state({**sampler.state(), "counts": counts})


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Biases leave two tokens, a penalty lets both be written; bad values are refused before anything loads."""
    command = ["run", "--prompt", "It was", "--ctx", "64", "--greedy", "--max-new-tokens", "6"]
    tokenizer = Session.load("demo", ctx=64).require_tokenizer()
    ship, sea = (tokenizer.encode(f" {word}", bos=False)[-1] for word in ("ship", "sea"))
    biases = ["--logit-bias", f"{ship}=60", "--logit-bias", f"{sea}=60"]
    assert main([*command, *biases]) == 0
    assert sorted(set(capsys.readouterr().out.split())) in (["sea"], ["ship"])
    assert main([*command, *biases, "--frequency-penalty", "2"]) == 0
    assert set(capsys.readouterr().out.split()) == {"ship", "sea"}
    for bad in (["--logit-bias", "x=1"], ["--logit-bias", "1=101"], ["--presence-penalty", "3"]):
        assert main([*command, *bad]) == 2
        assert bad[0] in capsys.readouterr().err
