"""The contract of every KV scheme, on both kernel backends."""

import dataclasses
from typing import Any

import cache_cases
import numpy as np
import pytest
from cache_cases import BACKENDS, Heads, attend_last, attend_singly, attention, draw, read_prompt, relative
from helpers import SCHEMES

from edgekv.errors import CacheError
from edgekv.kernels import numba_kernels
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import Geometry, KVCache, Workspace
from edgekv.kvcache.policies import SinkWindowCache, rolling_tokens
from edgekv.kvcache.recurrent import RecurrentState
from edgekv.models.config import ShortConv
from edgekv.server.engine import cache_bytes

SHAPES = {"mha": (3, 3, 16), "gqa": (8, 2, 64), "mqa": (5, 1, 24)}  # query heads, KV heads, head_dim
TOKENS = 330  # several blocks of 64, and a rest
EXACT = (2e-3, 2e-3)
LOSSY = {"h1b": (0.97, 0.25), "sign_keys": (0.96, 2e-3), "int4": (0.22, 0.37)}
"""1.3 times the largest error of 24 draws: of 40 tokens in relation to the exact result, and of a first token."""
EACH_SHAPE = pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES.keys())


def make(
    name: str, heads: Heads, backend: str = "numba", capacity: int = TOKENS, window: int | None = None
) -> KVCache:
    return cache_cases.make(name, heads, capacity, backend, layer=2, n_layers=4, sliding_window=window)


def fill(cache: KVCache, heads: Heads, n: int, seed: int = 0) -> None:
    read_prompt(cache, draw(heads, n, seed))


@EACH_SHAPE
@pytest.mark.parametrize("name", SCHEMES)
def test_numba_equals_its_numpy_specification(name: str, heads: Heads) -> None:
    outputs = {}
    for backend in BACKENDS:
        cache = make(name, heads, backend)
        fill(cache, heads, 301)
        steps = [cache.attend(*draw(heads, 1, seed)).copy() for seed in range(1, 8)]
        outputs[backend] = np.concatenate([*steps, cache.attend(*draw(heads, 13, 9)).copy()], axis=1)
    assert relative(outputs["numba"], outputs["numpy"]) < 2e-3
    assert np.isfinite(outputs["numba"]).all()


@EACH_SHAPE
@pytest.mark.parametrize("name", SCHEMES)
def test_many_tokens_at_once_equal_single_steps(name: str, heads: Heads) -> None:
    tokens, (whole, single) = draw(heads, 200, 5), (make(name, heads) for _ in range(2))
    for each in (whole, single):
        fill(each, heads, 100)
    assert relative(whole.attend(*tokens).copy(), attend_singly(single, tokens)) < 2e-3
    assert whole.n_seen == single.n_seen == 300
    after = [cache.attend(*draw(heads, 1, 6)).copy() for cache in (whole, single)]
    assert relative(*after) < 2e-3


@pytest.mark.parametrize("name", SCHEMES)
def test_a_short_context_is_close_to_exact(name: str) -> None:
    """Fewer tokens than any window or budget: only the storage's own rounding is left.

    Schemes without a window must at least be nearer than the plain mean of the values.
    """
    heads = SHAPES["gqa"]
    q, k, v = draw(heads, 40, offset=0)
    cache = make(name, heads)
    got = cache.attend(q, k, v)
    assert got.shape == q.shape
    expected, mean = attention(q, k, v), attention(0 * q, k, v)
    assert relative(got, expected) < min(LOSSY.get(name, EXACT)[0], relative(mean, expected))


@pytest.mark.parametrize("window", [None, 50])
@EACH_SHAPE
def test_dense_is_exact(heads: Heads, window: int | None) -> None:
    q, k, v = draw(heads, TOKENS)
    got = attend_last(make("dense:dtype=f32", heads, window=window), (q, k, v), 30)
    assert relative(got, attention(q[:, -30:], k, v, window)) < 1e-5


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_means_smaller_and_different(name: str) -> None:
    """No scheme silently does nothing: beyond its windows it holds fewer bytes or reads fewer, and it shows."""
    heads, n = SHAPES["gqa"], 3000
    dense, cache = (make(kv, heads, capacity=n) for kv in ("dense", name))
    cache.mark_images([(50, n - 500)])  # for the scheme that compresses images alone
    for each in (dense, cache):
        fill(each, heads, n - 10)
    assert cache.bytes_read() > 0
    if name == "dense":
        return
    assert cache.nbytes < dense.nbytes or cache.bytes_read() < 0.7 * dense.bytes_read()
    q, k, v = draw(heads, 4, 3)
    assert relative(cache.attend(q, k, v), dense.attend(q, k, v)) > 1e-4


@pytest.mark.parametrize("name", SCHEMES)
def test_the_context_can_be_filled_to_the_last_token(name: str) -> None:
    heads = SHAPES["mha"]
    cache = make(name, heads, capacity=200)
    fill(cache, heads, 150)
    cache.attend(*draw(heads, 50, 1))
    assert cache.n_seen == 200
    with pytest.raises(CacheError, match=r"^ctx="):
        cache.attend(*draw(heads, 1, 2))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("capacity", [1, 2, 63, 64, 65])
def test_tiny_contexts(name: str, capacity: int) -> None:
    heads = SHAPES["mha"]
    cache = make(name, heads, capacity=capacity)
    q, k, v = draw(heads, capacity)
    got = cache.attend(q, k, v)
    assert np.isfinite(got).all()
    first = LOSSY.get(name, EXACT)[1]
    np.testing.assert_allclose(got[:, 0], v[:, 0], rtol=0, atol=first)  # it sees itself alone


@pytest.mark.parametrize("name", SCHEMES)
def test_many_tokens_are_stored_without_a_copy_of_the_arrays(name: str) -> None:
    """Arrays stay where they are: the context is bounded at allocation, whatever arrives."""
    cache = make(name, (1, 1, 8), capacity=200_000)
    chunk = np.random.default_rng(0).standard_normal((1, 20_000, 8)).astype(np.float32)
    places = {key: array.ctypes.data for key, array in cache.arrays.items()}
    for _ in range(10):
        cache.append_prefill(chunk, chunk)
    assert cache.n_seen == 200_000
    assert all(places.get(key) in (None, array.ctypes.data) for key, array in cache.arrays.items())


@pytest.mark.parametrize("name", [name for name in SCHEMES if issubclass(SCHEMES[name], SinkWindowCache)])
def test_the_latest_tokens_stay_exact_while_blocks_are_packed(name: str) -> None:
    """Token by token over several blocks: the oldest block leaves the exact part, and that one alone."""
    heads = SHAPES["gqa"]
    cache = make(name, heads)
    assert isinstance(cache, SinkWindowCache)
    q, k, v = draw(heads, TOKENS)
    packed, (sink, least, block) = set(), dataclasses.astuple(cache.sizes)
    for i in range(TOKENS):
        cache.attend(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1])
        packed.add(cache.n_packed)
        latest = slice(i + 1 - cache.n_recent, i + 1)
        assert latest.start == cache.n_sink + cache.n_packed
        assert min(least, i + 1 - cache.n_sink) <= cache.n_recent < least + block
        for part, x in (("recent_key", k), ("recent_value", v)):
            held = cache.stored()[part].decode(0, cache.n_recent)
            np.testing.assert_array_equal(held, x[:, latest].astype(np.float16))
    assert len(packed) > 2
    border = sink + least + block
    for n in (border - 1, border, 330):  # a prompt leaves as many exact as tokens that come one by one
        cache = make(name, heads)
        cache.prefill(q[:, :n], k[:, :n], v[:, :n])
        assert cache.n_recent == n - sink - cache.n_packed
        assert least <= cache.n_recent < least + block
        held = cache.stored()["recent_key"].decode(0, cache.n_recent)
        np.testing.assert_array_equal(held, k[:, n - cache.n_recent : n].astype(np.float16))


LAYERS = {"all tokens": {}, "a window": {"sliding_window": 60}, "a soft bound": {"score_cap": 20.0}}
SHARES = ("snapkv:budget=0.4,interval=32", "streaming:budget=0.05", "mikv:budget=0.1", "h2o:budget=0.25")


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("name", [*SCHEMES, *SHARES])
def test_n_tokens_take_what_is_planned_for_them(name: str, layer: dict[str, Any]) -> None:
    """As much as a cache with room for no more; at most that where texts decide (`kvcomp`)."""
    heads = SHAPES["gqa"]
    spec, geometry = CacheSpec.parse(name), Geometry(*heads, TOKENS, 2, 4, **layer)
    cache = spec.layer(geometry)
    for n in (90, 200, TOKENS):
        whole, exact = spec.layer(geometry), cache.cut(n)
        for each in (whole, exact):
            each.allocate(numba_kernels(None), Workspace())
            each.mark_images([(3, 80)])
            fill(each, heads, n)
        planned = whole.planned_bytes(n)
        assert exact.nbytes == planned or (name == "kvcomp" and exact.nbytes < planned)
        assert planned <= whole.planned_bytes()
        assert sum(array.nbytes for array in whole.arrays.values()) == whole.nbytes <= whole.planned_bytes()
        assert cache_bytes([whole])["kv_cache_bytes"] <= min(whole.nbytes, planned)
        if name.startswith("visual"):
            assert planned < (n - 32) * heads[1] * heads[2] * 4
    kept = rolling_tokens(layer["sliding_window"]) if "sliding_window" in layer else TOKENS
    assert cache_bytes([whole])["kv_cache_f16_bytes"] == kept * heads[1] * heads[2] * 4


def test_a_state_takes_the_same_whatever_its_length() -> None:
    state = RecurrentState(ShortConv(8, 3, bias=False), 100, 2)
    assert state.planned_bytes(1) == state.planned_bytes(90) == state.planned_bytes()
    assert set(cache_bytes([state]).values()) == {0}  # of KV caches alone
