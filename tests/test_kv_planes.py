"""Attention of planes and onebit computed by hand from what they stored; their bytes; their limits."""

import numpy as np
import pytest
from cache_cases import attend_last, attention, make, normal
from test_kernels_planes import decoded_centres, half

from edgekv.codecs.planes import Rotation, round_queries
from edgekv.kvcache.cache import KVCache
from edgekv.types import F64

MIXED = "planes:k_bits=1.5"
SHAPES = [(8, 2, 64), (3, 3, 16), (4, 1, 128), (2, 2, 80), (2, 1, 192)]


def matrix(rotation: Rotation, cache: KVCache) -> F64:
    """Returns the rotation P (width, head_dim)."""
    identity = np.eye(rotation.head_dim, dtype=np.float32)[None]
    return rotation.forward(identity, cache.kernels)[0].T.astype(float)


def levels_and_centres(cache: KVCache) -> tuple[F64, F64]:
    """Returns key_scale * f * level and centre of each packed key, (n_kv_heads, n_packed, width)."""
    levels = cache.key_codec._stored(0, cache.key_codec.capacity)[0].astype(float)
    centres = decoded_centres(cache.arrays["key.centres"], cache.arrays["key.centre_step"])
    scaled = cache.key_codec.key_scale[:, None, None] * levels * half(cache.arrays["key.scale"])[..., None]
    return scaled[:, : cache.n_packed], centres[:, : cache.n_packed]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("k_bits", "bits"), [(1, 1), (2, 2), (3, 2), (4, 4)])
def test_it_attends_to_what_it_stored(shape: tuple[int, int, int], k_bits: int, bits: int) -> None:
    n = 300
    q, k, v = normal(shape, n, n)
    q /= np.sqrt(shape[2])
    cache = make(f"planes:k_bits={k_bits},v_bits={bits},residual_length=64", shape, n)
    got = attend_last(cache, (q, k, v), 1)
    assert cache.n_packed == 192
    scaled, centres = levels_and_centres(cache)
    turn = matrix(cache.key_codec.rotation, cache).T
    k, v = (x.astype(np.float16).astype(float) for x in (k, v))
    exact_keys, packed = k @ turn, slice(4, 4 + cache.n_packed)
    exact_keys[:, packed] = centres
    rest = np.zeros_like(exact_keys)
    rest[:, packed] = scaled
    rounded, step = round_queries((q[:, -1:] @ turn).astype(np.float32))
    queries = np.concatenate([q[:, -1:] @ turn, rounded * step[..., None]], axis=2)  # of the centres, of the rest
    keys = np.concatenate([exact_keys, rest], axis=2)
    rotation = matrix(cache.value_codec.rotation, cache)
    bytes_ = cache.arrays["value.codes"].reshape(shape[1], -1, 2 * bits, shape[2], 4)
    per = 8 // bits
    levels = np.concatenate([bytes_ >> bits * i & (1 << bits) - 1 for i in range(per)], axis=2)
    g, blocks, _, d, _ = levels.shape
    levels = levels.transpose(0, 1, 2, 4, 3).reshape(g, blocks * 64, d) - (2**bits - 1) / 2
    values = levels * half(cache.arrays["value.scale"])[..., None] @ rotation
    v[:, packed] = values[:, : cache.n_packed]
    expected = attention(queries, keys, v)
    np.testing.assert_allclose(got, expected, atol=0.01 * np.abs(expected).max())  # 8-bit weights


@pytest.mark.parametrize(
    ("kv", "window", "token"),
    [
        ("onebit", 128, 16 + 2 + 66 * 5 / 64 + 32 + 2),
        ("onebit:v_bits=4,residual_length=64", 64, 16 + 2 + 66 * 5 / 64 + 64 + 2),
        ("planes", 128, 32 + 2 + 66 * 5 / 64 + 32 + 2),
        ("planes:k_bits=3,v_bits=1", 128, 48 + 2 + 66 * 5 / 64 + 16 + 2),
        (f"{MIXED},v_bits=2.5,key_bits_per_head=12,value_bits_per_head=41", 128, 24 + 2 + 66 * 5 / 64 + 40 + 2),
        (f"{MIXED},v_bits=1.5", 128, 24 + 2 + 66 * 5 / 64 + 24 + 2),
    ],
)
def test_bytes_are_the_formula(kv: str, window: int, token: float) -> None:
    g, d, capacity = 2, 128, 4 + 4096 + window
    cache = make(kv, (8, g, d), capacity)
    assert cache.nbytes == cache.planned_bytes() == g * (4096 * token + (4 + window + 64) * 4 * d)
    x = np.zeros((g, capacity, d), np.float32)
    cache.append_prefill(x, x)
    exact = (4 + window) * 4 * d
    assert cache.bytes_read() == pytest.approx(g * (4096 * token + exact), abs=1)
