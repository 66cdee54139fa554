"""Symmetric integers of eight or four bits with a scale per token."""

from __future__ import annotations

import numpy as np

from edgekv.codecs.codec import Codec, Layout, in_package, round_up_to_f16
from edgekv.types import F32, U8, U16


class Int8(Codec):
    """Levels -127..127 as signed bytes times a float16 scale per token: head_dim + 2 bytes.

    The scale is the token's largest magnitude over 127, rounded up; levels are round(x / scale), halves to even. A
    token of zeros has scale 0 and decodes to zeros.
    """

    kind = "int8"
    backends = in_package("edgekv.codecs.ints")
    top = 127

    def layout(self) -> Layout:
        return self._layout(self.head_dim, "int8")

    def _layout(self, n_bytes: int, dtype: str) -> Layout:
        tokens = self.n_kv_heads, self.capacity
        return {"codes": ((*tokens, n_bytes), dtype), "scale": (tokens, "uint16")}

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.head_dim + 2)

    def encode(self, x: F32, t0: int) -> None:
        tokens = slice(t0, t0 + x.shape[1])
        self.arrays["scale"][:, tokens] = round_up_to_f16(np.abs(x).max(axis=2) / np.float32(self.top))
        step = _widen(self.arrays["scale"][:, tokens])
        step[step == 0] = 1  # only if all elements are (nearly) zero: they round to 0
        levels = np.clip(np.rint(x / step[..., None]), -self.top, self.top)
        self.arrays["codes"][:, tokens] = self._codes(levels)

    def decode(self, t0: int, t1: int) -> F32:
        scale = _widen(self.arrays["scale"][:, t0:t1])
        levels: F32 = self._levels(self.arrays["codes"][:, t0:t1]) * scale[..., None]
        return levels

    def _codes(self, levels: F32) -> F32 | U8:
        return levels

    def _levels(self, codes: U8) -> F32:
        return codes.astype(np.float32)


class Symmetric4(Int8):
    """`Int8` with levels -7..7 plus 8, two to a byte: head_dim / 2 + 2 bytes."""

    kind = "symmetric4"
    top = 7

    def layout(self) -> Layout:
        return self._layout(self.head_dim // 2, "uint8")

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.head_dim // 2 + 2)

    def _codes(self, levels: F32) -> F32 | U8:
        return pack_codes((levels + 8).astype(np.uint8), self.head_dim // 2)

    def _levels(self, codes: U8) -> F32:
        return unpack_codes(codes, self.head_dim) - 8


def pack_codes(levels: U8, n_bytes: int) -> U8:
    """Codes (..., D) of 8, 4 or 2 bits, the parts of a head over each other in (..., n_bytes)."""
    parts = levels.reshape(*levels.shape[:-1], -1, n_bytes)
    packed: U8 = parts[..., 0, :].copy()
    for i in range(1, parts.shape[-2]):
        packed |= parts[..., i, :] << np.uint8(8 // parts.shape[-2] * i)
    return packed


def unpack_codes(codes: U8, head_dim: int) -> F32:
    """The codes (..., D) in bytes (..., n_bytes), as numbers."""
    n_bits = 8 * codes.shape[-1] // head_dim
    shifts = np.arange(0, 8, n_bits, dtype=np.uint8)[:, None]
    parts: U8 = (codes[..., None, :] >> shifts) & np.uint8(2**n_bits - 1)
    return parts.reshape(*codes.shape[:-1], head_dim).astype(np.float32)


def _widen(bits: U16) -> F32:
    return bits.view(np.float16).astype(np.float32)
