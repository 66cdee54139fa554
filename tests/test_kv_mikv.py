"""MiKV: H2O's choice in f16, everyone else in a few bits; checked against the rule spelt out in float64."""

from __future__ import annotations

import cache_cases
import numpy as np
import numpy.typing as npt
import pytest
from cache_cases import BACKENDS

from edgekv.errors import CacheError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import Geometry, KVCache

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
G, GROUP, D = 2, 2, 16


def make(kv: str, capacity: int = 300, backend: str = "numba", window: int | None = None) -> KVCache:
    return cache_cases.make(kv, (G * GROUP, G, D), capacity, backend, sliding_window=window)


def draw(n: int, seed: int = 0) -> tuple[F32, F32, F32]:
    """Queries, and keys with a common offset and values, all as float16 holds them."""
    rng = np.random.default_rng(seed)
    q = (rng.standard_normal((G * GROUP, n, D)) / 2).astype(np.float16).astype(np.float32)
    k, v = rng.standard_normal((2, G, n, D))
    k += np.random.default_rng(99).standard_normal((G, 1, D)) * 3
    return q, k.astype(np.float16).astype(np.float32), v.astype(np.float16).astype(np.float32)


def packed(x: F64, bits: int) -> F64:
    """x (D,) after a round trip through its low end and step, both in float16."""
    low = float(np.float16(x.min()))
    step = np.float16((x.max() - low) / (2**bits - 1))
    if float(step) < (x.max() - low) / (2**bits - 1):
        step = np.nextafter(step, np.float16(np.inf))
    return low + float(step) * np.clip(np.rint((x - low) / float(step)), 0, 2**bits - 1)


class Reference:
    """Keys and values as they are held now, in order of position, and which of them are in f16."""

    def __init__(self, slots: int, recent: int, bits: int, window: int | None) -> None:
        self.slots, self.recent, self.bits, self.window = slots, recent, bits, window
        self.k, self.v, self.mass = np.empty((G, 0, D)), np.empty((G, 0, D)), np.zeros((G, 0))
        self.high: list[set[int]] = [set() for _ in range(G)]
        self.balance = np.ones((G, D))

    def append(self, k: F32, v: F32) -> None:
        self.k, self.v = np.concatenate([self.k, k], axis=1), np.concatenate([self.v, v], axis=1)
        self.mass = np.pad(self.mass, ((0, 0), (0, k.shape[1])))

    def prefill(self, q: F32, k: F32, v: F32) -> None:
        self.append(k, v)
        n = k.shape[1]
        self.high = [set(range(n)) for _ in range(G)]
        self.balance = np.sqrt(np.abs(q).reshape(G, -1, D).max(axis=1) / np.abs(k).max(axis=1))
        for t in range(n):
            self.look(q[:, t], t)
        self.demote(n)

    def attend(self, q: F32, k: F32, v: F32) -> F64:
        out = np.empty(q.shape)
        for i in range(q.shape[1]):
            t = self.k.shape[1]
            self.append(k[:, i : i + 1], v[:, i : i + 1])
            for high in self.high:
                high.add(t)
            self.demote(t + 1)
            out[:, i] = self.look(q[:, i], t)
        return out

    def demote(self, n: int) -> None:
        """Down to the budget: the hidden, then the lightest, then the oldest before the recent ones."""
        for g, high in enumerate(self.high):
            hidden = n - self.window if self.window is not None else 0
            while len(high) > self.slots:
                candidates = [p for p in high if p < n - self.recent]
                p = min(candidates, key=lambda p, g=g: (p >= hidden, p >= hidden and self.mass[g, p], p))
                high.remove(p)
                self.k[g, p] = packed(self.k[g, p] * self.balance[g], self.bits) / self.balance[g]
                self.v[g, p] = packed(self.v[g, p], self.bits)

    def look(self, q: F32, t: int) -> F64:
        """Attention (n_heads, D) of the queries at position t; adds to the mass of f16 tokens."""
        first = 0 if self.window is None else max(0, t + 1 - self.window)
        out = np.empty((G * GROUP, D))
        for h in range(G * GROUP):
            g = h // GROUP
            scores = self.k[g, first : t + 1] @ q[h].astype(float)
            w = np.exp(scores - scores.max())
            w /= w.sum()
            out[h] = w @ self.v[g, first : t + 1]
            self.mass[g, first : t + 1] += w
        return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("prompt", [0, 20, 90])
@pytest.mark.parametrize("window", [None, 35])
def test_holds_and_answers_what_the_rule_says(window: int | None, prompt: int, bits: int, backend) -> None:
    cache = make(f"mikv:budget=30,recent=0.4,bits={bits}", backend=backend, window=window)
    reference = Reference(30, 12, bits, window)
    q, k, v = draw(160)
    if prompt:
        cache.prefill(q[:, :prompt], k[:, :prompt], v[:, :prompt])
        reference.prefill(q[:, :prompt], k[:, :prompt], v[:, :prompt])
    got = cache.attend(q[:, prompt:], k[:, prompt:], v[:, prompt:])
    expected = reference.attend(q[:, prompt:], k[:, prompt:], v[:, prompt:])
    high = [set(row) for row in cache.arrays["position"][:, : cache.n_used].tolist()]
    assert high == reference.high
    # a code may round the other way where float32 meets a half: one step of one element
    assert np.median(np.abs(got - expected)) < 1e-5
    np.testing.assert_allclose(got, expected, atol=0.05)


def test_nothing_is_dropped() -> None:
    q, k, v = draw(200)
    cache = make("mikv:budget=30")
    cache.prefill(q[:, :120], k[:, :120], v[:, :120])
    cache.attend(q[:, 120:], k[:, 120:], v[:, 120:])
    assert (cache.n_kept, cache.n_seen, cache.n_used) == (200, 200, 30)


@pytest.mark.parametrize("capacity", [1, 100, 333, 8192])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("window", [None, 64])
def test_bytes_are_the_formula(window: int | None, bits: int, capacity: int) -> None:
    cache = make(f"mikv:budget=0.25,bits={bits}", capacity, window=window)
    slots = -(-capacity // 4)
    low = capacity - slots
    per_head = slots * (4 * D + 8) + low * (D * bits // 4 + 8 + 4 * (window is not None)) + 4 * D
    assert cache.nbytes == cache.planned_bytes() == G * per_head


def test_bytes_read_count_both_precisions() -> None:
    cache = make("mikv:budget=30,bits=2")
    cache.attend(*draw(100))
    assert cache.bytes_read() == G * (30 * (4 * D + 8) + 70 * (2 * D * 2 // 8 + 8))


@pytest.mark.parametrize("window", [None, 50])
def test_equals_dense_when_the_budget_covers_the_context(window: int | None) -> None:
    q, k, v = draw(130)
    dense, cache = make("dense", 130, window=window), make("mikv:budget=1.0", 130, window=window)
    for each in (dense, cache):
        each.prefill(q[:, :70], k[:, :70], v[:, :70])
    expected = dense.attend(q[:, 70:], k[:, 70:], v[:, 70:]).copy()
    np.testing.assert_allclose(cache.attend(q[:, 70:], k[:, 70:], v[:, 70:]), expected, rtol=0, atol=4e-6)


def test_more_bits_are_closer_to_dense_and_two_beat_eviction() -> None:
    q, k, v = draw(250)
    errors = {}
    dense = make("dense")
    dense.prefill(q[:, :200], k[:, :200], v[:, :200])
    exact = dense.attend(q[:, 200:], k[:, 200:], v[:, 200:]).copy()
    for kv in ("h2o:budget=60", "mikv:budget=60,bits=2", "mikv:budget=60,bits=4", "mikv:budget=60,bits=8"):
        cache = make(kv)
        cache.prefill(q[:, :200], k[:, :200], v[:, :200])
        got = cache.attend(q[:, 200:], k[:, 200:], v[:, 200:])
        errors[kv] = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert errors["mikv:budget=60,bits=8"] < 0.02


def test_the_balance_is_the_papers_and_tames_outlier_channels() -> None:
    q, k, v = draw(200)
    k[:, :, 3] *= 30
    q[:, :, 3] /= 30
    k[1, :, 5] = 0
    errors = []
    dense = make("dense")
    dense.prefill(q[:, :150], k[:, :150], v[:, :150])
    exact = dense.attend(q[:, 150:], k[:, 150:], v[:, 150:]).copy()
    for balance in ("true", "false"):
        cache = make(f"mikv:budget=40,balance={balance}")
        cache.prefill(q[:, :150], k[:, :150], v[:, :150])
        got = cache.attend(q[:, 150:], k[:, 150:], v[:, 150:])
        errors.append(np.linalg.norm(got - exact))
        ratio = np.abs(q[:, :150]).reshape(G, -1, D).max(axis=1) / np.maximum(np.abs(k[:, :150]).max(axis=1), 1e-9)
        ratio[1, 5] = 1
        expected = np.sqrt(ratio) if balance == "true" else np.ones((G, D))
        np.testing.assert_allclose(cache.arrays["balance"], expected, rtol=1e-6)
    assert errors[0] < 0.7 * errors[1]


def test_many_tokens_at_once_are_bit_for_bit_single_steps() -> None:
    q, k, v = draw(120)
    whole, single = make("mikv:budget=30"), make("mikv:budget=30")
    together = whole.attend(q, k, v).copy()
    apart = [single.attend(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1]).copy() for i in range(120)]
    np.testing.assert_array_equal(together, np.concatenate(apart, axis=1))
    for name, array in whole.arrays.items():
        np.testing.assert_array_equal(array, single.arrays[name])


def test_appending_without_queries_in_pieces_equals_one_go() -> None:
    q, k, v = draw(230)
    whole, pieces = make("mikv:budget=30"), make("mikv:budget=30")
    for cache in (whole, pieces):
        cache.attend(q[:, :60], k[:, :60], v[:, :60])
    whole.append_prompt(k[:, 60:], v[:, 60:])
    for a, b in ((60, 61), (61, 75), (75, 180), (180, 230)):
        pieces.append_prompt(k[:, a:b], v[:, a:b])
    after = [cache.attend(*draw(20, 1)).copy() for cache in (whole, pieces)]
    np.testing.assert_allclose(after[0], after[1], atol=1e-5)


def test_rewinding_goes_to_the_start_once_a_token_may_have_been_packed() -> None:
    q, k, v = draw(120)
    cache, fresh = make("mikv:budget=30"), make("mikv:budget=30")
    cache.attend(q, k, v)
    assert cache.truncate(120) == 120
    assert cache.truncate(100) == cache.n_kept == 0
    again = [each.attend(q, k, v).copy() for each in (cache, fresh)]
    np.testing.assert_array_equal(*again)
    covering = make("mikv:budget=1.0")
    covering.attend(q, k, v)
    assert covering.truncate(50) == covering.n_kept == 50


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        ("mikv:budget=0", "budget=0': accepted"),
        ("mikv:recent=2", "recent=2': accepted"),
    ],
)
def test_impossible_settings_are_refused(kv: str, message: str) -> None:
    with pytest.raises(CacheError, match=message):
        make(kv)


def test_a_head_dim_that_does_not_fill_bytes_is_refused() -> None:
    spec = CacheSpec.parse("mikv:bits=2")
    with pytest.raises(CacheError, match="packs 4 elements to a byte: head_dim 18 must be a multiple"):
        spec.scheme(Geometry(2, 2, 18, 100), spec.config)
