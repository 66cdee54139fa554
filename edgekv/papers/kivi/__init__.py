"""KIVI: 2-bit keys per channel over a group of tokens, 2-bit values per token, the latest tokens exact.

Measured here (docs/papers.md): perplexity x1.002 to x1.007, and every hidden needle is found: the best baseline.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from edgekv.codecs.codec import Codec, Layout, WindowCodecs, in_package
from edgekv.codecs.f16 import f16_codecs
from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.config import Config, bad_option, number, one_of, tokens
from edgekv.kvcache.policies import SinkWindowCache, Sizes
from edgekv.papers import affine_levels, from_half, pack_codes, require_whole_bytes, unpack_codes
from edgekv.types import F32, U8, U16


class KiviCodec(Codec):
    """Base class of codecs x ~ low + step * code: a channel of some tokens, or a token, shares low and step."""

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.bits, self.n_bytes = bits, head_dim * bits // 8

    def _layout(self, *ends: int) -> Layout:
        codes = (self.n_kv_heads, self.capacity, self.n_bytes)
        return {"codes": (codes, "uint8"), "step": (ends, "uint16"), "low": (ends, "uint16")}

    def _levels_of(self, x: F32, axis: int, step: U16, low: U16) -> U8:
        """Returns the codes of x (n_kv_heads, ...), whose elements along the axis share low and step."""
        top = np.float32(2**self.bits - 1)
        return affine_levels(x, axis, low, step, 2**self.bits, lambda span: span / top)


class KiviKeys(KiviCodec):
    """Keys with low and step per channel of ``group`` tokens: head_dim * (bits / 8 + 4 / group) bytes.

    Only whole groups are encoded; ``capacity`` is a multiple of ``group``.
    """

    kind = "kivi_keys"
    backends = in_package("edgekv.papers.kivi")

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int, group: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim, bits)
        self.group = group

    def layout(self) -> Layout:
        return self._layout(self.n_kv_heads, self.capacity // self.group, self.head_dim)

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.n_bytes + -(-4 * self.head_dim // self.group))

    def encode(self, x: F32, t0: int) -> None:
        """Stores x (n_kv_heads, n, head_dim), whole groups of tokens, as tokens t0, t0 + 1, ..."""
        (g, n, head_dim), a = x.shape, self.arrays
        groups = slice(t0 // self.group, (t0 + n) // self.group)
        parts = x.reshape(g, -1, self.group, head_dim)
        levels = self._levels_of(parts, 2, a["step"][:, groups], a["low"][:, groups])
        a["codes"][:, t0 : t0 + n] = pack_codes(levels, self.n_bytes).reshape(g, n, self.n_bytes)

    def decode(self, t0: int, t1: int) -> F32:
        groups = np.arange(t0, t1) // self.group
        step, low = (from_half(self.arrays[name][:, groups]) for name in ("step", "low"))
        keys: F32 = low + step * unpack_codes(self.arrays["codes"][:, t0:t1], self.head_dim)
        return keys


class KiviValues(KiviCodec):
    """Values with low and step per token and ``span`` of channels: head_dim * (bits / 8 + 4 / span) bytes."""

    kind = "kivi_values"
    backends = in_package("edgekv.papers.kivi")

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int, span: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim, bits)
        self.spans = head_dim // span

    def layout(self) -> Layout:
        return self._layout(self.n_kv_heads, self.spans, self.capacity)

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.n_bytes + 4 * self.spans)

    def encode(self, x: F32, t0: int) -> None:
        (g, n, _), a, tokens = x.shape, self.arrays, slice(t0, t0 + x.shape[1])
        spans = x.reshape(g, n, self.spans, -1).transpose(0, 2, 1, 3)
        levels = self._levels_of(spans, 3, a["step"][:, :, tokens], a["low"][:, :, tokens])
        a["codes"][:, tokens] = pack_codes(levels.transpose(0, 2, 1, 3).reshape(x.shape), self.n_bytes)

    def decode(self, t0: int, t1: int) -> F32:
        a, shape = self.arrays, (self.n_kv_heads, t1 - t0, self.spans, -1)
        levels = unpack_codes(a["codes"][:, t0:t1], self.head_dim).reshape(shape)
        step, low = (from_half(a[name][:, :, t0:t1]).transpose(0, 2, 1)[..., None] for name in ("step", "low"))
        values: F32 = (low + step * levels).reshape(self.n_kv_heads, t1 - t0, self.head_dim)
        return values


@dataclasses.dataclass(frozen=True)
class KiviConfig(Config):
    """Options of `kivi2`.

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
    """KIVI (arXiv 2402.02750), equations 1-4: packs older tokens as x ~ low + step * code.

    low and step are per channel of a group of keys, and per value. A packed token of a KV head takes head_dim *
    (bits/8 + 4/group) + head_dim * (bits/8 + 4/vgroup) bytes, with vgroup = head_dim for 0, and each of
    residual_length + group exact tokens 4 * head_dim. It is used as in H1B-KV and KVComp. Deviations: one range
    per value instead of one per 32 channels (``vgroup=32`` has KIVI's), and the last residual_length to
    residual_length + group - 1 tokens are exact, keys and values alike, where KIVI packs values token by token.
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
        head_dim = geometry.head_dim
        require_whole_bytes(f"kivi2:bits={config.bits}", head_dim, 8 // config.bits)
        if config.vgroup and head_dim % config.vgroup:
            raise bad_option("kivi2", "vgroup", config.vgroup, f"a divisor of head_dim {head_dim}")
        shape = geometry.n_kv_heads, capacity, head_dim
        values = KiviValues(*shape, config.bits, config.vgroup or head_dim)
        return KiviKeys(*shape, config.bits, config.group), values
