"""Rotations: of heads by position (RoPE), and of keys and values by a Hadamard transform or a matrix."""

from __future__ import annotations

import numpy as np

from edgekv.types import F32


def split_rope(
    qkv: F32, cos: F32, sin: F32, q: F32, k: F32, v: F32, scale: float, q_norm: F32, k_norm: F32, eps: float
) -> None:
    """Splits the fused projection qkv (n, (H + 2G) * D) into q (H, n, D) and k, v (G, n, D).

    q and k are rotated as Hugging Face does: with x1, x2 the halves of the first 2 * cos.shape[1] elements
    of a head, [x1 * cos - x2 * sin, x2 * cos + x1 * sin]; the rest is copied. cos, sin (n, rot // 2), with
    rot = 0 for learned positions. q is then multiplied by `scale`. q_norm and k_norm (D,) are the weights
    of a per-head RMS norm before the rotation (Qwen3), or empty.
    """
    n_heads, n_tokens, head_dim = q.shape
    n_kv_heads = k.shape[0]
    heads = qkv.reshape(n_tokens, n_heads + 2 * n_kv_heads, head_dim).transpose(1, 0, 2)
    q[...] = _rotate(_rms_norm(heads[:n_heads], q_norm, eps), cos, sin) * np.float32(scale)
    k[...] = _rotate(_rms_norm(heads[n_heads : n_heads + n_kv_heads], k_norm, eps), cos, sin)
    v[...] = heads[n_heads + n_kv_heads :]


def _rms_norm(x: F32, weight: F32, eps: float) -> F32:
    if not weight.size:
        return x
    mean_square = np.square(x).mean(axis=-1, keepdims=True)
    normalised: F32 = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normalised


def _rotate(x: F32, cos: F32, sin: F32) -> F32:
    half = cos.shape[1]
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], axis=-1)


def hadamard(x: F32, flips: F32, out: F32) -> None:
    """Fills out (A, n, D) with H (flips * x) / sqrt(D); x (A, n, d <= D) is padded with zeros, flips (D,) +-1.

    H is the Walsh-Hadamard matrix, D = 2 ** k. The sums are made in k passes over pairs D / 2 apart, and are thus
    equal to the bit in all backends.
    """
    out[...] = 0
    out[..., : x.shape[2]] = x * flips[: x.shape[2]]
    out[...] = _transform(out)


def hadamard_back(x: F32, flips: F32, out: F32) -> None:
    """Adds the first d elements of the inverse of `hadamard` of x (A, n, D) to out (A, n, d)."""
    out += (_transform(x) * flips)[..., : out.shape[2]]


def _transform(x: F32) -> F32:
    width = x.shape[2]
    for _ in range(width.bit_length() - 1):
        a, b = x[..., : width // 2], x[..., width // 2 :]
        x = np.stack([a + b, a - b], axis=-1).reshape(x.shape)
    scaled: F32 = x * np.float32(1 / np.sqrt(width))
    return scaled


def project(x: F32, matrix: F32) -> F32:
    """Returns x (G, n, d) times the transpose of matrix (b, d): (G, n, b)."""
    result: F32 = x @ matrix.T
    return result
