"""Rewinding: what a scheme keeps, what is computed again, and the distance to never having gone on."""

from __future__ import annotations

from unittest import mock

import cache_cases
import numpy as np
import pytest
from cache_cases import Heads, attend_last, draw, read, read_prompt, relative
from helpers import SCHEMES, divergence, n_cached

from edgekv import Session
from edgekv.checkpoint.hub import shipped_model
from edgekv.codecs.f16 import F16
from edgekv.kvcache.cache import KVCache, rewind
from edgekv.kvcache.policies import SinkWindowCache

HEADS: Heads = (8, 2, 64)
WINDOWED = ("onebit", "kivi2", "kvcomp")
BACK = 350  # beyond every exact window


def make(name: str) -> KVCache:
    return cache_cases.make(name, HEADS, 1400, layer=2, n_layers=4)


def gone_on(cache: KVCache, tokens: tuple[np.ndarray, ...], n: int, m: int, seed: int) -> int:
    """A prompt, tokens up to n, m others, and back to n; returns how many are kept."""
    read(cache, tokens, cache.n_seen, n)
    read(cache, draw(HEADS, m, seed), 0, m)
    kept = rewind([cache], n)
    assert kept == cache.n_seen <= n
    return kept


@pytest.mark.parametrize("back", [1, 17, BACK])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_was_forgotten_leaves_nothing_behind(name: str, back: int) -> None:
    """The same follows, whatever was forgotten."""
    tokens, after = draw(HEADS, 640), []
    for seed in (1, 2):
        cache = make(name)
        read_prompt(cache, tokens, 500)
        kept = gone_on(cache, tokens, 600, back, seed)
        after.append(read(cache, tokens, kept, 640)[:, -40:])
    np.testing.assert_array_equal(*after)


@pytest.mark.parametrize("name", SCHEMES)
def test_no_prompt_shapes_what_another_one_gets(name: str) -> None:
    """Two conversations that begin alike; both go back to where they part."""
    common, last = draw(HEADS, 200, 5), draw(HEADS, 100, 6)
    after = []
    for seed in (1, 2):
        cache, both = make(name), zip(common, draw(HEADS, 300, seed), strict=True)
        read_prompt(cache, [np.concatenate(pair, axis=1) for pair in both])
        kept = rewind([cache], 200)
        if kept:
            read(cache, common, kept, 200)
        else:
            read_prompt(cache, common)
        after.append(read(cache, last, 0, 100))
        notes = [note for note in cache.notes() if "tau" in note]
        assert all("(200 tokens)" in note for note in notes)
    np.testing.assert_array_equal(*after)


@pytest.mark.parametrize("name", SCHEMES)
def test_far_back_it_is_as_if_nothing_had_followed(name: str) -> None:
    """Given the same keys and values again; layers of a model recompute these, almost the same."""
    tokens = draw(HEADS, 640)
    rewound, straight = make(name), make(name)
    kept = gone_on(rewound, tokens, 600, BACK, seed=1)
    if kept < 600:
        read(rewound, tokens, kept, 600)
    read(straight, tokens, 0, 600)
    assert relative(*(read(cache, tokens, 600, 640) for cache in (rewound, straight))) < 2e-3


@pytest.mark.parametrize("name", SCHEMES)
def test_a_reset_cache_is_a_fresh_one(name: str) -> None:
    """Nothing that was fitted on a conversation outlives it."""

    fresh, used = make(name), make(name)
    expected = attend_last(fresh, draw(HEADS, 403, 1), 3)
    attend_last(used, draw(HEADS, 503, 2), 3)
    assert rewind([used], 0) == 0
    np.testing.assert_array_equal(attend_last(used, draw(HEADS, 403, 1), 3), expected)
    assert (used.state().counters, used.state().extra) == (fresh.state().counters, fresh.state().extra)
    assert used.notes() == fresh.notes()


@pytest.mark.parametrize("name", WINDOWED)
def test_a_little_back_nothing_is_computed_again(name: str) -> None:
    """Packed tokens stay packed; once as many tokens came as were forgotten nothing differs."""
    tokens = draw(HEADS, 900)
    for n in (500, 557, 583, 611):
        rewound, straight = make(name), make(name)
        assert isinstance(rewound, SinkWindowCache)
        m = rewound.sizes.residual_length // 4
        assert gone_on(rewound, tokens, n, m, seed=1) == n
        read(straight, tokens, 0, n)
        least = rewound.sizes.residual_length * 3 // 4
        assert straight.n_recent >= rewound.n_recent >= least
        for cache in (rewound, straight):
            read(cache, tokens, n, n + m)
        np.testing.assert_array_equal(*(read(cache, tokens, n + m, 900) for cache in (rewound, straight)))


@pytest.mark.parametrize("name", WINDOWED)
def test_tokens_that_do_not_come_again_after_all(name: str) -> None:
    """Back twice, the second time among tokens that are yet to be computed again."""
    tokens, others = draw(HEADS, 640), draw(HEADS, 640, 3)
    after = []
    for seed in (1, 2):
        cache = make(name)
        gone_on(cache, tokens, 600, BACK, seed)
        kept = cache.n_seen
        assert rewind([cache], kept + 20) == kept
        read(cache, tokens, kept, kept + 20)
        after.append(read(cache, others, 0, 400))
        fresh = make(name)
        read(fresh, tokens, 0, kept + 20)
        read(fresh, others, 0, 300)
        assert relative(after[-1][:, 300:], read(fresh, others, 300, 400)) < 2e-3
    np.testing.assert_array_equal(*after)


@pytest.mark.parametrize("name", WINDOWED)
def test_layers_that_were_interrupted_meet_at_one_length(name: str) -> None:
    """Some have read a long text that others have not: they go back by two windows, not to the start."""
    tokens, layers = draw(HEADS, 1300), [make(name) for _ in range(4)]
    for cache in layers:
        read(cache, tokens, 0, 900)
    for cache in layers[:2]:
        read(cache, tokens, 900, 1300)
    kept = rewind(layers, 900)
    assert {cache.n_seen for cache in layers} == {kept}
    assert 900 - kept <= 2 * 128 + 64
    outputs = [read(cache, tokens, kept, 1300) for cache in layers]
    for each in outputs[1:]:
        assert relative(each[:, -300:], outputs[0][:, -300:]) < 2e-3
    with mock.patch.object(F16, "move", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        read(layers[0], draw(HEADS, 64, 9), 0, 64)
    assert rewind(layers, 1290) == 0  # of the exact tokens some may have been moved


@pytest.fixture(scope="module")
def demo() -> tuple[Session, list[int]]:
    """Returns the demo model and tokens of a text that it wrote."""
    session = Session.load("demo", weights="f32", ctx=1024)
    return session, session.encode((shipped_model("demo") / "prose.txt").read_text())[:900]


@pytest.mark.parametrize(("back", "most_recomputed", "bound"), [(17, 0, 8e-4), (200, 2 * 128 + 64, 2e-5)])
@pytest.mark.parametrize("kv", ["kivi2", "onebit"])
def test_the_next_tokens_are_nearly_as_likely(
    kv: str, back: int, most_recomputed: int, bound: float, demo: tuple[Session, list[int]]
) -> None:
    """KL to a session that was never rewound, over 32 tokens.

    Measured where nothing is computed again: kivi2 4.4e-5, onebit 5.6e-4.
    """
    loaded, ids = demo
    differences = []
    for n in (500, 578):
        logits = []
        for go_on in (False, True):
            session = loaded.fork(kv=kv)
            session.prefill(ids[:300])
            session.prefill(ids[300:n])
            if go_on:
                session.prefill(ids[-back:])
                session.rewind(n)
                assert n - n_cached(session) <= most_recomputed
            logits.append(session.logits(ids[n : n + 32]))
        differences.append(divergence(*logits))
    assert np.mean(differences) < bound
