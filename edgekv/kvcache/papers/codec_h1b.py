"""H1B-KV's codecs: keys as signs of a random projection, values in four bits."""

from __future__ import annotations

import numpy as np

from edgekv.kernels import Kernels
from edgekv.kvcache.base import Layout
from edgekv.kvcache.codecs import WORD, Codec
from edgekv.types import F32, Array


class SignSketch(Codec):
    """sign(R k): ``bits`` sign bits per key under a fixed Gaussian R (H1B-KV eq. 2); queries likewise (eq. 3).

    Both sides are signs, so scores are (1 / bits) s_q . s_k / tau. `tau` (n_kv_heads, R) is the softmax
    temperature (eq. 5): of all query heads of a KV head, or of each of the R that share it.
    """

    kind = "signs"

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int, seed: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.bits = bits
        self.tau: F32 = np.ones((n_kv_heads, 1), np.float32)
        rng = np.random.Generator(np.random.PCG64(seed))
        self.projection = rng.standard_normal((bits, head_dim)).astype(np.float32)  # R: not stored per token

    def layout(self) -> Layout:
        blocks = -(-self.capacity // WORD)
        return {"signs": ((self.n_kv_heads, blocks, self.bits // WORD, WORD), "uint64")}

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * self.bits // 8

    def bind(self, arrays: dict[str, Array], kernels: Kernels) -> None:
        super().bind(arrays, kernels)
        self.projection = np.asarray(self.projection, like=arrays["signs"])


class Int4(Codec):
    """4-bit affine per token: round(v / delta) + z (H1B-KV eq. 4), two codes to a byte."""

    kind = "int4"

    def layout(self) -> Layout:
        tokens = (self.n_kv_heads, self.capacity)
        return {
            "codes": ((*tokens, self.head_dim // 2), "uint8"),
            "delta": (tokens, "uint16"),
            "zero": (tokens, "uint8"),
        }

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.head_dim // 2 + 3)
