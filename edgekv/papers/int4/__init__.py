"""4 bits per element: symmetric keys and values (MiniCache in H1B-KV's tables), and H1B-KV's own affine values.

Measured here (docs/papers.md): perplexity x1.009 to x1.12; it fails where a channel of the keys is an outlier.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from edgekv.codecs.codec import Codec, Layout, in_package, round_up_to_f16
from edgekv.codecs.ints import Int8
from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.policies import FullCache
from edgekv.papers import from_half, pack_codes, require_whole_bytes, unpack_codes
from edgekv.types import F32


class Int4(Codec):
    """Affine codes round(x / delta) + zero in 0..15 per token (H1B-KV eq. 4): head_dim / 2 + 3 bytes.

    Byte j of a token has element j in its low nibble and element j + head_dim / 2 in its high one. delta: float16
    bits of (hi - lo) / 15, rounded up so that the range is covered, where lo = min(x, 0) and hi = max(x, 0); zero
    is round(-lo / delta). Halves round to even. A token of zeros has delta 0 and decodes to zeros.
    """

    kind = "int4"
    backends = in_package("edgekv.papers.int4")

    def layout(self) -> Layout:
        tokens = (self.n_kv_heads, self.capacity)
        codes = (*tokens, self.head_dim // 2)
        return {"codes": (codes, "uint8"), "delta": (tokens, "uint16"), "zero": (tokens, "uint8")}

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.head_dim // 2 + 3)

    def encode(self, x: F32, t0: int) -> None:
        """Stores finite x (n_kv_heads, n, head_dim) as tokens t0.."""
        codes, delta, zero = (self.arrays[name][:, t0 : t0 + x.shape[1]] for name in ("codes", "delta", "zero"))
        lo, hi = np.minimum(x.min(axis=2), 0), np.maximum(x.max(axis=2), 0)  # (n_kv_heads, n)
        delta[:] = round_up_to_f16((hi - lo) / np.float32(15))
        step = from_half(delta)
        step[step == 0] = 1  # only if all elements are (nearly) zero: they round to code 0
        offset = np.rint(-lo / step)
        zero[:] = offset
        levels = np.clip(np.rint(x / step[..., None]) + offset[..., None], 0, 15).astype(np.uint8)
        half = x.shape[2] // 2
        codes[:] = levels[..., :half] | levels[..., half:] << 4

    def decode(self, t0: int, t1: int) -> F32:
        codes, delta, zero = (self.arrays[name][:, t0:t1] for name in ("codes", "delta", "zero"))
        levels = np.concatenate([codes & 15, codes >> 4], axis=2).astype(np.float32)
        values: F32 = (levels - zero[..., None]) * from_half(delta)[..., None]
        return values


class Symmetric4(Int8):
    """`Int8` with levels -7..7, stored plus 8, two to a byte: head_dim / 2 + 2 bytes."""

    kind = "symmetric4"
    backends = in_package("edgekv.papers.int4")

    def layout(self) -> Layout:
        codes = self.n_kv_heads, self.capacity, self.head_dim // 2
        return super().layout() | {"codes": (codes, "uint8")}

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.head_dim // 2 + 2)

    def encode(self, x: F32, t0: int) -> None:
        """Stores finite x (n_kv_heads, n, head_dim) as tokens t0.."""
        codes = (self.levels(x, t0, 7) + 8).astype(np.uint8)
        self.arrays["codes"][:, t0 : t0 + x.shape[1]] = pack_codes(codes, self.head_dim // 2)

    def stored_levels(self, t0: int, t1: int) -> F32:
        return unpack_codes(self.arrays["codes"][:, t0:t1], self.head_dim) - 8


@dataclasses.dataclass(frozen=True)
class Int4CacheConfig:
    """Has no options."""


class Int4Cache(FullCache):
    """Symmetric 4-bit keys and values, a scale per token: 2 * (head_dim/2 + 2) bytes per token and KV head.

    It is the baseline of H1B-KV's Tables I to III ("MiniCache (4-bit): symmetric quantization"). No token stays
    exact, and queries are not quantized. The published MiniCache (arXiv 2405.14366) is something else: it merges
    the caches of neighbouring layers.
    """

    name = "int4"
    version = 2  # keys token by token
    paper = "H1B-KV's 4-bit baseline"
    summary = "symmetric 4-bit keys and values, one scale per token"
    tradeoff = "precision in every key: one outlier channel sets the scale of a whole token"
    Config = Int4CacheConfig

    def codecs(self, geometry: Geometry, config: Int4CacheConfig) -> tuple[Codec, Codec]:
        require_whole_bytes("int4", geometry.head_dim, 2)
        shape = geometry.n_kv_heads, geometry.capacity, geometry.head_dim
        return Symmetric4(*shape), Symmetric4(*shape)
