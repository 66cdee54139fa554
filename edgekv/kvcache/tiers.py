"""The forms in which `steps` packs tokens, from fine to coarse, and how many tokens of each fit so many bytes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

from edgekv.kernels.aligned import CACHE_LINE_BYTES
from edgekv.kvcache.codec_planes import CentredPlanes, InterleavedValues
from edgekv.kvcache.codecs import WORD, Codec, f16_codecs
from edgekv.kvcache.geometry import layout_bytes
from edgekv.kvcache.planes import KEY_SCALES, PlanesKnobs

ALIGNMENT_BYTES = 32 * CACHE_LINE_BYTES  # of at most 32 arrays in the arena
SEED = PlanesKnobs.seed


class Shape(NamedTuple):
    """Of the keys and values of one layer."""

    n_kv_heads: int
    head_dim: int
    n_rep: int


Pair = tuple[Codec, Codec]


@dataclasses.dataclass(frozen=True)
class Tier:
    """``codecs`` for a shape and a number of tokens."""

    name: str
    codecs: Callable[[Shape, int], Pair]

    def block_bytes(self, shape: Shape) -> int:
        """Bytes of WORD tokens."""
        return sum(layout_bytes(codec.layout()) for codec in self.codecs(shape, WORD))


def _exact(shape: Shape, n: int) -> Pair:
    return f16_codecs(shape.n_kv_heads, n, shape.head_dim)


def _planes(k_bits: int, v_bits: int) -> Callable[[Shape, int], Pair]:
    def codecs(shape: Shape, n: int) -> Pair:
        size = shape.n_kv_heads, n, shape.head_dim
        keys = CentredPlanes(*size, bits=k_bits, key_scale=KEY_SCALES[k_bits], seed=SEED)
        return keys, InterleavedValues(*size, bits=v_bits, seed=SEED)

    return codecs


TIERS = (
    Tier("f16", _exact),
    Tier("4 bits", _planes(4, 4)),
    Tier("3 bits", _planes(3, 3)),
    Tier("2 bits", _planes(2, 2)),
    Tier("2-bit keys and 1-bit values", _planes(2, 1)),
    Tier("1 bit", _planes(1, 1)),
)


def tier_kinds() -> set[str]:
    """Of all tiers' codecs."""
    return {codec.kind for tier in TIERS for codec in tier.codecs(Shape(1, WORD, 1), WORD)}


@functools.cache
def usable_tiers(shape: Shape) -> tuple[Tier, ...]:
    """TIERS without those that are no smaller than a finer one: codes of a narrow head fill whole words."""
    usable = [TIERS[0]]
    for tier in TIERS[1:]:
        if tier.block_bytes(shape) < usable[-1].block_bytes(shape):
            usable.append(tier)
    return tuple(usable)


@dataclasses.dataclass(frozen=True)
class Split:
    """Older tokens, ``coarse``, in tier ``level`` + 1 of `usable_tiers`; ``fine`` later ones in tier ``level``."""

    level: int
    coarse: int
    fine: int

    @property
    def capacity(self) -> int:
        return self.coarse + self.fine


def choose_split(shape: Shape, n_tokens: int, most_tokens: int, n_bytes: int) -> Split | None:
    """The finest that holds n_tokens in n_bytes, with room for more of them (up to most_tokens) if there is.

    All are multiples of WORD tokens. None: they don't fit even in the coarsest tier.
    """
    room = n_bytes - ALIGNMENT_BYTES
    blocks = n_tokens // WORD
    sizes = [tier.block_bytes(shape) for tier in usable_tiers(shape)]
    for level, (fine, coarse) in enumerate(itertools.pairwise(sizes)):
        too_much = blocks * fine - room
        n_coarse = max(0, -(-too_much // (fine - coarse)))
        if n_coarse <= blocks:
            n_fine = min((room - n_coarse * coarse) // fine, most_tokens // WORD - n_coarse)
            return Split(level, n_coarse * WORD, max(0, n_fine) * WORD)
    return None


def least_bytes(shape: Shape, n_tokens: int) -> int:
    """What the coarsest tier needs for them."""
    return n_tokens // WORD * usable_tiers(shape)[-1].block_bytes(shape) + ALIGNMENT_BYTES
