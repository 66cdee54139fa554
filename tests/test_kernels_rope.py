"""Split and rotation of the fused projection: NumPy against transformers' formulas, Numba against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import EITHER_WAY, assert_close, normal, pairs

from edgekv.kernels import cpu, reference
from edgekv.types import F32, F64

NONE = np.empty(0, np.float32)
HEAD_DIMS = (8, 12, 16, 64, 80, 96, 128, 256)
EPS = 1e-6


def rotate_half(x: F64) -> F64:
    """Rotates as transformers' modeling_llama.rotate_half."""
    x1, x2 = np.split(x, 2, axis=-1)
    return np.concatenate([-x2, x1], axis=-1)


def expected_head(x: F64, cos: F64, sin: F64, norm: F32) -> F64:
    """Computes transformers' Qwen3 head: RMS norm, then RoPE on the first 2 * len(cos) elements."""
    if norm.size:
        x = x / np.sqrt((x**2).mean() + EPS) * norm
    rotated, rest = x[: 2 * len(cos)], x[2 * len(cos) :]
    rotated = rotated * np.tile(cos, 2) + rotate_half(rotated) * np.tile(sin, 2)
    return np.concatenate([rotated, rest])


def outputs(h: int, g: int, n: int, d: int, contiguous: bool) -> list[F32]:
    """Returns poisoned q, k, v, or the middle tokens of longer ones, as a prompt's chunks are."""
    if contiguous:
        return [np.full((heads, n, d), np.nan, np.float32) for heads in (h, g, g)]
    return [np.full((heads, n + 3, d), np.nan, np.float32)[:, 1 : n + 1] for heads in (h, g, g)]


@pytest.mark.parametrize("rotated", [0, 4, 12])
@pytest.mark.parametrize("with_norm", [False, True])
def test_numpy_follows_transformers(rotated: int, with_norm: bool) -> None:
    h, g, n, d = 4, 2, 3, 12
    rng = np.random.default_rng(rotated)
    qkv = normal(rng, n, (h + 2 * g) * d)
    angles = rng.random((n, rotated // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    q_norm, k_norm = (normal(rng, d), normal(rng, d)) if with_norm else (NONE, NONE)
    q, k, v = outputs(h, g, n, d, contiguous=True)
    reference.split_rope(qkv, cos, sin, q, k, v, 0.25, q_norm, k_norm, EPS)
    heads = qkv.reshape(n, h + 2 * g, d)
    for t in range(n):
        angle = np.cos(angles[t]), np.sin(angles[t])
        for i in range(h):
            assert_close(q[i, t], 0.25 * expected_head(heads[t, i].astype(np.float64), *angle, q_norm))
        for i in range(g):
            assert_close(k[i, t], expected_head(heads[t, h + i].astype(np.float64), *angle, k_norm))
            np.testing.assert_array_equal(v[i, t], heads[t, h + g + i])


@pytest.mark.parametrize(
    ("d", "contiguous", "way"), pairs(d=HEAD_DIMS, contiguous=[True, False], way=EITHER_WAY), indirect=["way"]
)
def test_numba_equals_numpy(d: int, contiguous: bool, way: str) -> None:
    rng = np.random.default_rng(d)
    for r, n, rotated, norms in [(1, 1, d, 0), (8, 3, d, 2), (3, 5, d // 4 * 2, 1), (2, 4, 0, 0)]:
        g = 1 + r % 3
        h = g * r
        qkv, table = normal(rng, n, (h + 2 * g) * d), normal(rng, 2, n, rotated // 2)
        q_norm, k_norm = (normal(rng, d) if i < norms else NONE for i in range(2))
        actual, expected = outputs(h, g, n, d, contiguous), outputs(h, g, n, d, True)
        reference.split_rope(qkv, *table, *expected, 0.3, q_norm, k_norm, EPS)
        cpu.split_rope(qkv, *table, *actual, 0.3, q_norm, k_norm, EPS)
        for ours, theirs in zip(actual, expected, strict=True):
            assert_close(ours, theirs)
            if not contiguous:
                assert np.isnan(ours.base[:, [0, -2, -1]]).all()
