"""Caches that exist to be compared with `visual1` and `visual=planes`: pictures in other codes, text in f16.

`SplitLevels` gives keys and values bits of their own, which separates the sensitivity of the two, `FlooredLevels`
rounds as the paper prints it, and `CodedSpans` keeps pictures as `bitplane` or `h1b` would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from edgekv.kvcache import CacheSpec
from edgekv.kvcache.bitplane import BitPlaneKnobs
from edgekv.kvcache.codec_two_stages import TwoStageKeys, TwoStageValues
from edgekv.kvcache.codecs import WORD, Codec
from edgekv.kvcache.image_spans import ImageSpans
from edgekv.kvcache.papers.codec_h1b import Int4, SignSketch
from edgekv.kvcache.papers.codec_visual import LevelSpan
from edgekv.kvcache.papers.h1b import DEFAULT_TAU, H1BKnobs
from edgekv.kvcache.papers.visual import Visual1, VisualKnobs
from edgekv.types import F32

Pair = tuple[Codec, Codec]


@dataclasses.dataclass(frozen=True)
class SplitKnobs(VisualKnobs):
    key_bits: int = 8
    value_bits: int = 8


class SplitLevels(Visual1):
    """`visual1` with ``key_bits`` and ``value_bits`` per element."""

    name = "split"
    Knobs = SplitKnobs

    def span_codecs(self, *shape: int) -> Pair:
        bits = self.knobs.key_bits, self.knobs.value_bits
        keys, values = (LevelSpan(*shape, n, self.knobs.group) for n in bits)
        return keys, values


class FlooredSpan(LevelSpan):
    """Rounds down, as the paper's equation 5 and 8 have it: at 1 bit only the highest level's elements are 1."""

    def encode(self, x: F32, t0: int) -> None:
        half_a_step = self.arrays["step"].view(np.float16).astype(np.float32)[..., None] / 2
        super().encode(x - half_a_step, t0)


class FlooredLevels(Visual1):
    """`visual1` as the paper prints it."""

    name = "floored"
    Knobs = VisualKnobs

    def span_codecs(self, *shape: int) -> Pair:
        keys, values = (FlooredSpan(*shape, self.knobs.bits, self.knobs.group) for _ in range(2))
        return keys, values


def _bitplane(*shape: int, group: int) -> Pair:
    keys = TwoStageKeys(*shape, key_scale=BitPlaneKnobs.key_scale, seed=BitPlaneKnobs.seed)
    return keys, TwoStageValues(keys, n_rep=group, threshold=BitPlaneKnobs.threshold)


def _h1b(*shape: int, group: int) -> Pair:
    keys = SignSketch(*shape, H1BKnobs.sketch_bits, H1BKnobs.seed)
    keys.tau[:] = DEFAULT_TAU
    return keys, Int4(*shape)


CODES: dict[str, Callable[..., Pair]] = {"bitplane": _bitplane, "h1b": _h1b}


@dataclasses.dataclass(frozen=True)
class CodedKnobs:
    code: str
    text: str = "f16"


class CodedSpans(ImageSpans):
    """Pictures in one of CODES. bitplane: one picture in a conversation."""

    name = "coded"
    block = WORD
    Knobs = CodedKnobs

    def span_codecs(self, *shape: int) -> Pair:
        return CODES[self.knobs.code](*shape, group=self.geometry.n_rep)


def spec(text: str) -> CacheSpec:
    """A scheme as --kv has it, ``split:KEY_BITS,VALUE_BITS`` (plain), ``floored:QUANTILE`` or ``coded:CODE``."""
    name, _, rest = text.partition(":")
    if name == SplitLevels.name:
        key_bits, value_bits = map(int, rest.split(","))
        knobs = SplitKnobs(group="tensor", quantile=0.0, key_bits=key_bits, value_bits=value_bits)
        return CacheSpec(SplitLevels, knobs)
    if name == FlooredLevels.name:
        return CacheSpec(FlooredLevels, VisualKnobs(quantile=float(rest)))
    if name == CodedSpans.name:
        return CacheSpec(CodedSpans, CodedKnobs(code=rest))
    return CacheSpec.parse(text)
