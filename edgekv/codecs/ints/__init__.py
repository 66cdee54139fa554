"""The codec of 8-bit integers with a scale per token."""

from __future__ import annotations

import numpy as np

from edgekv.codecs.codec import Codec, Layout, from_half, in_package, round_up_to_f16
from edgekv.types import F32


class Int8(Codec):
    """Tokens in levels -127..127, signed bytes, times a float16 scale for each token: head_dim + 2 bytes.

    The scale is the token's largest magnitude over 127, rounded up; levels are round(x / scale), halves to even. A
    token of zeros has scale 0 and decodes to zeros.
    """

    kind = "int8"
    backends = in_package("edgekv.codecs.ints")

    def layout(self) -> Layout:
        tokens = self.n_kv_heads, self.capacity
        return {"codes": ((*tokens, self.head_dim), "int8"), "scale": (tokens, "uint16")}

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.head_dim + 2)

    def encode(self, x: F32, t0: int) -> None:
        self.arrays["codes"][:, t0 : t0 + x.shape[1]] = self.levels(x, t0, 127)

    def levels(self, x: F32, t0: int, top: int) -> F32:
        """Returns levels -top..top of x (n_kv_heads, n, head_dim), and stores the scales of tokens t0.."""
        tokens = slice(t0, t0 + x.shape[1])
        self.arrays["scale"][:, tokens] = round_up_to_f16(np.abs(x).max(axis=2) / np.float32(top))
        step = from_half(self.arrays["scale"][:, tokens])
        step[step == 0] = 1  # only if all elements are (nearly) zero: they round to 0
        levels: F32 = np.clip(np.rint(x / step[..., None]), -top, top)
        return levels

    def decode(self, t0: int, t1: int) -> F32:
        values: F32 = self.stored_levels(t0, t1) * from_half(self.arrays["scale"][:, t0:t1])[..., None]
        return values

    def stored_levels(self, t0: int, t1: int) -> F32:
        """Returns the levels (n_kv_heads, t1 - t0, head_dim) of tokens t0..t1."""
        return self.arrays["codes"][:, t0:t1].astype(np.float32)
