"""onebit (ours): `planes` with keys of one bit."""

from __future__ import annotations

import dataclasses

from edgekv.kvcache.by_need import LEAST, MOST
from edgekv.kvcache.knobs import number
from edgekv.kvcache.planes import Planes, PlanesKnobs


@dataclasses.dataclass(frozen=True)
class OneBitKnobs(PlanesKnobs):
    """`PlanesKnobs` with k_bits=1 and key_scale=0.9."""

    scheme = "onebit"

    k_bits: float = number(1.0, LEAST, MOST, " bits")
    key_scale: float = number(0.9, 0, 2)


class OneBit(Planes):
    """`planes:k_bits=1`: 57.2 bytes per packed token and KV head at head_dim 128.

    H1B-KV also keeps one bit per key element, but binarises the query too; here four signs look a sum of four
    query elements up, in 7 bits. ``key_scale``, which H1B-KV's learned temperature corresponds to, is 0.9 for all
    heads: fitted per head on the prompt (least cross-entropy) it was no better.
    """

    name = "onebit"
    version = 2  # planes in groups of 16 tokens
    summary = "1-bit keys around 4-bit centres, 2-bit rotated values, first and last tokens exact"
    tradeoff = "exact scores of all but the first and latest tokens (0.5 to 2.5% of perplexity; 5 on foreign text)"
    Knobs = OneBitKnobs
