"""Schemes that keep few tokens in f16, against each paper's rule, token by token in float64.

MiKV keeps the others in a few bits.
"""

from __future__ import annotations

import dataclasses

import cache_cases
import numpy as np
import pytest
from cache_cases import BACKENDS, half_above
from kernel_cases import pairs

from edgekv.kvcache.cache import Geometry, Workspace
from edgekv.papers.evicting import EvictingCache, attention_received, budget_tokens, highest_ranked, lowest_ranked
from edgekv.types import F32, F64

G, GROUP, D = 2, 3, 24
SCHEMES = {
    "streaming": "streaming:budget=40,sink=3", "h2o": "h2o:budget=40,recent=0.3", "tova": "tova:budget=40",
    "tova per head": "tova:budget=40,per_head=true", "snapkv": "snapkv:budget=40,observe=8,interval=5,kernel=3",
    "mikv": "mikv:budget=40,recent=0.3,bits=4",
}  # fmt: skip
ALL = pytest.mark.parametrize("kv", SCHEMES.values(), ids=SCHEMES.keys())


def make(kv: str, capacity: int = 400, backend: str = "numba", window: int | None = None) -> EvictingCache:
    return cache_cases.make(kv, (G * GROUP, G, D), capacity, backend, sliding_window=window)


def draw(n: int, seed: int = 0) -> tuple[F32, F32, F32]:
    """Draws queries, and keys and values that float16 holds."""
    q, k, v = cache_cases.draw((G * GROUP, G, D), n, seed, offset=1)
    return q, k.astype(np.float16).astype(np.float32), v.astype(np.float16).astype(np.float32)


def kept_positions(cache: EvictingCache) -> list[list[int]]:
    """Returns the positions held, per KV head."""
    return [sorted(row) for row in cache.arrays["position"][:, : cache.n_used].tolist()]


@dataclasses.dataclass
class Reference:
    """All keys, values and queries so far, and which positions each KV head still holds."""

    budget: int
    window: int | None = None
    recent: int = 1

    def __post_init__(self) -> None:
        self.q, self.k, self.v = (np.empty((heads, 0, D)) for heads in (G * GROUP, G, G))
        self.held: list[list[int]] = [[] for _ in range(G)]
        self.mass = np.zeros((G, 0))

    def weights(self, g: int, position: int, held: list[int]) -> F64:
        """Returns softmax (GROUP, len(held)) of the group's queries at a position over held tokens."""
        scores = self.q[g * GROUP : (g + 1) * GROUP, position] @ self.k[g, held].T
        seen = np.array(held) <= position
        if self.window is not None:
            seen &= np.array(held) > position - self.window
        e = np.where(seen, np.exp(scores - scores[:, seen].max(axis=1, keepdims=True)), 0)
        return e / e.sum(axis=1, keepdims=True)

    def prefill(self, q: F32, k: F32, v: F32) -> None:
        n = k.shape[1]
        self.q, self.k, self.v = q.astype(float), k.astype(float), v.astype(float)
        self.mass = np.zeros((G, n))
        self.held = [list(range(n)) for _ in range(G)]
        for t in range(n):
            self.learn(t, [self.weights(g, t, list(range(n))) for g in range(G)])
        self.shrink(n)

    def shrink(self, n: int) -> None:
        for g in range(G):
            while len(self.held[g]) > self.budget:
                self.drop(g, self.victim(g, n))

    def drop(self, g: int, p: int) -> None:
        self.held[g].remove(p)

    def reach(self, g: int) -> list[int]:
        """Returns the tokens that a query sees."""
        return self.held[g]

    def attend(self, q: F32, k: F32, v: F32) -> F64:
        out = np.empty(q.shape)
        for i in range(q.shape[1]):
            t = self.k.shape[1]
            self.q, self.k, self.v = (
                np.concatenate([old, new[:, i : i + 1]], axis=1)
                for old, new in ((self.q, q), (self.k, k), (self.v, v))
            )
            self.mass = np.pad(self.mass, ((0, 0), (0, 1)))
            self.make_room(t)
            weights = []
            for g in range(G):
                self.held[g].append(t)
                w = self.weights(g, t, self.reach(g))
                out[g * GROUP : (g + 1) * GROUP, i] = w @ self.v[g, self.reach(g)]
                weights.append(w)
            self.learn(t, weights)
        return out

    def make_room(self, t: int) -> None:
        for g in range(G):
            if len(self.held[g]) == self.budget:
                self.drop(g, self.victim(g, t + 1))

    def victim(self, g: int, n: int) -> int:
        """Returns of the tokens before the recent ones the hidden, then the lightest, then the oldest."""
        hidden = n - self.window if self.window is not None else 0
        candidates = [p for p in self.held[g] if p < n - self.recent]
        return min(candidates, key=lambda p: (p >= hidden, p >= hidden and self.mass[g, p], p))

    def learn(self, t: int, weights: list[F64]) -> None:
        """Adds what a query teaches about the tokens that it saw."""


class ReferenceStreaming(Reference):
    def victim(self, g: int, n: int) -> int:
        return min(p for p in self.held[g] if p >= 3)


class ReferenceH2O(Reference):
    def learn(self, t: int, weights: list[F64]) -> None:
        for g, w in enumerate(weights):
            self.mass[g, self.reach(g)] += w.sum(axis=0)


class ReferenceMiKV(ReferenceH2O):
    bits = 4
    balance: F64 = np.ones((G, D))

    def prefill(self, q: F32, k: F32, v: F32) -> None:
        self.balance = np.sqrt(np.abs(q).reshape(G, -1, D).max(axis=1) / np.abs(k).max(axis=1))
        super().prefill(q, k, v)

    def reach(self, g: int) -> list[int]:
        return list(range(max((p + 1 for p in self.held[g]), default=0)))

    def drop(self, g: int, p: int) -> None:
        super().drop(g, p)
        self.k[g, p] = self.packed(self.k[g, p] * self.balance[g]) / self.balance[g]
        self.v[g, p] = self.packed(self.v[g, p])

    def packed(self, x: F64) -> F64:
        """Returns x (D,) after a round trip through its low end and step, both in float16."""
        low, top = float(np.float16(x.min())), 2**self.bits - 1
        step = half_above((x.max() - low) / top)
        return low + step * np.clip(np.rint((x - low) / step), 0, top)


class ReferenceTovaPerHead(Reference):
    def learn(self, t: int, weights: list[F64]) -> None:
        for g, w in enumerate(weights):
            self.mass[g, self.held[g]] = w.mean(axis=0)


class ReferenceTova(Reference):
    def learn(self, t: int, weights: list[F64]) -> None:
        assert self.held[0] == self.held[1]
        self.mass[:, self.held[0]] = np.mean([w.mean(axis=0) for w in weights], axis=0)


class ReferenceSnapKV(Reference):
    observe, interval, kernel = 8, 5, 3

    def shrink(self, n: int) -> None:
        if n > self.budget:
            self.compress(n, self.budget)

    def make_room(self, t: int) -> None:
        if len(self.held[0]) == self.budget:
            self.compress(t, self.budget - self.interval)

    def compress(self, n: int, size: int) -> None:
        for g in range(G):
            held = sorted(self.held[g])
            votes = sum(self.weights(g, p, held).sum(axis=0) for p in range(n - self.observe, n))
            earlier = np.pad(votes[: -self.observe], self.kernel // 2)
            pooled = [max(earlier[i : i + self.kernel]) for i in range(len(held) - self.observe)]
            hidden = n - self.window if self.window is not None else 0
            order = sorted(
                range(len(pooled)), key=lambda i: (held[i] >= hidden, held[i] >= hidden and pooled[i], held[i])
            )
            best = order[len(pooled) - (size - self.observe) :]
            self.held[g] = sorted([held[i] for i in best]) + held[-self.observe :]


REFERENCES = {
    **{"streaming": ReferenceStreaming, "h2o": ReferenceH2O, "tova": ReferenceTova},
    **{"tova per head": ReferenceTovaPerHead, "snapkv": ReferenceSnapKV, "mikv": ReferenceMiKV},
}


@pytest.mark.parametrize(
    ("name", "backend", "window", "prompt"),
    pairs(name=SCHEMES, backend=BACKENDS, window=[None, 30, 70], prompt=[0, 25, 90]),
)
def test_keeps_and_answers_what_the_paper_says(name: str, prompt: int, window: int | None, backend) -> None:
    cache = make(SCHEMES[name], backend=backend, window=window)
    reference = REFERENCES[name](40, window, recent=12 if "recent" in SCHEMES[name] else 1)
    q, k, v = draw(200)
    if prompt:
        cache.prefill(q[:, :prompt], k[:, :prompt], v[:, :prompt])
        reference.prefill(q[:, :prompt], k[:, :prompt], v[:, :prompt])
        assert kept_positions(cache) == [sorted(held) for held in reference.held]
    got = cache.attend(q[:, prompt:], k[:, prompt:], v[:, prompt:])
    expected = reference.attend(q[:, prompt:], k[:, prompt:], v[:, prompt:])
    assert kept_positions(cache) == [sorted(held) for held in reference.held]
    # a code of MiKV may round the other way where float32 meets a half: one step of one element
    np.testing.assert_allclose(got, expected, atol=0.05 if name == "mikv" else 2e-5)
    assert np.median(np.abs(got - expected)) < 1e-5
    assert (cache.n_seen, cache.n_kept) == (200, 200 if name == "mikv" else len(reference.held[0]))


@ALL
def test_many_tokens_at_once_are_bit_for_bit_single_steps(kv: str) -> None:
    whole, single = make(kv), make(kv)
    together = whole.attend(*draw(150)).copy()
    np.testing.assert_array_equal(together, cache_cases.attend_singly(single, draw(150)))
    for name, array in whole.arrays.items():
        np.testing.assert_array_equal(array, single.arrays[name])


@pytest.mark.parametrize(
    ("kv", "slot_bytes", "fixed"),
    [
        ("streaming", 4 * D + 4, 0),
        ("h2o", 4 * D + 8, 0),
        ("tova", 4 * D + 8, 0),
        ("snapkv", 4 * D + 4, G * GROUP * 32 * 2 * D),
    ],
)
def test_bytes_are_the_formula_whatever_the_context(kv: str, slot_bytes: int, fixed: int) -> None:
    for capacity in (1000, 50_000):
        cache = make(f"{kv}:budget=128", capacity)
        assert cache.nbytes == cache.planned_bytes() == G * 128 * slot_bytes + fixed
        cache.attend(*draw(200))
        assert cache.nbytes == G * 128 * slot_bytes + fixed
        extra = slot_bytes - 4 * D if "mass" in cache.arrays else 0
        assert cache.bytes_read() == cache.n_kept * G * (4 * D + extra)


@pytest.mark.parametrize(
    ("window", "bits", "capacity"), [(None, 2, 1), (64, 2, 333), (None, 4, 100), (64, 8, 8192)]
)
def test_bytes_of_mikv_are_the_formula(window: int | None, bits: int, capacity: int) -> None:
    cache = make(f"mikv:budget=0.25,bits={bits}", capacity, window=window)
    slots = -(-capacity // 4)
    low = (capacity - slots) * (D * bits // 4 + 8 + 4 * (window is not None))
    assert cache.nbytes == cache.planned_bytes() == G * (slots * (4 * D + 8) + low + 4 * D)
    cache = make("mikv:budget=30,bits=2")
    cache.attend(*draw(100))
    assert cache.bytes_read() == G * (30 * (4 * D + 8) + 70 * (2 * D * 2 // 8 + 8))


def test_a_budget_is_tokens_or_a_fraction() -> None:
    assert [budget_tokens(b, 1000) for b in (1.0, 0.125, 0.0001, 2, 999, 5000)] == [1000, 125, 1, 2, 999, 1000]
    assert make("h2o:budget=0.1", 401).slots == 41


@ALL
def test_appending_without_queries_in_pieces_equals_one_go(kv: str) -> None:
    q, k, v = draw(230)
    whole, pieces = make(kv), make(kv)
    for cache in (whole, pieces):
        cache.attend(q[:, :60], k[:, :60], v[:, :60])
    whole.append_prefill(k[:, 60:], v[:, 60:])
    for a, b in ((60, 61), (61, 75), (75, 76), (76, 180), (180, 230)):
        pieces.append_prefill(k[:, a:b], v[:, a:b])
    assert kept_positions(whole) == kept_positions(pieces)
    assert 229 in kept_positions(whole)[0]
    after = [cache.attend(*draw(20, 1)).copy() for cache in (whole, pieces)]
    np.testing.assert_allclose(after[0], after[1], atol=1e-5)


def test_without_queries_h2o_keeps_old_heavy_hitters_and_snapkv_the_latest() -> None:
    q, k, v = draw(230)
    for kv, oldest in (("h2o:budget=40,recent=0.3", 0), (SCHEMES["snapkv"], 190)):
        cache = make(kv)
        cache.attend(q[:, :60], k[:, :60], v[:, :60])
        cache.append_prefill(k[:, 60:], v[:, 60:])
        assert min(kept_positions(cache)[0]) >= oldest
        assert (min(kept_positions(cache)[0]) < 60) == kv.startswith("h2o")


@ALL
def test_rewinding_never_leaves_a_wrong_state(kv: str) -> None:
    """A rewind goes to the very token or to the start; the rest comes out as in a fresh cache."""
    q, k, v = draw(120)
    for length in (30, 100):
        cache, fresh = make(kv), make(kv)
        cache.attend(q[:, :length], k[:, :length], v[:, :length])
        assert cache.truncate(length) == length
        n = cache.truncate(20)
        assert n == cache.n_seen == (20 if kv.startswith("streaming") and length == 30 else 0)
        fresh.attend(q[:, :20], k[:, :20], v[:, :20])
        cache.attend(q[:, n:20], k[:, n:20], v[:, n:20])
        again = [each.attend(q[:, 20:], k[:, 20:], v[:, 20:]).copy() for each in (cache, fresh)]
        np.testing.assert_array_equal(*again)
        assert kept_positions(cache) == kept_positions(fresh)


@ALL
def test_a_cache_that_never_evicts_rewinds_to_any_token(kv: str) -> None:
    name = kv.partition(":")[0]
    q, k, v = draw(90)
    cache, fresh = make(f"{name}:budget=1.0", 100), make(f"{name}:budget=1.0", 100)
    cache.prefill(q, k, v)
    assert cache.n_kept == 90
    assert cache.truncate(33) == cache.n_kept == 33
    fresh.attend(q[:, :33], k[:, :33], v[:, :33])
    again = [each.attend(q[:, 33:], k[:, 33:], v[:, 33:]).copy() for each in (cache, fresh)]
    np.testing.assert_array_equal(*again)


def test_snapkv_finds_what_the_question_asks_for_with_its_neighbours() -> None:
    """Only the last queries look at tokens 50 and 51; pooling keeps those beside them too."""
    q, k, v = draw(300)
    direction = np.ones(D, np.float32)
    k[:, 50:52] = 2 * direction
    q[:, -8:] = direction
    cache = make(SCHEMES["snapkv"])
    cache.prefill(q, k, v)
    assert all({49, 50, 51, 52} <= set(held) for held in kept_positions(cache))


def test_pooling_by_average_is_the_mean_with_zeros_beyond_the_ends() -> None:
    cache = make("snapkv:budget=40,observe=8,kernel=3,pool=avg,interval=5")
    votes = np.zeros((G, 60), np.float32)
    votes[:, 0], votes[:, 20] = 2.0, 3.0  # spread over 0..1 and 19..21
    chosen = cache._choose_columns(votes, np.arange(60, dtype=np.int32), 8 + 5, 60)
    assert chosen.tolist() == [[0, 1, 19, 20, 21, *range(52, 60)]] * G


def test_received_attention_is_the_column_sum_of_the_causal_matrix() -> None:
    q, k, _ = draw(700)
    for window, first in ((None, 0), (100, 0), (None, 695), (100, 690)):
        scores = np.einsum("grnd,gtd->grnt", q.reshape(G, GROUP, 700, D).astype(float), k.astype(float))
        seen = np.tri(700, dtype=bool)
        if window:
            seen &= ~np.tri(700, k=-window, dtype=bool)
        e, layer = np.where(seen, np.exp(scores), 0), Geometry(G * GROUP, G, D, 700, sliding_window=window)
        expected = (e / e.sum(-1, keepdims=True))[:, :, first:].sum(axis=(1, 2))
        for backend in BACKENDS.values():
            got = attention_received(q, k, first, layer, backend(None), Workspace())
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("visible", "n_kv_heads", "n"), [(-5, 2, 70), (0, 3, 129), (9, 32, 200), (9, 1, 1)])
def test_the_lowest_goes_the_oldest_of_equals(visible: int, n_kv_heads: int, n: int) -> None:
    rng = np.random.default_rng(2)
    positions = np.argsort(rng.random((n_kv_heads, n)), axis=1).astype(np.int32)
    mass = (rng.integers(1, 5, (n_kv_heads, n)) / 4).astype(np.float32)  # many ties
    protected = max(1, n // 2)
    slots = lowest_ranked(mass, positions, visible, protected)
    for g in range(n_kv_heads):
        candidates = [t for t in range(n) if positions[g, t] < protected]
        expected = min(candidates, key=lambda t: (positions[g, t] >= visible and mass[g, t], positions[g, t]))
        assert slots[g] == expected


def test_mass_that_is_no_number_counts_as_none() -> None:
    """Infinity is the most, and protected tokens stay before it."""
    pool = np.array([np.nan, -np.float32(np.nan), np.inf, -1, 0, 0.5, 2], np.float32)
    mass = np.random.default_rng(3).choice(pool, (40, 12))
    mass[0], mass[1] = np.nan, np.inf
    positions = np.tile(np.arange(12, dtype=np.int32), (40, 1))
    left, slots = highest_ranked(mass, positions, 11, 2, 9), lowest_ranked(mass, positions, 2, 9)
    assert (slots < 2).all()
    for g in range(40):
        assert np.setdiff1d(np.arange(12), left[g]).tolist() == [slots[g]]
    slots = lowest_ranked(mass, positions, 0, 9)
    for g, row in enumerate(np.where(mass[:, :9] > 0, mass[:, :9], 0)):
        assert slots[g] == row.argmin()
