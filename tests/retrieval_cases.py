"""What FIER's and Quest's tests share: small layers, and retrieval written out in float64."""

from __future__ import annotations

from collections.abc import Callable

import cache_cases
import numpy as np

from edgekv.kvcache.cache import KVCache

Summary = Callable[[np.ndarray], Callable[[np.ndarray], np.ndarray]]


def make(kv: str, backend: str = "numba", **geometry: object) -> KVCache:
    """A layer that retrieves: 4 query heads, 2 KV heads of 16 channels, 600 tokens, unless said otherwise."""
    sizes = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "capacity": 600, "layer": 2, "n_layers": 4} | geometry
    heads = sizes.pop("n_heads"), sizes.pop("n_kv_heads"), sizes.pop("head_dim")
    return cache_cases.make(kv, heads, sizes.pop("capacity"), backend, **sizes)


def draw(n: int, seed: int = 0, n_heads: int = 4, n_kv_heads: int = 2, head_dim: int = 16) -> list[np.ndarray]:
    """Queries, keys and values; keys have a common offset, so that levels and bounds matter."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((n_heads, n, head_dim)) * 0.5
    k = rng.standard_normal((n_kv_heads, n, head_dim)) + 2 * rng.standard_normal((n_kv_heads, 1, head_dim))
    v = rng.standard_normal((n_kv_heads, n, head_dim))
    return [x.astype(np.float32) for x in (q, k, v)]


def rounded(x: np.ndarray) -> np.ndarray:
    """As float16 holds it, in float64."""
    return x.astype(np.float16).astype(float)


def softmax(s: np.ndarray) -> np.ndarray:
    weights = np.exp(s - s.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    summary: Summary,
    *,
    n_chosen: int,
    unit: int,
    block: int,
    window: int | None = None,
) -> np.ndarray:
    """Attention of the last q.shape[1] tokens to the n_chosen best units each, and to what is not indexed.

    summary(keys of one KV head) gives the function from queries (R, D) to scores (R, units).
    """
    k, v = rounded(k), rounded(v)
    group, n, total = len(q) // len(k), q.shape[1], k.shape[1]
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
            tokens = np.concatenate([chosen, np.arange(indexed, seen)])
            out[heads, i] = softmax(q[heads, i] @ k[g, tokens].T) @ v[g, tokens]
    return out
