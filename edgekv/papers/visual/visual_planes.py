"""visual=planes (ours): image tokens as `planes` keeps them, text tokens in f16."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from edgekv.kvcache.codec_planes import CentredPlanes, InterleavedValues
from edgekv.kvcache.codecs import WORD, Codec
from edgekv.kvcache.knobs import Knobs, number, one_of, seed
from edgekv.kvcache.planes import KEY_SCALES
from edgekv.papers.visual.image_spans import TEXTS, ImageSpans


@dataclasses.dataclass(frozen=True)
class VisualPlanesKnobs(Knobs):
    """What `visual=planes` can be set to.

    k_bits: int, default 1. Bits of a key's element of an image token: 1, 2, 3 or 4.
    v_bits: int, default 1. Bits of a value's element: 1, 2, 3 or 4.
    key_scale: float, default 0. As of `planes`: factor of the estimated scores, 0 takes the best for the bits.
    seed: int, default 0. Of the random rotation of keys and values.
    text: str, default "f16". Format of all other tokens: f16 or f32.
    """

    scheme: ClassVar[str] = "visual=planes"

    k_bits: int = one_of(1, KEY_SCALES)
    v_bits: int = one_of(1, KEY_SCALES)
    key_scale: float = number(0.0, 0, 2)
    seed: int = seed()
    text: str = one_of("f16", TEXTS)


class VisualPlanes(ImageSpans):
    """`planes` for the spans that `mark_images` names, in whole blocks of 64 tokens; f16 for the rest.

    An image token of a KV head takes what a packed token of `planes` takes: 22.7 bytes with 1 and 1 bits at
    head_dim 64. What of a picture fills no block stays in f16, and so does text (4 * head_dim bytes; text=f32: 8).
    Without a marked span this is `dense`.
    """

    name = VisualPlanesKnobs.scheme
    aliases = ("visual_planes",)
    paper = "ours; estimator of RaBitQ"
    summary = "image tokens in 1- to 4-bit keys and values as planes has them, text tokens in f16"
    tradeoff = "saves nothing on text: only spans that are marked visual are packed"
    block = WORD
    Knobs = VisualPlanesKnobs

    def span_codecs(self, n_kv_heads: int, n_tokens: int, head_dim: int) -> tuple[Codec, Codec]:
        shape, knobs = (n_kv_heads, n_tokens, head_dim), self.knobs
        key_scale = knobs.key_scale or KEY_SCALES[knobs.k_bits]
        keys = CentredPlanes(*shape, bits=knobs.k_bits, key_scale=key_scale, seed=knobs.seed)
        return keys, InterleavedValues(*shape, bits=knobs.v_bits, seed=knobs.seed)
