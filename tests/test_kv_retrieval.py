"""FIER and Quest: an index chooses the tokens, attention to them is exact; both by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cache_cases
import numpy as np
import pytest
from cache_cases import BACKENDS, Heads, attend_last, draw
from kernel_cases import EITHER_WAY, assert_close, bound, pairs

from edgekv.kernels import cpu, reference
from edgekv.kvcache.cache import KVCache
from edgekv.papers.fier import SignIndex
from edgekv.papers.quest import PageIndex
from edgekv.papers.retrieval import top_k

Summary = Callable[[np.ndarray], Callable[[np.ndarray], np.ndarray]]


FEW: Heads = (4, 2, 16)


def make(kv: str, heads: Heads = FEW, backend: str = "numba", capacity: int = 600, **geometry: Any) -> KVCache:
    """A layer that retrieves, unless it is said to be another one."""
    return cache_cases.make(kv, heads, capacity, backend, **{"layer": 2, "n_layers": 4} | geometry)


def rounded(x: np.ndarray) -> np.ndarray:
    """Rounds to float16, in float64."""
    return x.astype(np.float16).astype(float)


def softmax(s: np.ndarray) -> np.ndarray:
    weights = np.exp(s - s.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def by_hand(
    tokens: Sequence[np.ndarray],
    n: int,
    summary: Summary,
    n_chosen: int,
    unit: int,
    block: int,
    window: int | None,
) -> np.ndarray:
    """Attends with the last n tokens to the n_chosen best units each, and to what is not indexed.

    summary(keys of one KV head) gives the function from queries (R, D) to scores (R, units).
    """
    q, k, v = tokens[0][:, -n:], rounded(tokens[1]), rounded(tokens[2])
    group, total = len(q) // len(k), k.shape[1]
    out = np.empty(q.shape)
    for g in range(len(k)):
        heads, approximate = slice(g * group, (g + 1) * group), summary(k[g])
        for i in range(n):
            seen = total - n + i + 1
            indexed = seen // block * block
            low = 0 if window is None else max(0, seen - window)
            units = np.arange(-(-low // unit), indexed // unit)
            mass = softmax(approximate(q[heads, i].astype(float))[:, units]).sum(0)
            best = units[np.argsort(-mass, kind="stable")[:n_chosen]]
            chosen = (best[:, None] * unit + np.arange(unit)).ravel()
            seen_tokens = np.concatenate([chosen, np.arange(indexed, seen)])
            out[heads, i] = softmax(q[heads, i] @ k[g, seen_tokens].T) @ v[g, seen_tokens]
    return out


def two_levels(group: int, levels: str) -> Summary:
    """Computes FIER's equation 5 and algorithm 1: q . K~ over the whole groups of one head's keys."""

    def summary(keys: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
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


def bounds(page: int) -> Summary:
    """Sums over channels the larger of q * max and q * min, for the whole pages of one head's keys."""

    def summary(keys: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        x = keys[: len(keys) // page * page].reshape(-1, page, keys.shape[1])
        high, low = x.max(1), x.min(1)
        return lambda q: np.maximum(q[:, None] * high, q[:, None] * low).sum(-1)

    return summary


RULES = {
    "fier:k=40": (two_levels(32, "mad"), 40, 1, 32),
    "fier:k=17,group=64,levels=minmax": (two_levels(64, "minmax"), 17, 1, 64),
    "fier:k=1,levels=minmax": (two_levels(32, "minmax"), 1, 1, 32),
    "quest:k=40,page=8": (bounds(8), 5, 8, 8),
    "quest:k=64": (bounds(16), 4, 16, 16),
    "quest:k=32,page=32": (bounds(32), 1, 32, 32),
}
HEADS = [(4, 2, 16), (3, 3, 12), (8, 1, 24), (1, 1, 128)]


@pytest.mark.parametrize(
    ("kv", "window", "heads", "backend"), pairs(kv=RULES, window=[None, 150], heads=HEADS, backend=BACKENDS)
)
def test_attends_to_what_the_paper_chooses(kv: str, window: int | None, heads: Heads, backend: str) -> None:
    n, steps = 400, 70  # over a border of groups, and over several pages
    tokens = draw(heads, n, offset=2)
    got = attend_last(make(kv, heads, backend, sliding_window=window), tokens, steps)
    np.testing.assert_allclose(got, by_hand(tokens, steps, *RULES[kv], window), atol=2e-3)


@pytest.mark.parametrize("kv", ["fier:k=288", "quest:k=288"])
def test_is_dense_to_the_bit_while_k_covers_the_index(kv: str) -> None:
    caches = [make(each) for each in ("dense", kv)]
    np.testing.assert_array_equal(*(attend_last(cache, draw(FEW, 300), 10) for cache in caches))
    assert [cache.bytes_read() for cache in caches] == [300 * 2 * 16 * 4] * 2


def test_where_attention_stays_dense() -> None:
    """Attention is dense in the first layers, with a narrow window, or in a short context."""
    for (layer, n_layers), retrieves in {(0, 4): False, (1, 4): False, (2, 4): True, (1, 2): True}.items():
        assert ("index.signs" in make("fier:k=64", layer=layer, n_layers=n_layers).arrays) == retrieves
    assert "index.bounds" in make("quest:k=64,skip=0", layer=0).layout()
    for sizes in ({"sliding_window": 95}, {"capacity": 95}):
        assert make("fier:k=64", **sizes).layout() == make("dense", **sizes).layout()
    assert "index.signs" in make("fier:k=64", sliding_window=96).layout()


@pytest.mark.parametrize(
    ("kv", "k", "block", "index"),
    [  # bytes of a block's index: FIER's equations 8 and 4
        *((f"fier:group={g}", 256, g, g * 128 // 8 + 4 * 128) for g in (32, 256)),
        *((f"quest:page={page}", 512, page, 4 * 128) for page in (8, 32)),
    ],
)
def test_bytes(kv: str, k: int, block: int, index: int) -> None:
    d, capacity = 128, 4096
    cache = make(kv, (4, 2, d), capacity=capacity)
    assert cache.planned_bytes() == cache.nbytes == 2 * (capacity * 4 * d + capacity // block * index)
    keys = np.zeros((2, 4001, d), np.float32)
    cache.append_prefill(keys, keys)
    assert cache.bytes_read() == 2 * (4001 // block * index + (k + 4001 % block) * 4 * d)


def test_the_index_does_not_depend_on_how_tokens_arrive() -> None:
    _, keys, values = draw(FEW, 300)
    whole, pieces = make("fier:k=64"), make("fier:k=64")
    whole.append_prefill(keys, values)
    begin = 0
    for n in (1, 30, 1, 1, 31, 64, 5, 130):
        pieces.append_prefill(keys[:, begin : begin + n], values[:, begin : begin + n])
        begin += n
    pieces.truncate(200)
    pieces.append_prefill(keys[:, 200:], values[:, 200:])
    for name in whole.arrays:
        np.testing.assert_array_equal(whole.arrays[name], pieces.arrays[name])


SHAPES = [(1, 1, 1, 8), (2, 3, 1, 12), (1, 2, 5, 17), (3, 4, 2, 64), (2, 1, 3, 80), (2, 8, 1, 128)]  # G, R, n, D


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)


@pytest.mark.parametrize("k", [1, 7, 100])
@pytest.mark.parametrize("columns", [1, 15, 333])
def test_the_largest_are_taken(k: int, columns: int) -> None:
    """Ties go to the lower columns, and NaN of either sign comes behind -inf, as in a stable sort."""
    rng = np.random.default_rng([k, columns])
    pool = np.array([np.nan, -np.float32(np.nan), np.inf, -np.inf, 0, -0.0, 1, -1], np.float32)
    s = [rng.choice(pool, columns, p=p) for p in rng.dirichlet(np.full(len(pool), 0.3), 40)]
    s += [np.full(columns, x) for x in pool]
    s += [*normal(k, 4, columns).round(1), *(normal(k, 4, columns) * 10.0 ** rng.integers(-40, 30, (4, 1)))]
    k = min(k, columns)
    found = top_k(np.array(s, np.float32), k)
    for row, got in zip(np.array(s, np.float32), found, strict=True):
        order = np.lexsort((-row, np.isnan(row)))
        assert got.tolist() == sorted(order[:k].tolist())


@pytest.mark.parametrize(
    ("shape", "group", "minmax", "way"),
    pairs(shape=SHAPES, group=[32, 64, 256], minmax=[False, True], way=EITHER_WAY),
    indirect=["way"],
)
def test_fier_index(shape: tuple[int, int, int, int], group: int, minmax: bool, way: str) -> None:
    """Bits and levels to the bit, scores to rounding; only the groups asked for."""
    (g, r, n, d), n_groups, b0, b1 = shape, 5, 1, 4
    keys = half(normal(1, g, n_groups * group + 9, d) + 4 * normal(2, g, 1, d))
    q = normal(3, g, r * n, d)
    signs = np.full((g, n_groups * group // 32, d), 0xABCD1234, np.uint32)
    levels = np.full((g, n_groups, 2, d), 0x7E00, np.uint16)
    empty = SignIndex(g, n_groups * group, d, group, "minmax" if minmax else "mad")
    index = bound(empty, signs=signs, levels=levels)
    index.encode(keys, b0, b0 + 1)
    index.encode(keys, b0 + 1, b1)
    assert (signs[:, np.r_[: b0 * group // 32, b1 * group // 32 : n_groups * group // 32]] == 0xABCD1234).all()
    assert (levels[:, [0, 4]] == 0x7E00).all()
    results = []
    for module in (cpu, reference):
        s = np.full((g, r * n + 1, 3 * group + 7), np.nan, np.float32)[:, : r * n, 1:-1]
        module.scores(index, q, (b0 + 1) * group, b1 * group, s[:, :, 2 : 2 + 2 * group])
        results.append(s)
    assert_close(*results)
    assert np.isfinite(results[0]).sum() == g * r * n * 2 * group


@pytest.mark.parametrize(("shape", "page"), [*zip(SHAPES, [8, 16, 32] * 2, strict=True)])
def test_quest_pages(shape: tuple[int, int, int, int], page: int) -> None:
    g, r, n, d = shape
    keys = half(normal(1, g, 6 * page + 3, d))
    bounds = np.full((g, 6, 2 * d), 0x7E00, np.uint16)
    index = bound(PageIndex(g, 6 * page, d, page), bounds=bounds)
    index.encode(keys, 2, 5)
    x = keys.view(np.float16)[:, 2 * page : 5 * page].reshape(g, 3, page, d)
    np.testing.assert_array_equal(bounds[:, 2:5, :d].view(np.float16), x.max(2))
    assert (bounds[:, [0, 1, 5]] == 0x7E00).all()
    q = normal(3, g, r * n, d)
    for module in (cpu, reference):
        s = np.full((g, r * n + 1, 9), np.nan, np.float32)[:, : r * n, 1:-1]
        module.scores(index, q, 2, 5, s[:, :, 2:5])
        larger = np.maximum(q[:, :, None] * x.max(2)[:, None], q[:, :, None] * x.min(2)[:, None])
        assert_close(s[:, :, 2:5], larger.sum(3))
        assert np.isfinite(s).sum() == g * r * n * 3
