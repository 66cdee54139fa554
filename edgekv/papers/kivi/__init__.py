"""KIVI: 2-bit keys per channel over a group of tokens, 2-bit values per token, the latest tokens exact."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from edgekv.codecs.codec import Codec, Layout, WindowCodecs, in_package
from edgekv.codecs.f16 import f16_codecs
from edgekv.errors import CacheError
from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.config import Config, bad_option, number, one_of, tokens
from edgekv.kvcache.windowed import SinkWindowCache, Sizes
from edgekv.papers.kivi import reference
from edgekv.types import F32


class KiviKeys(Codec):
    """low + step * code per channel of ``group`` tokens: head_dim * (bits / 8 + 4 / group) bytes.

    Whole groups only: they are encoded from a multiple of ``group`` on, and ``capacity`` is one.
    """

    kind = "kivi_keys"
    backends = in_package("edgekv.papers.kivi")

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int, group: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.n_bytes, self.group = head_dim * bits // 8, group

    def layout(self) -> Layout:
        ends = (self.n_kv_heads, self.capacity // self.group, self.head_dim)
        return {
            "codes": ((self.n_kv_heads, self.capacity, self.n_bytes), "uint8"),
            "step": (ends, "uint16"),
            "low": (ends, "uint16"),
        }

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.n_bytes + -(-4 * self.head_dim // self.group))

    def encode(self, x: F32, t0: int) -> None:
        a = self.arrays
        reference.encode_kivi_keys(x, a["codes"], a["step"], a["low"], t0)

    def decode(self, t0: int, t1: int) -> F32:
        return reference.kivi_keys(self, t0, t1)


class KiviValues(Codec):
    """low + step * code per token and ``span`` of channels: head_dim * (bits / 8 + 4 / span) bytes."""

    kind = "kivi_values"
    backends = in_package("edgekv.papers.kivi")

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int, span: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.n_bytes, self.spans = head_dim * bits // 8, head_dim // span

    def layout(self) -> Layout:
        ends = (self.n_kv_heads, self.spans, self.capacity)
        return {
            "codes": ((self.n_kv_heads, self.capacity, self.n_bytes), "uint8"),
            "step": (ends, "uint16"),
            "low": (ends, "uint16"),
        }

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.n_bytes + 4 * self.spans)

    def encode(self, x: F32, t0: int) -> None:
        a = self.arrays
        reference.encode_kivi_values(x, a["codes"], a["step"], a["low"], t0)

    def decode(self, t0: int, t1: int) -> F32:
        return reference.kivi_values(self, t0, t1)


@dataclasses.dataclass(frozen=True)
class KiviConfig(Config):
    """What `kivi2` can be set to.

    bits: int, default 2. Bits of an element of keys and values: 2 or 4.
    residual_length: int, default 128. Latest tokens that stay in f16, at least.
    group: int, default 32. Tokens whose keys share a range per channel, packed together: 32, 64 or 128.
    vgroup: int, default 0. Channels of a value that share a range; it must divide head_dim, 0 is all of them.
    """

    scheme: ClassVar[str] = "kivi2"

    bits: int = one_of(2, (2, 4))
    residual_length: int = tokens(128)
    group: int = one_of(32, (32, 64, 128))
    vgroup: int = number(0, 0, 65536, " channels, 0 for all")


class Kivi(SinkWindowCache):
    """x ~ low + step * code, ends per channel of a group of keys and per value: older ones are packed.

    head_dim * (bits/8 + 4/group) + head_dim * (bits/8 + 4/vgroup) bytes per packed token and KV head, with
    vgroup = head_dim for 0, and 4 * head_dim for each of residual_length + group exact tokens. KIVI (arXiv
    2402.02750), equations 1-4, as H1B-KV and KVComp use it. Deviations: one range per value instead of one per 32
    channels (``vgroup=32`` has KIVI's), and the last residual_length..residual_length + group - 1 tokens are
    exact, keys and values alike, where KIVI packs its values token by token.
    """

    name = "kivi2"
    version = 2  # keys token by token
    paper = "KIVI; baseline of H1B-KV and KVComp"
    summary = "2-bit keys per channel and 32 tokens, 2-bit values per token, the last 128 tokens exact"
    tradeoff = "a bit per key element for the ranges; the values' outlier channels"
    Config = KiviConfig

    @classmethod
    def window_codecs(cls, config: KiviConfig) -> WindowCodecs:
        return f16_codecs

    def exact_sizes(self, config: KiviConfig) -> Sizes:
        return Sizes(sink=0, residual_length=config.residual_length, block=config.group)

    def codecs(self, geometry: Geometry, capacity: int, config: KiviConfig) -> tuple[Codec, Codec]:
        head_dim, per_byte = geometry.head_dim, 8 // config.bits
        if head_dim % per_byte:
            raise CacheError(
                f"kv='kivi2:bits={config.bits}' packs {per_byte} elements to a byte: head_dim {head_dim} must be "
                f"a multiple of {per_byte}",
                field="kv",
                value=f"kivi2:bits={config.bits}",
            )
        if config.vgroup and head_dim % config.vgroup:
            raise bad_option("kivi2", "vgroup", config.vgroup, f"a divisor of head_dim {head_dim}")
        shape = geometry.n_kv_heads, capacity, head_dim
        return KiviKeys(*shape, config.bits, config.group), KiviValues(
            *shape, config.bits, config.vgroup or head_dim
        )
