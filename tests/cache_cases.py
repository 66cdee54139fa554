"""One layer of a KV scheme, tokens to put into it, and exact attention, for the tests of schemes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.kernels import Kernels, arrays, numba_kernels, numpy_kernels
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import Geometry, KVCache, Workspace
from edgekv.types import F32, F64

Heads = tuple[int, int, int]  # query heads, KV heads, head_dim

BACKENDS = {"numpy": numpy_kernels, "numba": numba_kernels}


def make(
    kv: str, heads: Heads, capacity: int, backend: str | Kernels = "numba", memory: Any = arrays, **geometry: Any
) -> KVCache:
    """Returns an empty layer in this memory."""
    spec = CacheSpec.parse(kv)
    cache = spec.scheme(Geometry(*heads, capacity, **geometry), spec.config)
    cache.allocate(BACKENDS[backend](None) if isinstance(backend, str) else backend, Workspace(memory))
    return cache


def normal(heads: Heads, n: int, seed: int) -> tuple[F32, F32, F32]:
    """Draws queries, keys and values of n tokens, each element from N(0, 1)."""
    n_heads, n_kv_heads, head_dim = heads
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((h, n, head_dim)) for h in (n_heads, n_kv_heads, n_kv_heads))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def draw(heads: Heads, n: int, seed: int = 0, offset: float = 3) -> tuple[F32, F32, F32]:
    """Draws as `normal`, but queries are scaled and all keys have an offset that differs by channel."""
    q, k, v = normal(heads, n, seed)
    of_channel = np.random.default_rng([seed, 1]).standard_normal((heads[1], 1, heads[2]))
    return q * np.float32(2 / np.sqrt(heads[2])), k + np.float32(offset) * of_channel.astype(np.float32), v


def attention(q: F32, k: F32 | F64, v: F32 | F64, window: int | None = None, cap: float | None = None) -> F64:
    """Computes causal attention in float64; the last q.shape[1] of the keys are the queries' own tokens."""
    group, n, total = q.shape[0] // k.shape[0], q.shape[1], k.shape[1]
    scores = q.astype(float) @ np.repeat(k, group, 0).astype(float).transpose(0, 2, 1)
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    position, column = np.arange(total - n, total)[:, None], np.arange(total)
    scores[:, (column > position) | (column <= position - (window or total))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ np.repeat(v, group, 0).astype(float)


def half_above(x: npt.NDArray[np.floating]) -> F64:
    """Returns the least numbers of float16 that are not below x."""
    near = x.astype(np.float16)
    return np.where(near < x, np.nextafter(near, np.float16(np.inf)), near).astype(float)


def read_prompt(cache: KVCache, tokens: Sequence[F32], stop: int | None = None) -> None:
    cache.prefill(*(x[:, :stop] for x in tokens))
    type(cache).finish_prefill([cache])


def attend_last(cache: KVCache, tokens: Sequence[F32], n: int) -> F32:
    """Returns the attention of the last n tokens at once, behind the others as a prompt."""
    read_prompt(cache, tokens, -n)
    return cache.attend(*(x[:, -n:] for x in tokens)).copy()


def read(cache: KVCache, tokens: Sequence[F32], first: int, stop: int) -> F32:
    """Returns the attention of these tokens at once."""
    return cache.attend(*(x[:, first:stop] for x in tokens)).copy()


def attend_singly(cache: KVCache, tokens: Sequence[F32], first: int = 0, stop: int | None = None) -> F32:
    """Returns the attention of these tokens, which come one by one."""
    span = range(first, tokens[0].shape[1] if stop is None else stop)
    return np.concatenate([cache.attend(*(x[:, i : i + 1] for x in tokens)).copy() for i in span], axis=1)


def relative(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> float:
    """Returns the norm of a's error in relation to b's norm."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
