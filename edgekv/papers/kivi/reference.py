"""KIVI's codes: keys per channel over a group of tokens, values per token over a span of channels."""

from typing import Any

import numpy as np

from edgekv.codecs.codec import round_up_to_f16
from edgekv.codecs.ints import pack_codes, unpack_codes
from edgekv.kernels.arrays import contiguous
from edgekv.kernels.interface import LARGEST_F16
from edgekv.types import F32, U8, U16


def encode_kivi_keys(x: F32, codes: U8, step: U16, low: U16, t0: int) -> None:
    """Stores x (G, n, D) at tokens t0.. as round((x - low) / step) in 0..top = 2 ** bits - 1: KIVI's keys.

    low and step (G, groups, D) belong to a channel of B tokens: the least element, rounded to float16, and
    (largest - low) / top, rounded up to float16. codes (G, cap, n_bytes); t0 and n are multiples of
    B = cap / groups. Halves round to even; what is read is low + step * code.
    """
    n_kv_heads, n_tokens, head_dim = x.shape
    (capacity, n_bytes), n_groups = codes.shape[1:], step.shape[1]
    group = capacity // n_groups
    groups = slice(t0 // group, (t0 + n_tokens) // group)
    parts = x.reshape(n_kv_heads, -1, group, head_dim)
    levels = _quantize(parts, 2, 8 * n_bytes // head_dim, step[:, groups], low[:, groups])
    codes[:, t0 : t0 + n_tokens] = pack_codes(levels, n_bytes).reshape(n_kv_heads, n_tokens, n_bytes)


def encode_kivi_values(x: F32, codes: U8, step: U16, low: U16, t0: int) -> None:
    """`encode_kivi_keys` for values: a step and a low end per token and span of channels.

    codes (G, cap, n_bytes); step, low (G, spans, cap), spans dividing D.
    """
    n_kv_heads, n_tokens, head_dim = x.shape
    tokens, n_bytes = slice(t0, t0 + n_tokens), codes.shape[2]
    spans = x.reshape(n_kv_heads, n_tokens, step.shape[1], -1).transpose(0, 2, 1, 3)
    levels = _quantize(spans, 3, 8 * n_bytes // head_dim, step[:, :, tokens], low[:, :, tokens])
    codes[:, tokens] = pack_codes(levels.transpose(0, 2, 1, 3).reshape(x.shape), n_bytes)


def kivi_keys(codec: Any, t0: int, t1: int) -> F32:
    """Tokens t0..t1 of a codec as numbers (G, t1 - t0, D)."""
    a, groups = codec.arrays, np.arange(t0, t1) // codec.group
    step, low = (_widen(a[name][:, groups]) for name in ("step", "low"))
    keys: F32 = low + step * unpack_codes(a["codes"][:, t0:t1], codec.head_dim)
    return keys


def kivi_values(codec: Any, t0: int, t1: int) -> F32:
    """Tokens t0..t1 of a codec as numbers (G, t1 - t0, D)."""
    a = codec.arrays
    shape = codec.n_kv_heads, t1 - t0, codec.head_dim
    levels = unpack_codes(a["codes"][:, t0:t1], codec.head_dim).reshape(*shape[:2], codec.spans, -1)
    step, low = (_widen(a[name][:, :, t0:t1]).transpose(0, 2, 1)[..., None] for name in ("step", "low"))
    values: F32 = (low + step * levels).reshape(shape)
    return values


def _quantize(x: F32, axis: int, n_bits: int, step: U16, low: U16) -> U8:
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
    return contiguous(bits).view(np.float16).astype(np.float32)
