"""FIER's index: keys as one bit each, of two levels per channel and group of tokens."""

from typing import Any

import numpy as np

from edgekv.kernels.arrays import contiguous
from edgekv.kernels.reference.loops import Loops
from edgekv.types import F32, U16, U32

WORD_TOKENS = 32


def encode_fier(keys: U16, group: int, minmax: bool, signs: U32, levels: U16, b0: int, b1: int) -> None:
    """Indexes groups b0..b1 of `group` tokens (a multiple of 32) of keys (G, cap, D) float16 bits.

    levels (G, groups, 2, D), float16 bits: per group and channel a centre and a step. They are the mean and
    the mean absolute deviation from it, each added up in the order of the tokens, or with `minmax` the middle
    and half the range. signs (G, words, D): bit i of word w of channel d says whether token 32 * w + i is at
    or above the (rounded) centre, so that it is taken as centre + step, else as centre - step: FIER,
    equation 5 and algorithm 1.
    """
    n_kv_heads, _, head_dim = keys.shape
    shape = n_kv_heads, b1 - b0, group, head_dim
    x = keys[:, b0 * group : b1 * group].view(np.float16).astype(np.float32).reshape(shape)
    centre, step = (_middle_and_half_range if minmax else _mean_and_deviation)(x)
    levels[:, b0:b1, 0] = centre.astype(np.float16).view(np.uint16)
    levels[:, b0:b1, 1] = step.astype(np.float16).view(np.uint16)
    upper = x >= _widen(levels[:, b0:b1, None, 0])
    words = upper.reshape(n_kv_heads, -1, WORD_TOKENS, head_dim).astype(np.uint32)
    packed = words[:, :, 0].copy()
    for i in range(1, WORD_TOKENS):
        packed |= words[:, :, i] << np.uint32(i)
    per_group = group // WORD_TOKENS
    signs[:, b0 * per_group : b1 * per_group] = packed


def sign_index(index: Any, t0: int, t1: int) -> F32:
    """The keys as the index has them: whole groups."""
    group, b0, b1 = index.block, t0 // index.block, t1 // index.block
    signs, levels = index.arrays["signs"], index.arrays["levels"]
    words = np.ascontiguousarray(signs[:, t0 // WORD_TOKENS : t1 // WORD_TOKENS])
    bits = np.unpackbits(words[..., None].view(np.uint8), axis=-1, bitorder="little")  # (G, words, D, 32)
    upper = bits.transpose(0, 1, 3, 2).reshape(index.n_kv_heads, b1 - b0, group, index.head_dim)
    centre, step = _widen(levels[:, b0:b1, None, 0]), _widen(levels[:, b0:b1, None, 1])
    return np.where(upper, centre + step, centre - step).reshape(index.n_kv_heads, -1, index.head_dim)


def _mean_and_deviation(x: F32) -> tuple[F32, F32]:
    """Of x (G, groups, tokens, D) along the tokens, added one after the other."""
    n = np.float32(x.shape[2])
    mean = _sum_in_order(x) / n
    return mean, _sum_in_order(np.abs(x - mean[:, :, None])) / n


def _sum_in_order(x: F32) -> F32:
    total = np.zeros_like(x[:, :, 0])
    for t in range(x.shape[2]):
        total += x[:, :, t]
    return total


def _middle_and_half_range(x: F32) -> tuple[F32, F32]:
    low, high, half = x.min(axis=2), x.max(axis=2), np.float32(0.5)
    return (low + high) * half, (high - low) * half


def _widen(bits: U16) -> F32:
    return contiguous(bits).view(np.float16).astype(np.float32)


LOOPS = {"sign_index": Loops(sign_index)}
