"""Split of the fused projection into rotated queries and keys, and values."""

import numpy as np

from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit
from edgekv.kernels.cpu.launch import flat, run
from edgekv.kernels.cpu.scalar import get, put
from edgekv.types import F32

ELEMENT_WORK = 3  # load, rotate, store, in multiply-adds
ONE = np.float32(1)


def split_rope(
    qkv: F32,
    cos: F32,
    sin: F32,
    q: F32,
    k: F32,
    v: F32,
    scale: float,
    q_norm: F32,
    k_norm: F32,
    eps: float,
) -> None:
    (n_heads, n_tokens, head_dim), n_kv_heads = q.shape, k.shape[0]
    sizes = n_heads, n_kv_heads, head_dim, cos.shape[1]
    inputs = tuple(np.ascontiguousarray(x).reshape(-1) for x in (qkv, cos, sin, q_norm, k_norm))
    args = (*sizes, *inputs, *flat(q), *flat(k), *flat(v), np.float32(scale), np.float32(eps))
    run(_split_tokens, n_tokens, ELEMENT_WORK * qkv.size, args)


@fast_jit
def _split_tokens(first: int, last: int, args: Args) -> None:
    n_heads, n_kv_heads, head_dim, half, qkv, cos, sin, q_norm, k_norm = args[:9]
    q, q_gap_h, q_gap_t, k, k_gap_h, k_gap_t, v, v_gap_h, v_gap_t, scale, eps = args[9:]
    for t in range(first, last):
        x = t * (n_heads + 2 * n_kv_heads) * head_dim
        for h in range(n_heads):
            y = h * q_gap_h + t * q_gap_t
            _normalise(qkv, x, head_dim, q_norm, eps, scale, q, y)
            _rotate(cos, sin, t * half, half, q, y)
            x += head_dim
        for h in range(n_kv_heads):
            y = h * k_gap_h + t * k_gap_t
            _normalise(qkv, x, head_dim, k_norm, eps, ONE, k, y)
            _rotate(cos, sin, t * half, half, k, y)
            x += head_dim
        for h in range(n_kv_heads):
            y = h * v_gap_h + t * v_gap_t
            for d in range(head_dim):
                put(v, y + d, get(qkv, x + d))
            x += head_dim


@fast_jit
def _normalise(x: F32, i: int, head_dim: int, weight: F32, eps: Scalar, scale: Scalar, out: F32, j: int) -> None:
    """out[j:] = the RMS norm of the head x[i:], or x if there are no weights, times scale."""
    if len(weight) == 0:
        for d in range(head_dim):
            put(out, j + d, get(x, i + d) * scale)
        return
    squares = np.float32(0)
    for d in range(head_dim):
        squares += get(x, i + d) * get(x, i + d)
    factor = scale / np.sqrt(squares / np.float32(head_dim) + eps)
    for d in range(head_dim):
        put(out, j + d, get(x, i + d) * factor * get(weight, d))


@fast_jit
def _rotate(cos: F32, sin: F32, i: int, half: int, x: F32, j: int) -> None:
    """Rotates the head x[j:] in place by the angles from i on."""
    for d in range(half):
        x1, x2, c, s = get(x, j + d), get(x, j + half + d), get(cos, i + d), get(sin, i + d)
        put(x, j + d, x1 * c - x2 * s)
        put(x, j + half + d, x2 * c + x1 * s)
