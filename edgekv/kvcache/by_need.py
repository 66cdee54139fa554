"""Bits by need: what a model loses by one head's noise, measured on a text; bits, and a spread, given out by that.

`docs/lab/planes.md` has the rule and what it brings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edgekv.codecs.codec import WORD, Codec
from edgekv.codecs.f16 import f16_codecs
from edgekv.codecs.planes import CENTRE
from edgekv.kernels.arrays import to_host
from edgekv.kernels.interface import bound_scores
from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.policies import FullCache
from edgekv.types import F32, F64, I64

LEAST, MOST = 1, 4  # bits of a head
LEFT = np.array([[1, 0.4724, 0.1242, 0.0389, 0.0116], [1, 0.5708, 0.1348, 0.0389, 0.0116]])
"""What 0 to 4 bits leave of a Gaussian's variance, in keys and in values.

The best uniform levels leave e = .3634, .1188, .0374 and .0115; with a scale that is right on average, as values
have it, e / (1 - e); keys' scores are shrunk by s of `planes.KEY_SCALES`: 1 - 2 s + s^2 / (1 - e).
"""

FLATTEN = 0.7
"""Exponent of the noise: how a layer's noise goes on to the logits is not known."""

VALUES_COUNT = 0.6
"""Factor of the values' noise beside the keys', which goes through an exponential: what diverged least."""

SINK, NEAR = 4, 128  # tokens that stay exact, first and latest
FIT_TOKENS, LEAST_FIT_TOKENS = 512, 256  # that a fit reads, and that it must have to tell something

CHUNKS = 8
"""Runs of RoPE's pairs of channels (i, i + head_dim / 2) that have a factor of their own."""

MIDDLE_DIGIT, LAST_DIGIT = 4, 8
"""A digit d of a spread stands for the factor 2 ** ((d - MIDDLE_DIGIT) / 2)."""

WORTH = 0.75
"""What a spread must leave at most of a head's noise without one: smaller gains did not show in the logits."""


class HeadNoise(NamedTuple):
    """Of every layer and KV head: variance of the layer's output by unit noise of its codes, over the output's.

    keys, values (n_layers, n_kv_heads); spread (n_layers, n_kv_heads, CHUNKS): digits, with which ``keys`` hold.
    Without the first axis: of one layer.
    """

    keys: F64
    values: F64
    spread: I64


class NoiseProbe(FullCache):
    """A cache that measures in a prompt what `HeadNoise` says of its layer, and keeps nothing."""

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
    """Of one layer's keys and values, by a prompt that it attended to.

    queries (n_heads, n, head_dim), multiplied by the score scale; keys and values (n_kv_heads, n, head_dim). With
    probabilities p, outputs o of the heads and r a key less the mean of its 16 tokens, for each head the sums over
    queries t and tokens i that would be packed by then, of p^2 |q_t|^2 |r|^2 / head_dim |v_i - o_t|^2 and of
    p^2 |v_i|^2, divided by the sum of |o_t|^2 over all heads. q and r are those of the spread, which `spread_of`
    makes of each channel's sum of p^2 |v_i - o_t|^2 q^2 and its mean r^2. Where a ``cap`` bounds scores, p in what
    concerns keys is times the slope that the bound has there.
    """
    _, n, head_dim = queries.shape
    n_kv_heads = len(keys)
    rows, tokens = np.arange(min(SINK + NEAR + WORD, n // 2), n), np.arange(n)
    ahead = rows[:, None] - tokens
    hidden = ahead < 0 if sliding_window is None else (ahead < 0) | (ahead >= sliding_window)
    exact = (ahead <= NEAR) | (tokens < SINK)
    of_keys, of_values, energy = np.zeros(n_kv_heads), np.zeros(n_kv_heads), 0.0
    spread = np.empty((n_kv_heads, CHUNKS), np.int64)
    for g, group in enumerate(queries.reshape(n_kv_heads, -1, n, head_dim)):
        size, rest, looks = np.square(values[g]).sum(axis=1), _around_means(keys[g]), np.zeros(head_dim)
        for q in group[:, rows]:
            s = q @ keys[g].T
            bound_scores(s, cap)
            slope = 1 - np.square(s / cap) if cap else 1
            p = _softmax(np.where(hidden, -np.inf, s))
            out = p @ values[g]
            square = np.where(exact, 0, p * p)
            apart = size + np.square(out).sum(axis=1)[:, None] - 2 * out @ values[g].T  # |v_i - o_t|^2
            looks += (square * apart * np.square(slope)).sum(axis=1) @ np.square(q)
            of_values[g] += (square * size).sum(dtype=np.float64)
            energy += float(np.square(out).sum(dtype=np.float64))
        spread[g] = spread_of(looks, rest)
        of_keys[g] = _noise_in_scores(looks, rest, spread[g])
    return HeadNoise(of_keys / (head_dim * energy or 1), of_values / (energy or 1), spread)


def spread_of(looks: F64, rest: F64) -> I64:
    """Digits (CHUNKS,) of factors of a key's channels that leave least noise in its scores, if they are WORTH it.

    looks, rest (head_dim,): squares of queries, by how much they matter, and of keys, of each channel. The codes'
    noise has one size in all channels: it is least in the scores with factors of (looks / rest) ** 0.25.
    """
    chunks, even = _chunks(len(looks)), np.full(CHUNKS, MIDDLE_DIGIT)
    sums = [np.bincount(chunks, x, CHUNKS) for x in (looks, rest)]
    known = (sums[0] > 0) & (sums[1] > 0)
    if not known.any():
        return even
    halves = np.log2(sums[0][known] / sums[1][known]) / 2  # of an octave, of the factor
    digits = even.copy()
    digits[known] = np.clip(np.rint(halves - halves.mean()) + MIDDLE_DIGIT, 0, LAST_DIGIT)
    worth = _noise_in_scores(looks, rest, digits) <= WORTH * _noise_in_scores(looks, rest, even)
    return digits if worth else even


def _noise_in_scores(looks: F64, rest: F64, digits: I64) -> float:
    """Times a constant: of codes that leave noise of one size in all channels of the stretched keys."""
    stretch = np.square(factors_of(digits, len(looks)), dtype=np.float64)
    return float((looks / stretch).sum() * (rest * stretch).sum())


def factors_of(digits: I64, head_dim: int) -> F32:
    """(..., head_dim) of a spread (..., CHUNKS)."""
    factors: F32 = np.exp2((digits - MIDDLE_DIGIT) / 2).astype(np.float32)[..., _chunks(head_dim)]
    return factors


def _chunks(head_dim: int) -> I64:
    """The chunk of each channel."""
    pairs = -(-head_dim // 2)
    return np.arange(head_dim) % pairs * CHUNKS // pairs


def _around_means(keys: F32) -> F64:
    """Mean r^2 of each channel of keys (n, head_dim)."""
    n = (len(keys) - SINK) // CENTRE * CENTRE
    groups = keys[SINK : SINK + n].reshape(-1, CENTRE, keys.shape[1])
    rest: F64 = np.square(groups - groups.mean(axis=1, keepdims=True)).mean(axis=(0, 1), dtype=np.float64)
    return rest


def _softmax(scores: F32) -> F32:
    p: F32 = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return p


def give_bits(noise: F64, left: F64, total: int) -> I64:
    """Whole bits, `total` in all: each next one to where it takes most noise away.

    noise (n_kinds, ...), left (n_kinds, 5): what 0 to 4 bits leave of it.
    """
    weights, bits = noise**FLATTEN, np.full(noise.shape, LEAST)
    gain = np.pad(left[:, :MOST] - left[:, 1:], ((0, 0), (0, 1)))
    kinds = np.arange(len(noise)).reshape(-1, *[1] * (noise.ndim - 1))
    for _ in range(total - LEAST * noise.size):
        taken = np.where(bits < MOST, weights * gain[kinds, bits], -1)
        bits[np.unravel_index(taken.argmax(), bits.shape)] += 1
    return bits


def given(
    noise: HeadNoise, k_bits: float, v_bits: float, sliding_windows: Sequence[int | None], *, together: bool
) -> tuple[str, str]:
    """`give_bits` of keys and of values as digits, layer after layer; ``together``: from one sum of bits.

    Layers that see all tokens share the means, and sliding ones do.
    """
    every = np.stack([noise.keys, VALUES_COUNT * noise.values])
    bits = np.empty(every.shape, np.int64)
    slides = np.array([window is not None for window in sliding_windows])
    for layers in (slides, ~slides):
        own = every[:, layers]
        totals = [_total(mean, own[0].size) for mean in (k_bits, v_bits)]
        for kinds in (slice(0, 2),) if together else (slice(0, 1), slice(1, 2)):
            bits[kinds, layers] = give_bits(own[kinds], LEFT[kinds], sum(totals[kinds]))
    keys, values = ("".join(map(str, kind.ravel())) for kind in bits)
    return keys, values


def evenly(mean: float, n: int) -> list[int]:
    """Bits of n heads of that mean, by their order alone."""
    ends = [_total(mean, i) for i in range(n + 1)]
    return [b - a for a, b in itertools.pairwise(ends)]


def _total(mean: float, n: int) -> int:
    """Bits of n heads; halves are rounded down."""
    return math.ceil(mean * n - 0.5)
