"""Symmetric 4-bit keys and values with a scale per token: what H1B-KV compares against as MiniCache."""

from __future__ import annotations

import dataclasses

from edgekv.codecs.codec import Codec
from edgekv.codecs.ints import Symmetric4
from edgekv.errors import CacheError
from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.full import FullCache


@dataclasses.dataclass(frozen=True)
class Int4CacheConfig:
    """None."""


class Int4Cache(FullCache):
    """k, v ~ scale * round(x / scale), levels -7..7: 2 * (head_dim/2 + 2) bytes per token and KV head.

    The baseline of H1B-KV's Tables I to III ("MiniCache (4-bit): symmetric quantization"). No token is kept exact,
    and the query is not quantised. The published MiniCache (arXiv 2405.14366)
    is something else: it merges the caches of neighbouring layers.
    """

    name = "int4"
    version = 2  # keys token by token
    paper = "H1B-KV's 4-bit baseline"
    summary = "symmetric 4-bit keys and values, one scale per token"
    tradeoff = "precision in every key: one outlier channel sets the scale of a whole token"
    Config = Int4CacheConfig

    def codecs(self, geometry: Geometry, config: Int4CacheConfig) -> tuple[Codec, Codec]:
        if geometry.head_dim % 2:
            raise CacheError(
                f"kv='int4' packs two elements to a byte: head_dim {geometry.head_dim} must be even",
                field="kv",
                value="int4",
            )
        shape = geometry.n_kv_heads, geometry.capacity, geometry.head_dim
        return Symmetric4(*shape), Symmetric4(*shape)
