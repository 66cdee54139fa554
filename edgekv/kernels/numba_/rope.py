"""Split of the fused projection into rotated queries and keys, and values."""

import numpy as np
from numba import prange

from edgekv.kernels.numba_.jit import Scalar, fast_jit, parallel_jit
from edgekv.kernels.numba_.launch import flat, run
from edgekv.kernels.spec import F32

ONE = np.float32(1)
ELEMENT_WORK = 3  # load, rotate, store, in multiply-adds


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
    n_heads, n_tokens, _ = q.shape
    args = (
        np.ascontiguousarray(qkv).reshape(n_tokens, -1, q.shape[2]),
        np.ascontiguousarray(cos),
        np.ascontiguousarray(sin),
        n_heads,
        *flat(q),
        *flat(k),
        *flat(v),
        np.float32(scale),
        q_norm,
        k_norm,
        np.float32(eps),
    )
    run(_split_tokens, _split_parallel, n_tokens, ELEMENT_WORK * qkv.size, *args)


@fast_jit
def _split_tokens(
    first: int,
    last: int,
    qkv: F32,
    cos: F32,
    sin: F32,
    n_heads: int,
    q: F32,
    q_gap_h: int,
    q_gap_t: int,
    k: F32,
    k_gap_h: int,
    k_gap_t: int,
    v: F32,
    v_gap_h: int,
    v_gap_t: int,
    scale: Scalar,
    q_norm: F32,
    k_norm: F32,
    eps: Scalar,
) -> None:
    head_dim = qkv.shape[2]
    n_kv_heads = (qkv.shape[1] - n_heads) // 2
    for t in range(first, last):
        for h in range(n_heads):
            target = q[h * q_gap_h + t * q_gap_t :][:head_dim]
            _rotate_head(qkv[t, h], cos[t], sin[t], q_norm, eps, scale, target)
        for h in range(n_kv_heads):
            target = k[h * k_gap_h + t * k_gap_t :][:head_dim]
            _rotate_head(qkv[t, n_heads + h], cos[t], sin[t], k_norm, eps, ONE, target)
            v[h * v_gap_h + t * v_gap_t :][:head_dim] = qkv[t, n_heads + n_kv_heads + h]


@fast_jit
def _rotate_head(x: F32, cos: F32, sin: F32, norm: F32, eps: Scalar, scale: Scalar, out: F32) -> None:
    if len(norm) == 0:
        for d in range(len(x)):
            out[d] = x[d] * scale
    else:
        squares = np.float32(0)
        for d in range(len(x)):
            squares += x[d] * x[d]
        factor = scale / np.sqrt(squares / np.float32(len(x)) + eps)
        for d in range(len(x)):
            out[d] = x[d] * factor * norm[d]
    half = len(cos)
    for d in range(half):
        x1, x2 = out[d], out[d + half]
        out[d] = x1 * cos[d] - x2 * sin[d]
        out[d + half] = x2 * cos[d] + x1 * sin[d]


@parallel_jit
def _split_parallel(
    n_parts: int,
    n_items: int,
    qkv: F32,
    cos: F32,
    sin: F32,
    n_heads: int,
    q: F32,
    q_gap_h: int,
    q_gap_t: int,
    k: F32,
    k_gap_h: int,
    k_gap_t: int,
    v: F32,
    v_gap_h: int,
    v_gap_t: int,
    scale: Scalar,
    q_norm: F32,
    k_norm: F32,
    eps: Scalar,
) -> None:
    for part in prange(n_parts):
        _split_tokens(
            n_items * part // n_parts,
            n_items * (part + 1) // n_parts,
            qkv,
            cos,
            sin,
            n_heads,
            q,
            q_gap_h,
            q_gap_t,
            k,
            k_gap_h,
            k_gap_t,
            v,
            v_gap_h,
            v_gap_t,
            scale,
            q_norm,
            k_norm,
            eps,
        )
