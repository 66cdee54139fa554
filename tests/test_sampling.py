"""Sampling, penalties and log probabilities against their definitions; stop strings against a plain search."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from helpers import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.engine.sampling import Sampler, SamplingParams, open_sampler, token_logprob
from edgekv.engine.session import StopMatcher
from edgekv.errors import ConfigError, EdgeKVError

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7)
PARAMS = {
    "plain": OFF,
    "temperature": dataclasses.replace(OFF, temperature=0.3),
    "top_k": dataclasses.replace(OFF, top_k=5),
    "top_k beyond the vocabulary": dataclasses.replace(OFF, top_k=1000),
    "top_p": dataclasses.replace(OFF, top_p=0.7),
    "min_p": dataclasses.replace(OFF, min_p=0.1),
    "penalty": dataclasses.replace(OFF, repetition_penalty=1.8),
    "penalty in a window": dataclasses.replace(OFF, repetition_penalty=1.8, repetition_window=2),
    "all": SamplingParams(0.7, 12, 0.9, 0.02, 1.3, 3, seed=7),
}


def reference_probabilities(logits, history, params):
    """Returns the probability of each id, filter by filter with a full sort."""
    scores = logits.astype(np.float64)
    seen = history[-params.repetition_window :] if params.repetition_window else history
    for token in set(seen):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    scores /= params.temperature
    order = np.array(sorted(range(len(scores)), key=lambda i: (-scores[i], i)))
    if params.top_k:
        order = order[: params.top_k]
    probabilities = np.exp(scores[order] - scores[order[0]])
    probabilities /= probabilities.sum()
    n_kept = next((n for n in range(1, len(order)) if probabilities[:n].sum() >= params.top_p), len(order))
    order, probabilities = order[:n_kept], probabilities[:n_kept]
    probabilities[probabilities < params.min_p * probabilities[0]] = 0
    result = np.zeros(len(scores))
    result[order] = probabilities / probabilities.sum()
    return result


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_frequencies_follow_the_definition(params):
    logits = (np.random.default_rng(3).standard_normal(40) * 1.5).astype(np.float32)
    logits[[4, 9]] = -np.inf
    history = [11, int(logits.argmax()), 11, 20]
    expected = reference_probabilities(logits, history, params)
    sampler, n_draws = Sampler(params, logits.size), 4000
    counts = np.bincount([sampler.sample(logits, history) for _ in range(n_draws)], minlength=logits.size)
    assert np.all(counts[expected == 0] == 0)
    assert np.all(abs(counts / n_draws - expected) <= 4 * np.sqrt(expected / n_draws))


@pytest.mark.parametrize(
    "params", [SamplingParams(0.0), *(dataclasses.replace(OFF, **one) for one in ({"top_k": 1}, {"top_p": 0}))]
)
def test_ties_go_to_the_lowest_id(params):
    logits = np.array([0, 2, 1, 2, 2], np.float32)
    assert {Sampler(params, 5).sample(logits) for _ in range(10)} == {1}


def test_greedy_obeys_the_repetition_penalty_and_leaves_the_logits_alone():
    sampler = Sampler(SamplingParams(0.0, repetition_penalty=2.0), 3)
    logits = np.array([3, 2, -1], np.float32)
    assert [sampler.sample(logits, history) for history in ([], [0], [0, 1], [0, 0])] == [0, 1, 0, 1]
    assert sampler.sample(np.array([-1, -1.5, -9], np.float32), [0]) == 1
    assert logits.tolist() == [3, 2, -1]


def test_logprobs_are_the_models_own_where_a_constraint_rules_tokens_out():
    logits, masked = (np.array(row, np.float32) for row in ([2, 1, 0], [-np.inf, 1, 0]))
    free, bound = (Sampler(SamplingParams(0.0), 3, n_logprobs=2) for _ in range(2))
    assert (free.sample(logits), bound.sample(logits, (), masked)) == (0, 1)
    assert bound.logprobs[0].top == free.logprobs[0].top
    assert bound.logprobs[0].logprob == free.logprobs[0].top[1][1]


def draw(sampler, n):
    return [sampler.sample(np.linspace(0, 1, 500, dtype=np.float32)) for _ in range(n)]


def test_a_seed_repeats_the_text_and_a_saved_state_continues_it():
    """Seed, generator, and the counts that penalties need."""
    params = dataclasses.replace(OFF, seed=None, frequency_penalty=1.0)
    unseeded = Sampler(params, 500)
    sampler, restored = (Sampler(dataclasses.replace(params, seed=seed), 500) for seed in (unseeded.seed, 99))
    assert draw(unseeded, 50) == draw(sampler, 50) != draw(Sampler(OFF, 500), 50)
    restored.load_state(json.loads(json.dumps(sampler.state())))
    assert restored.seed == sampler.seed
    assert draw(restored, 30) == draw(sampler, 30)


@pytest.mark.parametrize(
    "damage",
    [
        {"seed": 1},
        {"seed": "x"},
        {"seed": 1, "generator": {}},
        {"seed": 1, "generator": {"bit_generator": "MT19937"}},
        {"seed": 1, "generator": {"bit_generator": "PCG64", "state": {"state": -1, "inc": 2**200}}},
        *(Sampler(OFF, 500).state() | {"counts": counts} for counts in ([[500, 1]], [[1]], "x", [[1, -1]])),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage):
    sampler = Sampler(OFF, 500)
    with pytest.raises(EdgeKVError, match="sampler state is damaged"):
        sampler.load_state(damage)
    assert sampler.seed == 7
    assert draw(sampler, 20) == draw(Sampler(OFF, 500), 20)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[1, np.nan, 2], [-np.inf] * 3, [0, np.inf, 1]])
def test_logits_without_a_finite_maximum_are_refused(temperature, logits):
    x, params = np.array(logits, np.float32), SamplingParams(temperature, top_k=2, top_p=0.9, min_p=0.1)
    with pytest.raises(EdgeKVError, match="the largest logit is"):
        Sampler(params, 3).sample(x)


def stop_by_searching(text, stops):
    """Returns the text before the stop string that is completed first, and whether there is one."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            return text[: end - max(map(len, completed))], True
    return text, False


TEXT = st.text("abé", max_size=12)


@settings(deadline=None, derandomize=True, max_examples=1000)
@given(st.lists(TEXT, max_size=8), st.lists(TEXT.filter(bool), max_size=4))
def test_pieces_do_not_matter_to_stop_strings(pieces, stops):
    expected, stopped = stop_by_searching("".join(pieces), stops)
    matcher = StopMatcher(stops)
    printed = "".join(matcher.push(piece)[0] for piece in pieces)
    assert expected.startswith(printed)
    assert printed + matcher.flush() == expected
    assert matcher.stopped == stopped


def test_settings_are_given_once():
    defaults = SamplingParams(0.4, top_k=7)
    for wanted in ({"temperature": 0.0}, {"seed": 3}, {"top_p": 0.5, "logit_bias": {1: 2}}):
        with raises(ConfigError, field="sampling"):
            open_sampler(3, SamplingParams(), wanted, SamplingParams())
        expected = dataclasses.replace(defaults, **wanted)
        assert open_sampler(3, None, {"temperature": None, "seed": None} | wanted, defaults).params == expected


def test_a_misspelt_setting_is_named():
    with raises(ConfigError, field="top_kk", match="did you mean top_k"):
        SamplingParams(top_kk=3)


def test_zero_is_off_as_none_is():
    given = SamplingParams(top_k=0, repetition_window=0)
    assert given == SamplingParams(top_k=None)
    assert given.top_k is given.repetition_window is None
    assert SamplingParams(**given.as_dict()) == given
    assert given.as_dict()["top_k"] == 0


VOCAB = 50


def random_logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32) * 2


@pytest.mark.parametrize(("frequency", "presence"), [(0.7, 0.0), (0.0, 1.5), (-0.3, -0.4), (2.0, 2.0)])
def test_penalties_are_openais_formula(frequency: float, presence: float) -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, c counting sampled tokens, not those of the prompt."""
    params = SamplingParams(0.0, frequency_penalty=frequency, presence_penalty=presence)
    sampler, counts = Sampler(params, VOCAB), Counter[int]()
    given = random_logits(1)
    before = given.copy()
    for _ in range(30):
        c = np.array([counts[j] for j in range(VOCAB)])
        expected = int(np.argmax(given - c * frequency - (c > 0) * presence))
        assert sampler.sample(given, [int(np.argmax(given))] * 5) == expected
        counts[expected] += 1
    assert (given == before).all()
    assert (len(counts) > 1) == (presence >= 0)  # a reward repeats the first


def test_a_bias_forbids_or_forces_a_token() -> None:
    best = int(np.argmax(random_logits(2)))
    second = int(np.argsort(-random_logits(2))[1])
    assert Sampler(SamplingParams(0.0, logit_bias={best: -100}), VOCAB).sample(random_logits(2)) == second
    assert Sampler(SamplingParams(1.0, seed=1, logit_bias={"3": 100}), VOCAB).sample(random_logits(2)) == 3


def test_log_probabilities_are_those_of_the_model() -> None:
    """Before temperature, penalties and filters."""
    sampler = Sampler(SamplingParams(0.5, top_k=3, seed=1, presence_penalty=1.0), VOCAB, n_logprobs=4)
    given = random_logits(3)
    x = given.astype(np.float64)
    expected = x - np.log(np.exp(x).sum())
    for i in range(5):
        token, found = sampler.sample(given), sampler.logprobs[i]
        assert found.token == token
        assert found.logprob == pytest.approx(expected[token], abs=1e-12)
        assert [t for t, _ in found.top] == list(np.argsort(-expected)[:4])
        assert [p for _, p in found.top] == pytest.approx(list(np.sort(expected)[::-1][:4]), abs=1e-12)
    assert token_logprob(given, 7, 0).top == ()
    assert Sampler(SamplingParams(), VOCAB).logprobs == []
