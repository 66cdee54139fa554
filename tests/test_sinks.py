"""Attention sinks in every KV scheme: a score of each head that belongs to no token."""

from __future__ import annotations

import pathlib

import cache_cases
import golden_cases
import numpy as np
import pytest
from helpers import SCHEMES

from edgekv.engine.loading import find_device
from edgekv.engine.model import Model
from edgekv.kvcache import CacheSpec

HEADS, PROMPT = (4, 2, 128), 200


def attended(kv: str, backend: str, sinks: np.ndarray | None) -> np.ndarray:
    """A token's attention behind a prompt, then that of three at once."""
    cache = cache_cases.make(kv, HEADS, 256, backend)
    q, k, v = cache_cases.draw(HEADS, PROMPT + 4, offset=0)
    cache.prefill(q[:, :PROMPT], k[:, :PROMPT], v[:, :PROMPT])
    type(cache).finish_prefill([cache])
    parts = [
        cache.attend(*(np.ascontiguousarray(x[:, a:b]) for x in (q, k, v)), sinks).copy()
        for a, b in ((PROMPT, PROMPT + 1), (PROMPT + 1, PROMPT + 4))
    ]
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize("kv", SCHEMES)
def test_a_sink_takes_its_share(kv: str, backend: str) -> None:
    """One of -inf takes nothing, a very large one everything, and one between part of each head's."""
    plain = attended(kv, backend, None)
    np.testing.assert_array_equal(attended(kv, backend, np.full(4, -np.inf, np.float32)), plain)
    assert np.abs(attended(kv, backend, np.full(4, 80, np.float32))).max() < 1e-6 * np.abs(plain).max()
    first = attended(kv, backend, np.array([-np.inf, 6, -np.inf, 6], np.float32))[:, 0]
    np.testing.assert_allclose(first[[0, 2]], plain[[0, 2], 0], rtol=0, atol=1e-6)
    for head in (1, 3):
        share = (first[head] @ plain[head, 0]) / (plain[head, 0] @ plain[head, 0])
        assert 0.05 < share < 0.95, share
        np.testing.assert_allclose(first[head], share * plain[head, 0], rtol=0, atol=0.05 * np.abs(plain).max())


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_prompts_that_are_read_together_see_the_sinks(device: str, tmp_path: pathlib.Path) -> None:
    model = Model.open(golden_cases.write_checkpoint("gpt-oss", tmp_path / "model"))
    decoder = find_device(device).decoder(model, model.weight_format("f32"), 48, 1, None)
    prompts = [decoder.embed(golden_cases.tokens("gpt-oss")[a : a + 12], 0) for a in (0, 12)]
    together, alone = decoder.read_together(np.concatenate(prompts), 12), []
    for x in prompts:
        caches = CacheSpec.parse("dense:dtype=f32").layers(model.config, 48)
        for cache in caches:
            cache.allocate(decoder.kernels, decoder.workspace)
        alone.append(decoder.prefill(x.copy(), caches))
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=0, atol=1e-4)
