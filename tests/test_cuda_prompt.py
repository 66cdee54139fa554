"""Prompts in half precision on the CUDA path: attention in tiles, products of halves, whole models."""

from __future__ import annotations

import pathlib
from typing import Any

import golden_cases
import numpy as np
import pytest
from cuda_cases import OnDevice

from edgekv.engine import cuda as cuda_decoder
from edgekv.engine.cuda import CudaBackend
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import find_device
from edgekv.engine.model import Model
from edgekv.kernels.arrays import to_host
from edgekv.kernels.cuda.kernels import Halves, padded_width
from edgekv.kvcache import CacheSpec
from edgekv.weights.cuda import CudaOps, DeviceWeights

CAPACITY = 64
LOGIT_ERROR = 1e-2  # of the largest logit; measured: 6.5e-3 of gemma2, 3.1e-3 of the others
HALF_ERROR = 2e-3  # of attention over values of size 1; measured: 1.1e-3


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """Attention in float64 of the last n of m tokens: q (H, n, D), k and v (G, m, D) -> (n, H * D)."""
    (n_heads, n, d), (n_kv_heads, m, _) = q.shape, k.shape
    k, v = (np.repeat(x.astype(np.float64), n_heads // n_kv_heads, axis=0) for x in (k, v))
    at, token = np.arange(m - n, m)[:, None], np.arange(m)
    seen = (token <= at) & (token > at - (window or m))
    s = np.where(seen, q.astype(np.float64) @ k.transpose(0, 2, 1), -np.inf)
    p = np.exp(s - s.max(axis=2, keepdims=True))
    out = (p / p.sum(axis=2, keepdims=True)) @ v
    return out.transpose(1, 0, 2).reshape(n, n_heads * d)


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "n", "earlier", "head_dim", "window"),
    [
        (2, 1, 130, 0, 64, None),
        (1, 1, 70, 61, 128, None),
        (2, 2, 100, 0, 24, 20),
        (1, 1, 40, 100, 80, 33),
        (2, 1, 35, 0, 256, None),
        (1, 1, 9, 30, 7, 1),
    ],
)
def test_attention_in_tiles(
    device: OnDevice, n_heads: int, n_kv_heads: int, n: int, earlier: int, head_dim: int, window: int | None
) -> None:
    """Borders of tiles, grouped queries, windows, heads that are padded, queries that follow earlier tokens."""
    rng, width, spare = np.random.default_rng(0), padded_width(head_dim), 5
    m = earlier + n
    q = (rng.standard_normal((n_heads, n, head_dim)) * 2 / np.sqrt(head_dim)).astype(np.float16)
    k, v = (rng.standard_normal((n_kv_heads, m, head_dim)).astype(np.float16) for _ in range(2))
    padded = [np.pad(x, ((0, 0), (0, 0), (0, width - head_dim))) for x in (q, k, v)]
    padded[1:] = [np.pad(x, ((0, 0), (0, spare), (0, 0)), constant_values=np.nan) for x in padded[1:]]
    out = device.driver.empty((n, n_heads * head_dim), np.float16)
    device.kernels.attend_prompt(*map(device.up, padded), earlier, window, out)
    np.testing.assert_allclose(to_host(out).astype(np.float32), exact(q, k, v, window), atol=HALF_ERROR, rtol=0)


def test_scores_of_any_size(device: OnDevice) -> None:
    """A softmax that is one token, and one whose largest score comes last."""
    rng = np.random.default_rng(1)
    q = np.full((1, 80, 16), 16, np.float16)
    k = np.repeat(np.linspace(-40, 40, 80, dtype=np.float16)[None, :, None], 16, axis=2)
    v = rng.standard_normal((1, 80, 16)).astype(np.float16)
    for keys in (k, k[:, ::-1].copy()):
        out = device.driver.empty((80, 16), np.float16)
        device.kernels.attend_prompt(device.up(q), device.up(keys), device.up(v), 0, None, out)
        np.testing.assert_allclose(to_host(out).astype(np.float32), exact(q, keys, v, None), atol=HALF_ERROR)


def test_queries_keys_and_values_also_in_halves(device: OnDevice) -> None:
    rng, (n, h, g, d) = np.random.default_rng(0), (5, 4, 2, 12)
    qkv, cos, sin = (
        device.up(rng.standard_normal((n, size), dtype=np.float32)) for size in ((h + 2 * g) * d, d // 2, d // 2)
    )
    norm = device.up(rng.standard_normal(d, dtype=np.float32))
    plain = [device.driver.empty((heads, n, d), np.float32) for heads in (h, g, g)]
    device.kernels.split_rope(qkv, cos, sin, *plain, 0.5, norm, norm, 1e-5)
    half_q = device.driver.empty((h, n, 16), np.float16)
    half_k, half_v = (device.driver.empty((g, n + 3, 16), np.float16) for _ in range(2))
    for keeps in (True, False):
        both = [device.driver.zeros((heads, n, d), np.float32) for heads in (h, g, g)]
        halves = Halves(half_q, half_k, half_v, 2)
        queries = both[0] if keeps else None
        device.kernels.split_rope(qkv, cos, sin, queries, *both[1:], 0.5, norm, norm, 1e-5, halves)
        for x, y in zip(plain[0 if keeps else 1 :], both[0 if keeps else 1 :], strict=True):
            np.testing.assert_array_equal(to_host(x), to_host(y))
        assert keeps or not to_host(both[0]).any()
    for x, y in zip(plain, (half_q, half_k[:, 2 : n + 2], half_v[:, 2 : n + 2]), strict=True):
        np.testing.assert_array_equal(to_host(y)[:, :, :d], to_host(x).astype(np.float16))
        assert not to_host(y)[:, :, d:].any()


@pytest.mark.parametrize("weights", ["int8", "int4-32", "f32"])
def test_linear_layers_in_halves(
    device: OnDevice, weights: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slab by slab, with biases, onto a residual; numbers beyond the largest half stay numbers."""
    model = Model.open(golden_cases.write_checkpoint("llama-biases", tmp_path / "model"))
    store = model.store(model.weight_format(weights))
    ops = CudaOps(DeviceWeights(store, device.driver, None), halves=True)
    monkeypatch.setattr(CudaOps, "_slab_rows", lambda *_: 20)  # several slabs, the last one shorter
    rng = np.random.default_rng(0)
    for name in ("0.qkv", "0.out", "0.down"):
        matrix, bias = store.matrix(name), store.bias(name)
        x = rng.standard_normal((11, matrix.shape[1]), dtype=np.float32)
        expected = x.astype(np.float16).astype(np.float32) @ matrix.astype(np.float16).astype(np.float32).T
        expected += 0 if bias is None else bias
        np.testing.assert_allclose(to_host(ops.linear(device.up(x), name)), expected, atol=2e-5)
        residual = rng.standard_normal(expected.shape, dtype=np.float32)
        summed = ops.add_linear(device.up(residual), device.up(x.astype(np.float16)), name)
        np.testing.assert_allclose(to_host(summed), residual + expected, atol=2e-5)
    huge = device.up(np.full((9, 64), 1e30, np.float32))
    assert np.isfinite(to_host(ops.linear(huge, "0.qkv"))).all()
    undefined = device.up(np.full((9, 64), np.nan, np.float32))
    assert np.isnan(to_host(ops.linear(undefined, "0.qkv"))).all()


@pytest.mark.parametrize(
    ("name", "text", "tiles"),
    [
        ("llama2-gqa", "dense:dtype=f32", False),
        ("llama-head-dim", "h1b", True),
        ("mistral", "onebit:residual_length=8", True),
        ("gpt2", "dense", True),
        ("olmo2", "dense", True),
        ("gemma2-options", "dense", True),
    ],
)
def test_logits_of_prompts_are_those_of_float32_within_a_halfs_error(
    device: OnDevice, monkeypatch: pytest.MonkeyPatch, name: str, text: str, tiles: bool, tmp_path: pathlib.Path
) -> None:
    """In chunks, one of them of few tokens; without tiles (sm_70, sm_72) attention is in float32."""
    model = Model.open(golden_cases.write_checkpoint(name, tmp_path / "model"))
    form, tokens = model.weight_format("int8"), golden_cases.tokens(name)[:43]
    monkeypatch.setattr(cuda_decoder, "chunk_tokens", lambda *_: 20)
    monkeypatch.setattr(device.driver, "has_matrix_tiles", tiles)
    store = DeviceWeights(model.store(form), device.driver, None)
    half = Decoder(CudaBackend(store, device.driver, 1), CAPACITY)
    assert (half.backend._half is not None) == (tiles and name != "gemma2-options")
    logits = []
    for each in (find_device("numpy").decoder(model, form, CAPACITY, 1, None), half):
        caches: list[Any] = CacheSpec.parse(text).layers(each.config, CAPACITY)
        for cache in caches:
            cache.allocate(each.kernels, each.workspace)
        x = each.prefill(each.embed(tokens, 0), caches)
        parts = [x]
        if text.startswith("dense"):  # signs of keys near 0 may differ
            parts.append(each.prefill(each.embed(tokens[:9] * 2, len(tokens)), caches))  # goes through the caches
        logits.append(np.concatenate([to_host(each.head(part)) for part in parts]))
    assert np.abs(logits[1] - logits[0]).max() < LOGIT_ERROR * np.abs(logits[0]).max()
