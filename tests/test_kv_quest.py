"""Quest: pages chosen by a bound on their scores, attention to their tokens is exact."""

from __future__ import annotations

import numpy as np
import pytest
from cache_cases import BACKENDS
from retrieval_cases import draw, make, reference, rounded

from edgekv.errors import CacheError
from edgekv.kvcache import CacheSpec


def bounds(page: int):
    """The sum over channels of the larger of q * max and q * min, for the whole pages of one head's keys."""

    def summary(keys: np.ndarray):
        x = keys[: len(keys) // page * page].reshape(-1, page, keys.shape[1])
        high, low = x.max(1), x.min(1)
        return lambda q: np.maximum(q[:, None] * high, q[:, None] * low).sum(-1)

    return summary


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize(("page", "k"), [(8, 40), (16, 64), (32, 32)])
def test_attends_to_the_best_pages(page: int, k: int, window: int | None, backend: str) -> None:
    n, steps = 400, 70  # over several pages
    q, keys, values = draw(n)
    cache = make(f"quest:k={k},page={page}", backend, sliding_window=window)
    cache.prefill(q[:, : n - steps], keys[:, : n - steps], values[:, : n - steps])
    got = cache.attend(q[:, n - steps :], keys[:, n - steps :], values[:, n - steps :])
    expected = reference(
        q[:, n - steps :], keys, values, bounds(page), n_chosen=k // page, unit=page, block=page, window=window
    )
    np.testing.assert_allclose(got, expected, atol=2e-3)


@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(3, 3, 12), (8, 1, 24), (1, 1, 128)])
def test_any_heads(n_heads: int, n_kv_heads: int, head_dim: int) -> None:
    sizes = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
    q, keys, values = draw(333, 1, **sizes)
    cache = make("quest:k=48", **sizes)
    cache.prefill(q[:, :-3], keys[:, :-3], values[:, :-3])
    got = cache.attend(q[:, -3:], keys[:, -3:], values[:, -3:])
    expected = reference(q[:, -3:], keys, values, bounds(16), n_chosen=3, unit=16, block=16)
    np.testing.assert_allclose(got, expected, atol=2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_of_a_page_scores_above_the_page(backend: str) -> None:
    q, keys, values = draw(128)
    cache = make("quest:k=64", backend)
    cache.append_prompt(keys, values)
    s = np.empty((2, 2, 8), np.float32)
    cache.kernels.scores(cache._index, q[:, 5].reshape(2, 2, 16), 0, 8, s)
    exact = q[:, 5].reshape(2, 2, 16) @ rounded(keys).transpose(0, 2, 1)
    assert (s >= exact.reshape(2, 2, 8, 16).max(-1) - 1e-5).all()


def test_is_dense_to_the_bit_while_k_covers_the_pages() -> None:
    q, keys, values = draw(300)
    outputs = []
    for kv in ("dense", "quest:k=288"):
        cache = make(kv)
        cache.prefill(q[:, :290], keys[:, :290], values[:, :290])
        outputs.append(cache.attend(q[:, 290:], keys[:, 290:], values[:, 290:]).copy())
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("page", [8, 16, 32])
def test_bytes(page: int) -> None:
    """Two f16 per channel and page: 2 / p of the keys' bytes (FIER's equation 4)."""
    d, capacity = 128, 4096
    cache = make(f"quest:page={page}", head_dim=d, capacity=capacity)
    assert cache.planned_bytes() == cache.nbytes == capacity * 2 * (4 * d + 4 * d / page)
    keys = np.zeros((2, 4001, d), np.float32)
    cache.append_prompt(keys, keys)
    assert cache.bytes_read() == 2 * (4001 // page) * 4 * d + (512 + 4001 % page) * 2 * 4 * d


def test_first_layers_are_dense() -> None:
    assert make("quest:k=64", layer=1).layout() == make("dense").layout()
    assert "index.bounds" in make("quest:k=64,skip=0", layer=0).layout()


@pytest.mark.parametrize("options", ["k=0", "k=40", "page=12", "skip=-1"])
def test_options_out_of_range(options: str) -> None:
    with pytest.raises(CacheError, match=f"quest:{options}': accepted"):
        CacheSpec.parse(f"quest:{options}")
