"""Sliding layers that keep their window alone: their attention, bytes, rewinds, and whole models."""

from __future__ import annotations

import pathlib

import golden_cases
import numpy as np
import pytest
from cache_cases import attention, normal, read
from cuda_cases import OnDevice

from edgekv import Session
from edgekv.kernels import Kernels, numba_kernels, numpy_kernels
from edgekv.kernels.arrays import to_host
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import Geometry, KVCache, Workspace
from edgekv.kvcache.policies import RollingCache, rolling_tokens
from edgekv.models import architecture

H, G, D, CAPACITY = 4, 2, 32, 1500
TOKENS = Q, K, V = normal((H, G, D), CAPACITY, 3)


def layer(kv: str, window: int, kernels: Kernels, memory: object = None) -> KVCache:
    spec = CacheSpec.parse(kv)
    cache = spec.layer(Geometry(H, G, D, CAPACITY, sliding_window=window))
    cache.allocate(kernels, Workspace() if memory is None else Workspace(memory))
    return cache


def expected(first: int, stop: int, window: int) -> np.ndarray:
    return attention(Q[:, first:stop], K[:, :stop], V[:, :stop], window)


@pytest.mark.parametrize("backend", [numpy_kernels, lambda: numba_kernels(1)])
@pytest.mark.parametrize("window", [1, 12, 100, 300])
def test_equals_attention_over_the_window(window: int, backend: object) -> None:
    """A prompt, pieces and single tokens, several times round the ring."""
    cache = layer("dense:dtype=f32", window, backend())
    assert isinstance(cache, RollingCache)
    cache.prefill(Q[:, :700], K[:, :700], V[:, :700])
    for first, stop in ((700, 701), (701, 1000), (1000, 1001), (1001, 1002), (1002, CAPACITY)):
        np.testing.assert_allclose(read(cache, TOKENS, first, stop), expected(first, stop, window), atol=2e-5)
        assert cache.counters_valid()


def test_bytes_are_those_of_the_window() -> None:
    for kv in ("dense", "kivi2", "onebit"):
        spec, cache = CacheSpec.parse(kv), layer(kv, 100, numpy_kernels())
        assert cache.nbytes == cache.planned_bytes() == rolling_tokens(100) * G * D * 4
        assert cache.planned_bytes() < spec.scheme(Geometry(H, G, D, CAPACITY), spec.config).planned_bytes()
    assert not isinstance(layer("dense", 1200, numpy_kernels()), RollingCache)  # the ring would be the larger
    assert not isinstance(layer("kivi2", 700, numpy_kernels()), RollingCache)
    assert not isinstance(layer("h2o", 100, numpy_kernels()), RollingCache)


@pytest.mark.parametrize("window", [12, 300])
def test_rewinds_within_what_is_kept(window: int) -> None:
    cache, more = layer("dense:dtype=f32", window, numba_kernels(1)), rolling_tokens(window) - window
    cache.prefill(Q[:, :1200], K[:, :1200], V[:, :1200])
    assert cache.truncate(1200 - more) == 1200 - more
    np.testing.assert_allclose(
        read(cache, TOKENS, 1200 - more, 1250), expected(1200 - more, 1250, window), atol=2e-5
    )
    assert cache.truncate(1250 - more) == 1250 - more
    assert cache.truncate(1250 - more - 1) == 0
    np.testing.assert_allclose(read(cache, TOKENS, 0, 40), expected(0, 40, window), atol=2e-5)
    assert cache.truncate(3) == 3


def test_counters_of_a_file_may_lie() -> None:
    def taken(n_seen: int, n_lost: int) -> bool:
        cache = layer("dense", 100, numpy_kernels())
        cache.n_seen, cache.n_lost = n_seen, n_lost
        return cache.counters_valid()

    lost = 1000 - rolling_tokens(100)
    assert taken(1000, lost)
    assert taken(990, lost)
    assert taken(50, 0)
    assert not any([taken(1000, lost - 1), taken(lost + 99, lost), taken(CAPACITY + 1, 1300), taken(1000, 901)])


def test_on_the_device(device: OnDevice) -> None:
    cache, up = layer("dense", 100, device.kernels, device.driver), device.up
    cache.prefill(up(Q[:, :700]), up(K[:, :700]), up(V[:, :700]))
    for t in range(700, 740):
        out = to_host(cache.attend(*(up(x[:, t : t + 1]) for x in (Q, K, V))))
        np.testing.assert_allclose(out, expected(t, t + 1, 100), atol=5e-3)


LONG = golden_cases.GEMMA3 | {"max_position_embeddings": 512, "sliding_window": 40, "sliding_window_pattern": 2}


@pytest.fixture
def gemma(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setitem(golden_cases.CASES, "long", LONG)
    return golden_cases.write_checkpoint("long", tmp_path / "model")


def test_a_model_says_the_same_and_takes_less(gemma: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(0, golden_cases.VOCAB, 400).tolist()
    results, sizes = [], []
    for rolls in (True, False):
        if not rolls:
            monkeypatch.setattr("edgekv.kvcache.policies.Dense.window_codecs", classmethod(lambda *_: None))
        session = Session.load(gemma, kv="dense:dtype=f32", weights="f32", ctx=512)
        parts = [session.logits(tokens[:300]), session.logits(tokens[300:350])]
        session.rewind(340)
        parts.append(session.logits(tokens[340:]))
        session.rewind(100)  # beyond the ring: computed anew
        parts.append(session.logits(tokens[100:]))
        results.append(np.concatenate(parts))
        sizes.append(session.plan.cache_bytes)
        assert sum(cache.nbytes for cache in session.caches) == sizes[-1]
    np.testing.assert_allclose(results[0], results[1], atol=2e-4, rtol=0)
    assert architecture(LONG).config.layer_windows == (40, None, 40, None)
    assert sizes[0] == sizes[1] // 2 + sizes[1] // 1024 * rolling_tokens(40)
