"""Caches that exist to be compared with `visual1`: pictures in other codes, text in f16.

`SplitLevels` gives keys and values bits of their own, which separates the sensitivity of the two; `CodedSpans`
keeps pictures as `onebit`, `bitplane` or `h1b` would, to compare with `visual1` at equal bytes for a picture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from edgekv.kvcache import CacheSpec
from edgekv.kvcache.codec_planes import CentredPlanes, InterleavedValues, TwoStageKeys, TwoStageValues
from edgekv.kvcache.codecs import Codec
from edgekv.kvcache.papers.codec_h1b import Int4, SignSketch
from edgekv.kvcache.papers.codec_visual import LevelSpan
from edgekv.kvcache.papers.h1b import DEFAULT_TAU
from edgekv.kvcache.papers.visual import Run, Span, Visual1, VisualKnobs
from edgekv.types import F32

LAM, SEED, SKETCH, P = 0.9, 0, 256, 2.5e-4  # the schemes' defaults
Pair = tuple[Codec, Codec]


@dataclasses.dataclass(frozen=True)
class SplitKnobs(VisualKnobs):
    key_bits: int = 8
    value_bits: int = 8


class SplitLevels(Visual1):
    """`visual1` with ``key_bits`` and ``value_bits`` per element."""

    name = "split"
    Knobs = SplitKnobs

    def _add_span(self, start: int, stop: int) -> None:
        bits = self.knobs.key_bits, self.knobs.value_bits
        keys, values = (LevelSpan(*self._shape(stop - start), n, self.knobs.group) for n in bits)
        self._add(Span(start, stop, (keys, values)))

    def _add(self, span: Span) -> None:
        self.spans.append(span)
        for codec in span.packed:
            self._take_memory(codec)


class FlooredSpan(LevelSpan):
    """Rounds down, as the paper's equation 5 and 8 have it: at 1 bit only the highest level's elements are 1."""

    def encode(self, x: F32, t0: int) -> None:
        half_a_step = self.arrays["step"].view(np.float16).astype(np.float32)[..., None] / 2
        super().encode(x - half_a_step, t0)


class FlooredLevels(SplitLevels):
    """`visual1` as the paper prints it."""

    name = "floored"
    Knobs = VisualKnobs

    def _add_span(self, start: int, stop: int) -> None:
        keys, values = (
            FlooredSpan(*self._shape(stop - start), self.knobs.bits, self.knobs.group) for _ in range(2)
        )
        self._add(Span(start, stop, (keys, values)))


def _onebit(bits: int) -> Callable[..., Pair]:
    def pair(*shape: int, group: int) -> Pair:
        return CentredPlanes(*shape, bits=1, key_scale=LAM, seed=SEED), InterleavedValues(
            *shape, bits=bits, seed=SEED
        )

    return pair


def _bitplane(*shape: int, group: int) -> Pair:
    keys = TwoStageKeys(*shape, key_scale=LAM, seed=SEED)
    return keys, TwoStageValues(keys, n_rep=group, threshold=P)


def _h1b(*shape: int, group: int) -> Pair:
    keys = SignSketch(*shape, SKETCH, SEED)
    keys.tau[:] = DEFAULT_TAU
    return keys, Int4(*shape)


CODES: dict[str, Callable[..., Pair]] = {
    "onebit:v_bits=1": _onebit(1),
    "onebit:v_bits=2": _onebit(2),
    "bitplane": _bitplane,
    "h1b": _h1b,
}


@dataclasses.dataclass(frozen=True)
class CodedKnobs(VisualKnobs):
    code: str = "onebit:v_bits=1"


class CodedSpans(SplitLevels):
    """Pictures, of a multiple of 64 tokens each, in one of CODES. bitplane: one picture in a conversation."""

    name = "coded"
    Knobs = CodedKnobs

    def _add_span(self, start: int, stop: int) -> None:
        pair = CODES[self.knobs.code](*self._shape(stop - start), group=self.geometry.n_rep)
        self._add(Span(start, stop, pair))

    def _pack_if_complete(self, run: Run) -> None:
        span = run.span
        if span and span.exact and run.stop == span.stop:
            for codec, exact in zip(span.packed, span.exact, strict=True):
                codec.encode(exact.decode(0, span.stop - span.start), 0)
            span.exact = None
            self._list_arrays()


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
