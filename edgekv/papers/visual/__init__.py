"""Image tokens in 1 bit per element between quantiles (Visual 1-bit KV) or as in `planes`; text tokens in f16.

Measured here (docs/papers.md): 1 bit is usable with levels per head and token (86% of things in pictures right),
but not per head; `visual_planes` keeps 99.9% in similar bytes.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from edgekv.codecs.codec import Codec
from edgekv.codecs.planes import CentredPlanes, InterleavedValues
from edgekv.kernels import BLOCK
from edgekv.kvcache.config import Config, number, one_of, seed
from edgekv.kvcache.planes import KEY_SCALES
from edgekv.papers.visual.codec import AXES, LevelSpan, encode_span
from edgekv.papers.visual.image_spans import ImageSpans
from edgekv.types import F32


@dataclasses.dataclass(frozen=True)
class VisualConfig(Config):
    """Options of `visual1`.

    bits: int, default 1. Bits of an element of an image token, 1 to 8.
    group: str, default "head". What shares the range of the levels: layer, tensor, head, head+token or channel.
    quantile: float, default 0.1. The levels reach from this quantile of the group to 1 - quantile; 0 (from least
        to largest) to 0.499. The paper gives no value. With text marked as an image, two small models did best
        with 0.1 at 1 bit (with 0.02 the two levels lie so far out that all scores are inflated), 0.01 at 2 bits,
        0 from 4 bits on.
    k_range: float, default 1. Share of this range, around its middle, that the levels of keys cover, 0.01 to 1.
        CalibQuant's calibration, with quantile=0: 0.5.
    v_range: float, default 1. The same of values; CalibQuant: 0.3.
    """

    scheme: ClassVar[str] = "visual1"

    bits: int = number(1, 1, 8)
    group: str = one_of("head", AXES)
    quantile: float = number(0.1, 0, 0.499)
    k_range: float = number(1.0, 0.01, 1)
    v_range: float = number(1.0, 0.01, 1)


class Visual1(ImageSpans):
    """Visual 1-bit KV, eq. 7-9: image tokens in levels between two quantiles, one bit per element; text in f16.

    `mark_images` names the spans of image tokens; without one this is `dense`. An image token of a KV head takes
    2 * bits * ceil(head_dim / 8) bytes and shares the float16 range of its group: 8 bytes per span (layer,
    tensor), span and KV head (head), KV head and token (head+token), or 8 * head_dim per span and KV head
    (channel). A text token takes 4 * head_dim bytes.

    The groups: "layer", K and V of all heads of this layer together; "tensor", K or V of all heads; "head", K or V
    of one KV head; "head+token", one token of that; "channel", one channel of that. Each is taken over one span,
    not over the whole prompt. A span is packed when its last token has come, and exact (f16) until then.

    group=channel with k_range and v_range is the later version, CalibQuant (arXiv 2502.14882v2), without its
    calibration of scores, which made answers worse. Deviation: the paper rounds down, so that at 1 bit only
    x >= Q(1 - quantile) becomes 1; here x goes to the nearest level, and the threshold is the midpoint.
    """

    name = "visual1"
    paper = "Visual 1-bit KV, eq. 7-9; CalibQuant"
    summary = "image tokens in 1 bit per element (or bits=2..8) between quantiles per head, text tokens in f16"
    tradeoff = "saves nothing on text: only spans that are marked visual are packed"
    Config = VisualConfig

    def span_codecs(self, n_kv_heads: int, n_tokens: int, head_dim: int) -> tuple[Codec, Codec]:
        arguments = n_kv_heads, n_tokens, head_dim, self.config.bits, self.config.group
        return LevelSpan(*arguments), LevelSpan(*arguments)

    def pack(self, packed: tuple[Codec, Codec], keys: F32, values: F32) -> None:
        """Packs a span's keys and values (n_kv_heads, n_tokens, head_dim)."""
        config = self.config
        encode_span(packed, keys, values, config.quantile, (config.k_range, config.v_range))


@dataclasses.dataclass(frozen=True)
class VisualPlanesConfig(Config):
    """Options of `visual_planes`.

    k_bits: int, default 1. Bits of an element of an image token's key: 1, 2, 3 or 4.
    v_bits: int, default 1. Bits of an element of its value: 1, 2, 3 or 4.
    key_scale: float, default 0. Factor of the estimated scores, as in `planes`; 0 takes the best for the bits.
    seed: int, default 0. Seed of the random rotation of keys and values.
    """

    scheme: ClassVar[str] = "visual_planes"

    k_bits: int = one_of(1, KEY_SCALES)
    v_bits: int = one_of(1, KEY_SCALES)
    key_scale: float = number(0.0, 0, 2)
    seed: int = seed()


class VisualPlanes(ImageSpans):
    """Image tokens in `planes`, in whole blocks of 64 tokens; text, and the rest of an image, in f16.

    `mark_images` names the spans of image tokens; without one this is `dense`. An image token of a KV head takes
    as much as a packed token of `planes`, 22.7 bytes with 1 and 1 bits at head_dim 64; a text token 4 *
    head_dim.
    """

    name = VisualPlanesConfig.scheme
    paper = "ours; estimator of RaBitQ"
    summary = "image tokens in 1- to 4-bit keys and values as planes has them, text tokens in f16"
    tradeoff = "saves nothing on text: only spans that are marked visual are packed"
    block = BLOCK
    Config = VisualPlanesConfig

    def span_codecs(self, n_kv_heads: int, n_tokens: int, head_dim: int) -> tuple[Codec, Codec]:
        shape, config = (n_kv_heads, n_tokens, head_dim), self.config
        key_scale = config.key_scale or KEY_SCALES[config.k_bits]
        keys = CentredPlanes(*shape, bits=config.k_bits, key_scale=key_scale, seed=config.seed)
        return keys, InterleavedValues(*shape, bits=config.v_bits, seed=config.seed)
