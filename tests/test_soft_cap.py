"""Scores bounded softly (Gemma 2): through the backends' steps, against the formula and plain attention."""

from __future__ import annotations

import pathlib

import golden_cases
import numpy as np
import pytest

from edgekv import Session
from edgekv.errors import CacheError
from edgekv.kernels import Kernels, numba_kernels, numpy_kernels
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.base import KVCache
from edgekv.kvcache.choice import choose
from edgekv.kvcache.geometry import Geometry, Workspace
from edgekv.models import architecture

H, G, D, N = 4, 2, 32, 300
CAPPED = ["dense", "dense:dtype=f32", "dense:dtype=q8", "int4", "kivi2"]


def attended(kv: str, kernels: Kernels, cap: float | None, window: int | None = None) -> np.ndarray:
    """Attention of the last of N random tokens."""
    rng = np.random.default_rng(5)
    q, k, v = (3 * rng.standard_normal((heads, N, D)).astype(np.float32) for heads in (H, G, G))
    spec = CacheSpec.parse(kv)
    cache: KVCache = spec.scheme(Geometry(H, G, D, N, sliding_window=window, score_cap=cap), spec.knobs)
    cache.allocate(kernels, Workspace())
    cache.prefill(q[:, :-7], k[:, :-7], v[:, :-7])
    return np.array(cache.attend(q[:, -7:], k[:, -7:], v[:, -7:]))


@pytest.mark.parametrize("window", [None, 60])
def test_equals_the_formula(window: int | None) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (3 * rng.standard_normal((heads, N, D)) for heads in (H, G, G))
    q, k, v = (x.astype(np.float32).astype(np.float64) for x in (q, k, v))
    s = 20 * np.tanh(q[:, -7:] @ np.repeat(k, 2, axis=0).transpose(0, 2, 1) / 20)
    last, at = np.arange(N - 7, N)[:, None], np.arange(N)
    s = np.where((at <= last) & (at > last - (window or N)), s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    expected = p / p.sum(axis=-1, keepdims=True) @ np.repeat(v, 2, axis=0)
    for kernels in (numpy_kernels(), numba_kernels(1)):
        np.testing.assert_allclose(attended("dense:dtype=f32", kernels, 20.0, window), expected, atol=2e-5)


@pytest.mark.parametrize("kv", CAPPED)
def test_every_scheme_that_says_so(kv: str) -> None:
    """The backends agree, a bound far away changes nothing, and a near one does."""
    cpu, reference = numba_kernels(1), numpy_kernels()
    capped = attended(kv, cpu, 20.0, 150)
    np.testing.assert_allclose(capped, attended(kv, reference, 20.0, 150), atol=2e-4)
    plain = attended(kv, reference, None)
    np.testing.assert_allclose(attended(kv, cpu, 1e6), plain, atol=5e-3)
    assert np.abs(attended(kv, cpu, 20.0) - plain).max() > 0.1


def test_other_schemes_are_refused(tmp_path: pathlib.Path) -> None:
    folder = golden_cases.write_checkpoint("gemma2", tmp_path / "model")
    with pytest.raises(CacheError) as error:
        Session.load(folder, kv="bitplane", weights="f32")
    assert error.value.field == "kv"
    assert list(error.value.accepted or ()) == ["dense", "int4", "kivi2"]
    config = architecture(golden_cases.CASES["gemma2"]).config
    spec, _ = choose(config, 64, CacheSpec.parse("dense").planned_bytes(config, 64) // 2 + 9999)
    assert spec.suits(config)
