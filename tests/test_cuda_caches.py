"""KV schemes on CUDA kernels: the same caches, handed another backend, against the NumPy one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_cases import ON_CUDA, OnDevice
from helpers import SCHEMES
from kernel_cases import assert_close

from edgekv.kernels import numpy_kernels
from edgekv.kernels.arrays import to_host
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import Geometry, KVCache, Workspace

SHAPES = {"mha": (2, 2, 64), "gqa": (6, 2, 24)}  # query heads, KV heads, head_dim
CAPACITY = 150
# Small windows and budgets, so that few tokens reach every part of a scheme.
SMALL = {
    "kivi2": "kivi2:residual_length=32",
    "onebit": "onebit:residual_length=16",
    "kvcomp": "kvcomp:residual_length=16,block=32",
    "fier": "fier:k=32",
    "quest": "quest:k=32",
}
TOLERANCE = 2e-3  # that of the contract test of all schemes
VARIANTS = [
    *(SMALL.get(name, name) for name in ON_CUDA),
    "dense:dtype=f32",
    "dense:dtype=q8",
    "onebit:residual_length=16,v_bits=3",
]


def make(text: str, shape: str, kernels: Any, workspace: Workspace) -> KVCache:
    spec = CacheSpec.parse(text)
    cache = spec.scheme(Geometry(*SHAPES[shape], CAPACITY, layer=2, n_layers=4), spec.config)
    cache.allocate(kernels, workspace)
    return cache


def draw(shape: str, n: int, seed: int) -> list[np.ndarray]:
    """Queries, keys and values, with an offset of all keys."""
    n_heads, groups, d = SHAPES[shape]
    rng = np.random.default_rng(seed)
    offset = 3 * np.random.default_rng(1).standard_normal((groups, 1, d))
    parts = (
        rng.standard_normal((n_heads, n, d)) * 2 / np.sqrt(d),
        rng.standard_normal((groups, n, d)) + offset,
        rng.standard_normal((groups, n, d)),
    )
    return [x.astype(np.float32) for x in parts]


def converse(cache: KVCache, up: Any, shape: str) -> np.ndarray:
    """A prompt, single tokens, several at once, a rewind, one more: all that attends."""
    cache.prefill(*map(up, draw(shape, 100, 0)))
    type(cache).finish_prefill([cache])
    out = [to_host(cache.attend(*map(up, draw(shape, 1, seed)))).copy() for seed in range(1, 4)]
    out.append(to_host(cache.attend(*map(up, draw(shape, 9, 4)))).copy())
    cache.truncate(105)
    out.append(to_host(cache.attend(*map(up, draw(shape, 1, 5)))).copy())
    return np.concatenate(out, axis=1)


@pytest.mark.parametrize(("text", "shape"), [(text, list(SHAPES)[i % 2]) for i, text in enumerate(VARIANTS)])
def test_caches_equal_the_numpy_ones(device: OnDevice, text: str, shape: str) -> None:
    here = make(text, shape, numpy_kernels(), Workspace())
    there = make(text, shape, device.kernels, Workspace(device.driver))
    expected, actual = converse(here, lambda x: x, shape), converse(there, device.up, shape)
    assert np.linalg.norm(actual - expected) < TOLERANCE * np.linalg.norm(expected)
    assert there.n_seen == here.n_seen
    assert there.nbytes == here.nbytes
    for name, array in here.arrays.items():
        np.testing.assert_array_equal(to_host(there.arrays[name]), array, err_msg=name)
    assert here.truncate(0) == there.truncate(0) == 0
    again = there.attend(*map(device.up, draw(shape, 40, 6)))
    assert_close(to_host(again), here.attend(*draw(shape, 40, 6)), TOLERANCE)


@pytest.mark.parametrize("text", ["dense", "h1b", "kivi2:residual_length=32", "onebit:residual_length=16"])
def test_attention_of_one_token_is_one_launch(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the codecs allow it the score buffer is never made."""
    host = OnDevice.open("host")
    cache = make(text, "mha", host.kernels, Workspace(host.driver))
    cache.prefill(*map(host.up, draw("mha", 100, 0)))
    launched = []
    monkeypatch.setattr(host.driver, "launch", lambda *a: launched.append(a[0].kernel))
    cache.attend(*map(host.up, draw("mha", 1, 1)))
    assert launched.count("attend") == 1
    assert not {"scores", "values", "softmax"} & set(launched)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_steady_step_changes_counters_alone(name: str) -> None:
    """`advance` changes them as appending does, until `flush` is due."""
    cache = make(SMALL.get(name, name), "gqa", numpy_kernels(), Workspace())
    cache.attend(*draw("gqa", 70, 0))
    for seed in range(CAPACITY - 70):
        if not cache.is_static():
            continue
        before = cache.state().counters
        cache.advance(1)
        expected, is_due = cache.state().counters, cache.needs_flush()
        cache.advance(-1)
        assert cache.state().counters == before
        cache.attend(*draw("gqa", 1, seed))
        assert (cache.state().counters != expected) == is_due
        assert not cache.needs_flush()
    assert not cache.is_static()
