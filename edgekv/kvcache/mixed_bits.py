"""Mixed bits: measures on a text what a model loses by the noise of each KV head, and gives out bits by that.

`docs/lab/planes.md` has the rule and what it brings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edgekv.codecs.codec import Codec
from edgekv.codecs.f16 import f16_codecs
from edgekv.codecs.planes import RUN
from edgekv.kernels import BLOCK
from edgekv.kernels.arrays import to_host
from edgekv.kernels.interface import bound_scores
from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.policies import FullCache
from edgekv.types import F32, F64, I64

MIN_BITS, MAX_BITS = 1, 4  # of a head
REMAINING_VARIANCE = np.array([[1, 0.4724, 0.1242, 0.0389, 0.0116], [1, 0.5708, 0.1348, 0.0389, 0.0116]])
"""The share of a Gaussian's variance that is lost with 0 to 4 bits, of keys and of values.

The best uniform levels leave e = .3634, .1188, .0374 and .0115; with a scale that is right on average, as values
have it, e / (1 - e); keys' scores are shrunk by s of `planes.KEY_SCALES`: 1 - 2 s + s^2 / (1 - e).
"""

NOISE_EXPONENT = 0.7
"""Exponent of the noise: how a layer's noise goes on to the logits is not known."""

VALUE_WEIGHT = 0.6
"""Factor of the values' noise beside the keys', which goes through an exponential: what diverged least."""

SINK_TOKENS, RECENT_TOKENS = 4, 128  # that stay exact while the noise is measured
FIT_TOKENS, MIN_FIT_TOKENS = 512, 256  # of the text that is measured on, and the fewest that it must have

CHANNEL_GROUPS = 8
"""Groups of RoPE's pairs of channels (i, i + head_dim / 2) that share a scale."""

UNIT_DIGIT, MAX_DIGIT = 4, 8
"""A scale's digit d stands for the factor 2 ** ((d - UNIT_DIGIT) / 2)."""

MAX_NOISE_RATIO = 0.75
"""The share of a head's noise that scales may leave at most: smaller gains did not show in the logits."""


class HeadNoise(NamedTuple):
    """The variance that unit noise in a head's codes brings to its layer's output, over the output's own variance.

    keys, values (n_layers, n_kv_heads); scale_digits (n_layers, n_kv_heads, CHANNEL_GROUPS): of the key channel
    scales with which ``keys`` was measured. The arrays of one layer lack the first axis.
    """

    keys: F64
    values: F64
    scale_digits: I64


class NoiseProbe(FullCache):
    """A cache that measures its layer's `HeadNoise` in a prompt, and stores nothing."""

    needs_prompt_queries = True
    noise: HeadNoise

    def codecs(self, geometry: Geometry, config: None) -> tuple[Codec, Codec]:
        return f16_codecs(geometry.n_kv_heads, 0, geometry.head_dim)

    def prefill(self, queries: F32, keys: F32, values: F32) -> None:
        window, cap = self.geometry.sliding_window, self.geometry.score_cap
        self.noise = head_noise(to_host(queries), to_host(keys), to_host(values), window, cap)


def head_noise(
    queries: F32, keys: F32, values: F32, sliding_window: int | None, cap: float | None = None
) -> HeadNoise:
    """Measures one layer by the attention of a prompt of n tokens.

    queries (n_heads, n, head_dim), multiplied by the score scale; keys and values (n_kv_heads, n, head_dim). With
    probabilities p, outputs o of the heads and r a key less the mean of its 16 tokens, the noise of a head is the
    sum over queries t and tokens i that would be packed by then of p^2 |q_t|^2 |r|^2 / head_dim |v_i - o_t|^2
    (keys) and of p^2 |v_i|^2 (values), divided by the sum of |o_t|^2 over all heads. q and r are scaled as
    `channel_scale_digits` finds best for each channel's sum of p^2 |v_i - o_t|^2 q^2 and its mean r^2. Where a
    ``cap`` bounds scores, p of the keys' noise is multiplied by the slope of the bound.
    """
    _, n, head_dim = queries.shape
    n_kv_heads = len(keys)
    rows, tokens = np.arange(min(SINK_TOKENS + RECENT_TOKENS + BLOCK, n // 2), n), np.arange(n)
    distance = rows[:, None] - tokens
    hidden = distance < 0 if sliding_window is None else (distance < 0) | (distance >= sliding_window)
    exact = (distance <= RECENT_TOKENS) | (tokens < SINK_TOKENS)
    key_noise, value_noise, energy = np.zeros(n_kv_heads), np.zeros(n_kv_heads), 0.0
    digits = np.empty((n_kv_heads, CHANNEL_GROUPS), np.int64)
    for g, group in enumerate(queries.reshape(n_kv_heads, -1, n, head_dim)):
        value_power, query_power = np.square(values[g]).sum(axis=1), np.zeros(head_dim)
        for q in group[:, rows]:
            s = q @ keys[g].T
            bound_scores(s, cap)
            slope = 1 - np.square(s / cap) if cap else 1
            p = _softmax(np.where(hidden, -np.inf, s))
            out = p @ values[g]
            square = np.where(exact, 0, p * p)
            difference = value_power + np.square(out).sum(axis=1)[:, None] - 2 * out @ values[g].T  # |v_i - o_t|^2
            query_power += (square * difference * np.square(slope)).sum(axis=1) @ np.square(q)
            value_noise[g] += (square * value_power).sum(dtype=np.float64)
            energy += float(np.square(out).sum(dtype=np.float64))
        key_power = _centred_power(keys[g])
        digits[g] = channel_scale_digits(query_power, key_power)
        key_noise[g] = _noise_in_scores(query_power, key_power, digits[g])
    return HeadNoise(key_noise / (head_dim * energy or 1), value_noise / (energy or 1), digits)


def channel_scale_digits(query_power: F64, key_power: F64) -> I64:
    """Returns digits (CHANNEL_GROUPS,) of the key channel scales that leave least noise in a head's scores.

    query_power, key_power (head_dim,): squares of queries, weighted by how much they matter, and of keys. The
    noise of codes has one size in all channels, so it is least in the scores with scales of
    (query_power / key_power) ** 0.25. Without a gain (see MAX_NOISE_RATIO) all are UNIT_DIGIT.
    """
    groups, even = _channel_groups(len(query_power)), np.full(CHANNEL_GROUPS, UNIT_DIGIT)
    sums = [np.bincount(groups, power, CHANNEL_GROUPS) for power in (query_power, key_power)]
    known = (sums[0] > 0) & (sums[1] > 0)
    if not known.any():
        return even
    half_octaves = np.log2(sums[0][known] / sums[1][known]) / 2
    digits = even.copy()
    digits[known] = np.clip(np.rint(half_octaves - half_octaves.mean()) + UNIT_DIGIT, 0, MAX_DIGIT)
    least = MAX_NOISE_RATIO * _noise_in_scores(query_power, key_power, even)
    return digits if _noise_in_scores(query_power, key_power, digits) <= least else even


def _noise_in_scores(query_power: F64, key_power: F64, digits: I64) -> float:
    """Returns the noise of codes of scaled keys, times a constant."""
    squares = np.square(channel_scales(digits, len(query_power)), dtype=np.float64)
    return float((query_power / squares).sum() * (key_power * squares).sum())


def channel_scales(digits: I64, head_dim: int) -> F32:
    """Returns the factors (..., head_dim) that digits (..., CHANNEL_GROUPS) stand for."""
    factors: F32 = np.exp2((digits - UNIT_DIGIT) / 2).astype(np.float32)[..., _channel_groups(head_dim)]
    return factors


def _channel_groups(head_dim: int) -> I64:
    """Returns the group (head_dim,) of each channel."""
    pairs = -(-head_dim // 2)
    return np.arange(head_dim) % pairs * CHANNEL_GROUPS // pairs


def _centred_power(keys: F32) -> F64:
    """Returns each channel's mean square (head_dim,) of keys (n, head_dim) less the means of RUN tokens."""
    n = (len(keys) - SINK_TOKENS) // RUN * RUN
    groups = keys[SINK_TOKENS : SINK_TOKENS + n].reshape(-1, RUN, keys.shape[1])
    power: F64 = np.square(groups - groups.mean(axis=1, keepdims=True)).mean(axis=(0, 1), dtype=np.float64)
    return power


def _softmax(scores: F32) -> F32:
    p: F32 = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return p


def allocate_head_bits(noise: F64, remaining: F64, total: int) -> I64:
    """Returns whole bits (n_kinds, ...) of the sum ``total``: each next one goes where it takes most noise away.

    noise (n_kinds, ...), remaining (n_kinds, 5): the share of it that is left with 0 to 4 bits.
    """
    weights, bits = noise**NOISE_EXPONENT, np.full(noise.shape, MIN_BITS)
    gain = np.pad(remaining[:, :MAX_BITS] - remaining[:, 1:], ((0, 0), (0, 1)))
    kinds = np.arange(len(noise)).reshape(-1, *[1] * (noise.ndim - 1))
    for _ in range(total - MIN_BITS * noise.size):
        gains = np.where(bits < MAX_BITS, weights * gain[kinds, bits], -1)
        bits[np.unravel_index(gains.argmax(), bits.shape)] += 1
    return bits


def head_bits(
    noise: HeadNoise, k_bits: float, v_bits: float, sliding_windows: Sequence[int | None], *, together: bool
) -> tuple[str, str]:
    """Returns the bits of keys and of values as digits, a KV head each, layer after layer.

    k_bits, v_bits: their means over the layers that see all tokens, and over the sliding ones. together: keys and
    values share one sum of bits.
    """
    every = np.stack([noise.keys, VALUE_WEIGHT * noise.values])
    bits = np.empty(every.shape, np.int64)
    slides = np.array([window is not None for window in sliding_windows])
    for layers in (slides, ~slides):
        selected = every[:, layers]
        totals = [_total_bits(mean, selected[0].size) for mean in (k_bits, v_bits)]
        for kinds in (slice(0, 2),) if together else (slice(0, 1), slice(1, 2)):
            bits[kinds, layers] = allocate_head_bits(
                selected[kinds], REMAINING_VARIANCE[kinds], sum(totals[kinds])
            )
    keys, values = ("".join(map(str, kind.ravel())) for kind in bits)
    return keys, values


def even_bits(mean: float, n: int) -> list[int]:
    """Returns whole bits of n heads with that mean, by their order alone."""
    ends = [_total_bits(mean, i) for i in range(n + 1)]
    return [b - a for a, b in itertools.pairwise(ends)]


def _total_bits(mean: float, n: int) -> int:
    """Returns the bits of n heads together; a half is rounded down."""
    return math.ceil(mean * n - 0.5)
