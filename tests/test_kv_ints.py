"""Symmetric integers: int4 and dense:dtype=q8 against their formulas in float64."""

import numpy as np
import pytest
from cache_cases import Heads, attend_last, attention, half_above, make, normal

from edgekv.types import F32, F64

TOP = {"int4": 7, "dense:dtype=q8": 127}


def rounded(x: F32, top: int) -> F64:
    """Returns scale * round(x / scale) per token, the scale stored in float16 and never too small."""
    scale = half_above(np.abs(x).max(axis=-1, keepdims=True).astype(float) / top)
    return scale * np.clip(np.rint(x / scale), -top, top)


@pytest.mark.parametrize("kv", TOP)
@pytest.mark.parametrize(
    ("shape", "n", "window"), [((8, 2, 64), 131, None), ((3, 3, 16), 33, 20), ((5, 1, 24), 64, 7)]
)
def test_attention_is_that_of_the_rounded_tokens(kv: str, shape: Heads, n: int, window: int | None) -> None:
    q, k, v = normal(shape, n, n)
    got = attend_last(make(kv, shape, n, sliding_window=window), (q, k, v), 9)
    expected = attention(q[:, -9:], rounded(k, TOP[kv]), rounded(v, TOP[kv]), window)
    np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize(("kv", "bits"), [("int4", 4), ("dense:dtype=q8", 8)])
@pytest.mark.parametrize("capacity", [1, 32, 1000])
def test_bytes_are_the_formula(kv: str, bits: int, capacity: int) -> None:
    n_kv_heads, head_dim = 2, 128
    cache = make(kv, (8, n_kv_heads, head_dim), capacity)
    token = 2 * (head_dim * bits // 8 + 2)
    assert cache.nbytes == cache.planned_bytes() == n_kv_heads * capacity * token
    cache.n_seen = capacity
    assert cache.bytes_read() == n_kv_heads * capacity * token
