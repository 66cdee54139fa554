"""FIER: one bit per key element chooses the tokens, attention to them is exact."""

from __future__ import annotations

import numpy as np
import pytest
from cache_cases import BACKENDS
from retrieval_cases import draw, make, reference, rounded

from edgekv.errors import CacheError
from edgekv.kvcache import CacheSpec

LEVELS = ["mad", "minmax"]


def two_levels(group: int, levels: str):
    """FIER's equation 5 and algorithm 1: q . K~ over the whole groups of one head's keys."""

    def summary(keys: np.ndarray):
        x = keys[: len(keys) // group * group].reshape(-1, group, keys.shape[1])
        if levels == "mad":
            centre = x.mean(1, keepdims=True)
            step = np.abs(x - centre).mean(1, keepdims=True)
        else:
            low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
            centre, step = (high + low) / 2, (high - low) / 2
        centre, step = rounded(centre), rounded(step)
        approximate = np.where(x >= centre, centre + step, centre - step).reshape(-1, keys.shape[1])
        return lambda q: q @ approximate.T

    return summary


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize(("group", "k"), [(32, 40), (64, 17), (32, 1)])
@pytest.mark.parametrize("levels", LEVELS)
def test_attends_to_the_best_tokens(levels: str, group: int, k: int, window: int | None, backend: str) -> None:
    n, steps = 400, 70  # over a border of groups
    q, keys, values = draw(n)
    cache = make(f"fier:k={k},group={group},levels={levels}", backend, sliding_window=window)
    cache.prefill(q[:, : n - steps], keys[:, : n - steps], values[:, : n - steps])
    got = cache.attend(q[:, n - steps :], keys[:, n - steps :], values[:, n - steps :])
    expected = reference(
        q[:, n - steps :], keys, values, two_levels(group, levels), n_chosen=k, unit=1, block=group, window=window
    )
    np.testing.assert_allclose(got, expected, atol=2e-3)


@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(3, 3, 12), (8, 1, 24), (1, 1, 128)])
def test_any_heads(n_heads: int, n_kv_heads: int, head_dim: int) -> None:
    sizes = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
    q, keys, values = draw(333, 1, **sizes)
    cache = make("fier:k=50", **sizes)
    cache.prefill(q[:, :-3], keys[:, :-3], values[:, :-3])
    got = cache.attend(q[:, -3:], keys[:, -3:], values[:, -3:])
    expected = reference(q[:, -3:], keys, values, two_levels(32, "mad"), n_chosen=50, unit=1, block=32)
    np.testing.assert_allclose(got, expected, atol=2e-3)


def test_is_dense_to_the_bit_while_k_covers_the_index() -> None:
    q, keys, values = draw(300)
    outputs = []
    for kv in ("dense", "fier:k=288"):
        cache = make(kv)
        cache.prefill(q[:, :290], keys[:, :290], values[:, :290])
        outputs.append(cache.attend(q[:, 290:], keys[:, 290:], values[:, 290:]).copy())
        assert cache.bytes_read() == 300 * 2 * 16 * 4
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize(
    ("layer", "n_layers", "retrieves"), [(0, 4, False), (1, 4, False), (2, 4, True), (1, 2, True)]
)
def test_the_first_layers_are_dense_but_never_the_last(layer: int, n_layers: int, retrieves: bool) -> None:
    cache = make("fier:k=64", layer=layer, n_layers=n_layers)
    assert ("index.signs" in cache.arrays) == retrieves


def test_a_narrow_window_or_a_short_context_needs_no_index() -> None:
    assert make("fier:k=64", sliding_window=95).layout() == make("dense").layout()
    assert make("fier:k=64", capacity=95).layout() == make("dense", capacity=95).layout()
    assert "index.signs" in make("fier:k=64", sliding_window=96).layout()


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_bytes(group: int) -> None:
    """FIER's equation 8: 1 + 32 / g bits per key element on top of f16."""
    d, capacity = 128, 4096
    cache = make(f"fier:group={group}", head_dim=d, capacity=capacity)
    per_token_and_head = 4 * d + d / 8 + 4 * d / group
    assert cache.planned_bytes() == cache.nbytes == capacity * 2 * per_token_and_head
    keys = np.zeros((2, 4000, d), np.float32)
    cache.append_prompt(keys, keys)
    blocks = 4000 // group
    index = 2 * blocks * (group * d // 8 + 4 * d)
    assert cache.bytes_read() == index + (256 + 4000 % group) * 2 * 4 * d


def test_the_index_does_not_depend_on_how_tokens_arrive() -> None:
    _, keys, values = draw(300)
    whole, pieces = make("fier:k=64"), make("fier:k=64")
    whole.append_prompt(keys, values)
    begin = 0
    for n in (1, 30, 1, 1, 31, 64, 5, 130):
        pieces.append_prompt(keys[:, begin : begin + n], values[:, begin : begin + n])
        begin += n
    pieces.truncate(200)
    pieces.append_prompt(keys[:, 200:], values[:, 200:])
    for name in whole.arrays:
        np.testing.assert_array_equal(whole.arrays[name], pieces.arrays[name])


@pytest.mark.parametrize("options", ["k=0", "group=16", "group=48", "levels=range", "skip=-1"])
def test_options_out_of_range(options: str) -> None:
    with pytest.raises(CacheError, match=f"fier:{options}': accepted"):
        CacheSpec.parse(f"fier:{options}")
