"""A cache that was used and reset is a fresh one: nothing that was fitted on a conversation outlives it."""

from __future__ import annotations

import numpy as np
import pytest
from cache_cases import Heads, draw, make
from helpers import SCHEMES

from edgekv.kvcache.cache import KVCache, rewind

HEADS: Heads = (4, 2, 64)


def said(cache: KVCache, n_prompt: int, seed: int) -> np.ndarray:
    """The outputs of three tokens after a prompt."""
    q, k, v = draw(HEADS, n_prompt + 3, seed)
    cache.prefill(q[:, :n_prompt], k[:, :n_prompt], v[:, :n_prompt])
    type(cache).finish_prefill([cache])
    steps = [slice(n_prompt + i, n_prompt + i + 1) for i in range(3)]
    return np.concatenate([cache.attend(q[:, i], k[:, i], v[:, i]).copy() for i in steps], axis=1)


@pytest.mark.parametrize("n_prompt", [20, 400])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_reset_cache_equals_a_fresh_one(name: str, n_prompt: int) -> None:
    fresh, used = (make(name, HEADS, capacity=600) for _ in range(2))
    expected = said(fresh, n_prompt, seed=1)
    said(used, 500, seed=2)
    assert rewind([used], 0) == 0
    np.testing.assert_array_equal(said(used, n_prompt, seed=1), expected)
    before, after = fresh.state(), used.state()
    assert after.counters == before.counters
    assert after.extra == before.extra
    assert used.notes() == fresh.notes()
