"""KIVI's codes: keys per channel over a group of tokens, values per token over a span of channels."""

import numpy as np

from edgekv.kernels.contract.attention import F32, U8, U16
from edgekv.kernels.reference.dense import scores_f32, values_f32
from edgekv.kernels.reference.int4 import LARGEST_F16, round_up_to_f16
from edgekv.kernels.reference.ints import pack_codes, unpack_codes


def encode_kivi_keys(x: F32, codes: U8, step: U16, low: U16, t0: int) -> None:
    n_kv_heads, n_tokens, head_dim = x.shape
    n_bytes, group = codes.shape[2:]
    groups = slice(t0 // group, (t0 + n_tokens) // group)
    parts = x.reshape(n_kv_heads, -1, group, head_dim)
    levels = _quantise(parts, 2, 8 * n_bytes // head_dim, step[:, groups], low[:, groups])
    codes[:, groups] = pack_codes(levels, n_bytes).transpose(0, 1, 3, 2)


def scores_kivi(q: F32, codes: U8, step: U16, low: U16, t0: int, t1: int, s: F32, s0: int) -> None:
    head_dim, group = q.shape[2], codes.shape[3]
    a, b = t0 // group, -(-t1 // group)
    levels = unpack_codes(codes[:, a:b].transpose(0, 1, 3, 2), head_dim)  # (G, groups, group, D)
    keys = levels * _widen(step[:, a:b, None]) + _widen(low[:, a:b, None])
    scores_f32(q, keys.reshape(len(q), -1, head_dim), t0 - a * group, t1 - a * group, s, s0)


def encode_kivi_values(x: F32, codes: U8, step: U16, low: U16, t0: int) -> None:
    n_kv_heads, n_tokens, head_dim = x.shape
    tokens, n_bytes = slice(t0, t0 + n_tokens), codes.shape[2]
    spans = x.reshape(n_kv_heads, n_tokens, step.shape[1], -1).transpose(0, 2, 1, 3)
    levels = _quantise(spans, 3, 8 * n_bytes // head_dim, step[:, :, tokens], low[:, :, tokens])
    codes[:, tokens] = pack_codes(levels.transpose(0, 2, 1, 3).reshape(x.shape), n_bytes)


def values_kivi(p: F32, s0: int, codes: U8, step: U16, low: U16, t0: int, t1: int, out: F32) -> None:
    n_kv_heads, _, head_dim = out.shape
    levels = unpack_codes(codes[:, t0:t1], head_dim).reshape(n_kv_heads, t1 - t0, step.shape[1], -1)
    size, least = (_widen(ends[:, :, t0:t1]).transpose(0, 2, 1)[..., None] for ends in (step, low))
    values = levels * size + least
    values_f32(p, s0, values.reshape(n_kv_heads, t1 - t0, head_dim), 0, t1 - t0, out)


def _quantise(x: F32, axis: int, n_bits: int, step: U16, low: U16) -> U8:
    """Codes of x, whose elements along the axis share a step and a low end; fills those two."""
    top = np.float32(2**n_bits - 1)
    least = np.clip(x.min(axis), -LARGEST_F16, LARGEST_F16) + np.float32(0)  # no -0
    low[...] = least.astype(np.float16).view(np.uint16)
    least = _widen(low)
    step[...] = round_up_to_f16(np.maximum(x.max(axis) - least, 0) / top)
    size = _widen(step)
    size[size == 0] = 1
    position = (x - np.expand_dims(least, axis)) / np.expand_dims(size, axis)
    levels: U8 = np.clip(np.rint(position), 0, top).astype(np.uint8)
    return levels


def _widen(bits: U16) -> F32:
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
