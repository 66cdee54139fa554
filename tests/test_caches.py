"""The contract of every KV scheme, on both kernel backends: whatever it keeps, it keeps these promises."""

import numpy as np
import pytest

from edgekv import CACHES
from edgekv.kernels import numba_kernels, numpy_kernels
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.base import Geometry, KVCache, Workspace, rewind

BACKENDS = {"numpy": numpy_kernels, "numba": numba_kernels}
SHAPES = {"mha": (3, 3, 16), "gqa": (8, 2, 64), "mqa": (5, 1, 24)}  # query heads, KV heads, head_dim
TOKENS = 330  # several blocks of 64, and a rest


def make(name: str, shape: str, backend: str = "numba", capacity: int = TOKENS, **geometry: object) -> KVCache:
    n_heads, n_kv_heads, head_dim = SHAPES[shape]
    layer = Geometry(n_heads, n_kv_heads, head_dim, capacity, layer=2, n_layers=4, **geometry)
    cache = CacheSpec.parse(name).scheme(layer, CacheSpec.parse(name).knobs)
    cache.allocate(BACKENDS[backend](None), Workspace())
    return cache


def draw(shape: str, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys, values with what real ones have: a common key offset, and a few channels that stand out."""
    n_heads, n_kv_heads, head_dim = SHAPES[shape]
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((n_heads, n, head_dim)).astype(np.float32) / np.float32(np.sqrt(head_dim)) * 2
    k = rng.standard_normal((n_kv_heads, n, head_dim)).astype(np.float32)
    k += 3 * rng.standard_normal((n_kv_heads, 1, head_dim)).astype(np.float32)
    v = rng.standard_normal((n_kv_heads, n, head_dim)).astype(np.float32)
    return q, k, v


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None = None) -> np.ndarray:
    """Causal attention in float64; the last q.shape[1] of the keys are the queries' own tokens."""
    group, n, total = q.shape[0] // k.shape[0], q.shape[1], k.shape[1]
    scores = q.astype(float) @ np.repeat(k, group, 0).astype(float).transpose(0, 2, 1)
    position = np.arange(total - n, total)[:, None]
    hidden = np.arange(total) > position
    if window is not None:
        hidden |= np.arange(total) <= position - window
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ np.repeat(v, group, 0).astype(float)


def fill(cache: KVCache, shape: str, n: int, seed: int = 0) -> None:
    q, k, v = draw(shape, n, seed)
    cache.prefill(q, k, v)
    type(cache).settle([cache])


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CACHES)
def test_numba_equals_its_numpy_specification(name: str, shape: str) -> None:
    outputs = {}
    for backend in BACKENDS:
        cache = make(name, shape, backend)
        fill(cache, shape, 301)
        steps = [cache.attend(*draw(shape, 1, seed)).copy() for seed in range(1, 8)]
        outputs[backend] = np.concatenate([*steps, cache.attend(*draw(shape, 13, 9)).copy()], axis=1)
    assert relative(outputs["numba"], outputs["numpy"]) < 2e-3
    assert np.isfinite(outputs["numba"]).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CACHES)
def test_many_tokens_at_once_equal_single_steps(name: str, shape: str) -> None:
    q, k, v = draw(shape, 200, 5)
    whole, single = make(name, shape), make(name, shape)
    fill(whole, shape, 100)
    fill(single, shape, 100)
    together = whole.attend(q, k, v).copy()
    apart = [single.attend(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1]).copy() for i in range(200)]
    assert relative(together, np.concatenate(apart, axis=1)) < 2e-3
    assert whole.n_seen == single.n_seen == 300
    after = [cache.attend(*draw(shape, 1, 6)).copy() for cache in (whole, single)]
    assert relative(*after) < 2e-3


@pytest.mark.parametrize("name", CACHES)
def test_a_short_context_is_close_to_exact(name: str) -> None:
    """Fewer tokens than any window or budget: only the storage's own rounding is left."""
    shape = "gqa"
    q, k, v = draw(shape, 40)
    cache = make(name, shape)
    got = cache.attend(q, k, v)
    assert got.shape == q.shape
    bound = 2e-3 if cache.exact_when_short else 1.0
    assert relative(got, exact(q, k, v)) < bound


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_is_exact(shape: str, window: int | None) -> None:
    q, k, v = draw(shape, TOKENS)
    cache = make("dense:dtype=f32", shape, window=window)
    cache.prefill(q[:, :300], k[:, :300], v[:, :300])
    got = cache.attend(q[:, 300:], k[:, 300:], v[:, 300:])
    assert relative(got, exact(q[:, 300:], k, v, window)) < 1e-5


@pytest.mark.parametrize("name", CACHES)
def test_compressed_means_smaller_and_different(name: str) -> None:
    """No scheme silently does nothing: beyond its windows it holds fewer bytes or reads fewer, and it shows."""
    shape, n = "gqa", 3000
    dense, cache = (make(kv, shape, capacity=n) for kv in ("dense", name))
    cache.mark([(50, n - 500)])  # for the scheme that compresses images alone
    for each in (dense, cache):
        fill(each, shape, n - 10)
    assert cache.bytes_read() > 0
    if name == "dense":
        return
    assert cache.nbytes < dense.nbytes or cache.bytes_read() < 0.7 * dense.bytes_read()
    q, k, v = draw(shape, 4, 3)
    assert relative(cache.attend(q, k, v), dense.attend(q, k, v)) > 1e-4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CACHES)
def test_bytes_are_the_arrays_bytes_and_the_plan(name: str, shape: str) -> None:
    cache = make(name, shape)
    assert cache.nbytes == sum(array.nbytes for array in cache.arrays.values()) > 0
    assert cache.nbytes <= cache.planned_bytes
    fill(cache, shape, 250)
    assert cache.nbytes == sum(array.nbytes for array in cache.arrays.values())
    assert cache.nbytes <= cache.planned_bytes


@pytest.mark.parametrize("name", CACHES)
def test_rewinding_and_computing_again_gives_the_same(name: str) -> None:
    """`truncate` says how much it kept; fed the rest again, the cache answers as if nothing had happened."""
    shape = "gqa"
    q, k, v = draw(shape, 280)
    straight, rewound = make(name, shape), make(name, shape)
    for cache in (straight, rewound):
        cache.attend(q[:, :250], k[:, :250], v[:, :250])
    rewound.attend(q[:, 250:], k[:, 250:], v[:, 250:])
    kept = rewind([rewound], 250)
    assert kept == rewound.n_seen <= 250
    if kept < 250:
        rewound.attend(q[:, kept:250], k[:, kept:250], v[:, kept:250])
    again = [cache.attend(q[:, 250:260], k[:, 250:260], v[:, 250:260]).copy() for cache in (rewound, straight)]
    assert relative(*again) < 2e-3
    assert rewind([rewound], 0) == 0
    fresh = make(name, shape)
    first = [cache.attend(q[:, :90], k[:, :90], v[:, :90]).copy() for cache in (rewound, fresh)]
    assert relative(*first) < 2e-3


@pytest.mark.parametrize("name", CACHES)
def test_the_context_can_be_filled_to_the_last_token(name: str) -> None:
    from edgekv.errors import CacheError

    shape = "mha"
    cache = make(name, shape, capacity=200)
    fill(cache, shape, 150)
    cache.attend(*draw(shape, 50, 1))
    assert cache.n_seen == 200
    with pytest.raises(CacheError, match="raise --ctx"):
        cache.attend(*draw(shape, 1, 2))


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("capacity", [1, 2, 63, 64, 65])
def test_tiny_contexts(name: str, capacity: int) -> None:
    shape = "mha"
    cache = make(name, shape, capacity=capacity)
    q, k, v = draw(shape, capacity)
    got = cache.attend(q, k, v)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[:, 0], v[:, 0], atol=0.7)  # the first token sees itself alone


@pytest.mark.parametrize("name", CACHES)
def test_a_million_tokens_without_a_copy_per_token(name: str) -> None:
    """Arrays stay where they are: the context is bounded at allocation, whatever arrives."""
    n_heads, n_kv_heads, head_dim = 1, 1, 8
    layer = Geometry(n_heads, n_kv_heads, head_dim, 1_000_000, layer=2, n_layers=4)
    spec = CacheSpec.parse(name)
    cache = spec.scheme(layer, spec.knobs)
    cache.allocate(numba_kernels(None), Workspace())
    rng = np.random.default_rng(0)
    chunk = rng.standard_normal((1, 50_000, head_dim)).astype(np.float32)
    places = {key: array.ctypes.data for key, array in cache.arrays.items()}
    for _ in range(20):
        cache.extend(chunk, chunk)
    assert cache.n_seen == 1_000_000
    kept = {key: cache.arrays[key].ctypes.data for key in places if key in cache.arrays}
    assert all(places[key] == place for key, place in kept.items())
