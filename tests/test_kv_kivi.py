"""KIVI: its quantizer by hand in float64, its window, its bytes."""

import numpy as np
import pytest
from cache_cases import attend_last, attention, half_above, make, normal

from edgekv.types import F32, F64

SHAPES = [(8, 2, 64), (3, 3, 16), (5, 1, 128)]


def quantized(x: F64, bits: int, axis: int) -> F64:
    """Returns low + step * round((x - low) / step), ends along the axis in float16, step never too small."""
    top, low = 2**bits - 1, x.min(axis, keepdims=True).astype(np.float16).astype(float)
    step = half_above((x.max(axis, keepdims=True).astype(np.float32) - low.astype(np.float32)) / np.float32(top))
    return low + step * np.clip(np.rint((x - low) / step), 0, top)


def stored(k: F32, v: F32, n_packed: int, bits: int, group: int, vgroup: int) -> tuple[F64, F64]:
    """Returns what the cache holds: the first n_packed tokens in codes, the rest in float16."""
    k, v = (x.astype(np.float16).astype(float) for x in (k, v))
    g, _, d = k.shape
    span = vgroup or d
    packed = k[:, :n_packed].reshape(g, n_packed // group, group, d)
    k[:, :n_packed] = quantized(packed, bits, 2).reshape(g, n_packed, d)
    packed = v[:, :n_packed].reshape(g, n_packed, d // span, span)
    v[:, :n_packed] = quantized(packed, bits, 3).reshape(g, n_packed, d)
    return k, v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("bits", "window", "group", "vgroup", "n", "n_packed"),
    [(2, 128, 32, 0, 330, 192), (2, 0, 32, 16, 191, 160), (4, 64, 64, 0, 257, 192), (2, 5, 128, 8, 262, 256)],
)
def test_attention_is_that_of_the_stored_tokens(
    shape: tuple[int, int, int], bits: int, window: int, group: int, vgroup: int, n: int, n_packed: int
) -> None:
    q, k, v = normal(shape, n, n)
    kv = f"kivi2:bits={bits},residual_length={window},group={group},vgroup={vgroup}"
    got = attend_last(make(kv, shape, n), (q, k, v), 1)
    expected = attention(q[:, -1:], *stored(k, v, n_packed, bits, group, vgroup), None)
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("kv", "token"),
    [
        ("kivi2", 128 * (2 / 8 + 4 / 32) + 128 * 2 / 8 + 4),  # 84: 3 bits per key element, 2.25 per value element
        ("kivi2:vgroup=32", 128 * (2 / 8 + 4 / 32) * 2),
        ("kivi2:bits=4,group=64", 128 * (4 / 8 + 4 / 64) + 128 * 4 / 8 + 4),
    ],
)
def test_bytes_are_the_formula(kv: str, token: float) -> None:
    n_kv_heads, head_dim, capacity = 2, 128, 4096
    cache = make(kv, (8, n_kv_heads, head_dim), capacity)
    exact = cache.config.residual_length + cache.config.group
    packed = capacity - cache.config.residual_length
    assert cache.nbytes == cache.planned_bytes() == n_kv_heads * (packed * token + exact * 4 * head_dim)
    cache.append_prefill(*[np.zeros((n_kv_heads, capacity, head_dim), np.float32)] * 2)
    assert cache.bytes_read() == n_kv_heads * (packed * token + cache.config.residual_length * 4 * head_dim)
