"""The codecs of numbers as they are: in half precision, or in single precision as the exact baseline."""

from __future__ import annotations

import numpy as np

from edgekv.codecs.codec import Codec, Layout, in_package
from edgekv.types import F32


class F16(Codec):
    """Tokens in IEEE half precision, rounded to nearest even: 2 bytes per element."""

    kind = "f16"
    backends = in_package("edgekv.codecs.f16")

    def layout(self) -> Layout:
        return {"half": ((self.n_kv_heads, self.capacity, self.head_dim), "uint16")}

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * self.head_dim * 2

    @staticmethod
    def round(x: F32) -> F32:
        """Returns what `decode` gives for x once it is stored, of the shape of x."""
        return x.astype(np.float16).astype(np.float32)

    def encode(self, x: F32, t0: int) -> None:
        self.arrays["half"][:, t0 : t0 + x.shape[1]] = x.astype(np.float16).view(np.uint16)

    def decode(self, t0: int, t1: int) -> F32:
        return self.arrays["half"][:, t0:t1].view(np.float16).astype(np.float32)

    def move(self, t0: int, t1: int, to: int) -> None:
        """Copies tokens t0..t1 to the tokens from ``to`` on; the ranges may overlap."""
        self.arrays["half"][:, to : to + t1 - t0] = self.arrays["half"][:, t0:t1].copy()


def f16_codecs(n_kv_heads: int, capacity: int, head_dim: int) -> tuple[Codec, Codec]:
    """Returns codecs of keys and of values in half precision."""
    return F16(n_kv_heads, capacity, head_dim), F16(n_kv_heads, capacity, head_dim)


class Float32(Codec):
    """Tokens in single precision, 4 bytes per element: the exact baseline. CPUs read `decode`, without a copy."""

    kind = "f32"
    backends = in_package("edgekv.codecs.f16", "cuda")

    def layout(self) -> Layout:
        return {"single": ((self.n_kv_heads, self.capacity, self.head_dim), "float32")}

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * self.head_dim * 4

    def encode(self, x: F32, t0: int) -> None:
        self.arrays["single"][:, t0 : t0 + x.shape[1]] = x

    def decode(self, t0: int, t1: int) -> F32:
        values: F32 = self.arrays["single"][:, t0:t1]
        return values
