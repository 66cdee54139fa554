"""The baseline: keys and values as the model made them, in half precision (or in float32, or in 8 bits)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from edgekv.kvcache.codec_ints import SymmetricKeys, SymmetricValues
from edgekv.kvcache.codecs import Codec, Float32, WindowCodecs, f16_codecs
from edgekv.kvcache.geometry import Geometry
from edgekv.kvcache.keepall import KeepAll
from edgekv.kvcache.knobs import Knobs, one_of

DTYPES: dict[str, WindowCodecs] = {  # of heads, tokens, head_dim
    "f16": f16_codecs,
    "f32": lambda g, n, d: (Float32(g, n, d), Float32(g, n, d)),
    "q8": lambda g, n, d: (SymmetricKeys(g, n, d, 8), SymmetricValues(g, n, d, 8)),
}


@dataclasses.dataclass(frozen=True)
class DenseKnobs(Knobs):
    """What `dense` can be set to.

    dtype: str, default "f16". Format of an element: f16, f32, or q8 (8-bit integers with a scale per token).
    """

    scheme: ClassVar[str] = "dense"

    dtype: str = one_of("f16", DTYPES)


class Dense(KeepAll):
    """Every key and value in half precision: 4 * head_dim bytes per token and KV head.

    f32: 8 * head_dim. q8: symmetric levels -127..127 with a float16 scale per token, 2 * (head_dim + 2); keys take
    whole blocks of 32 tokens.
    """

    name = "dense"
    aliases = ("f16",)
    paper = "baseline"
    summary = "keys and values in f16 (or dtype=f32, q8)"
    gives_up = "nothing but memory"
    exact_when_short = True
    Knobs = DenseKnobs

    @classmethod
    def exact_on_text(cls, knobs: DenseKnobs) -> bool:
        return knobs.dtype != "q8"

    @classmethod
    def window_codecs(cls, knobs: DenseKnobs) -> WindowCodecs:
        return DTYPES[knobs.dtype]

    def codecs(self, geometry: Geometry, knobs: DenseKnobs) -> tuple[Codec, Codec]:
        return DTYPES[knobs.dtype](geometry.n_kv_heads, geometry.capacity, geometry.head_dim)
