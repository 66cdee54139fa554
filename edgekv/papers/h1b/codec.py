"""H1B-KV's codecs: keys as signs of a random projection, values in four bits."""

from __future__ import annotations

import numpy as np

from edgekv.codecs.codec import WORD, Codec, Layout, in_package
from edgekv.kernels import Kernels
from edgekv.papers.h1b.reference import pack_sign_rows, pack_signs, scores_signs
from edgekv.papers.int4.reference import decode_int4, encode_int4
from edgekv.types import F32, Array


class SignSketch(Codec):
    """sign(R k): ``bits`` sign bits per key under a fixed Gaussian R (H1B-KV eq. 2); queries likewise (eq. 3).

    Both sides are signs, so scores are (1 / bits) s_q . s_k / tau. `tau` (n_kv_heads, R) is the softmax
    temperature (eq. 5): of all query heads of a KV head, or of each of the R that share it. `set_learned` puts a
    trained R and a trained ``centre`` of each head's keys in place, which they lose before they are projected.
    """

    kind = "signs"
    backends = in_package("edgekv.papers.h1b")

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int, seed: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.bits = bits
        self.tau: F32 = np.ones((n_kv_heads, 1), np.float32)
        rng = np.random.Generator(np.random.PCG64(seed))
        self.projection = rng.standard_normal((bits, head_dim)).astype(np.float32)  # R: not stored per token
        self.centre: F32 = np.zeros((n_kv_heads, head_dim), np.float32)
        self.is_centred = False

    def set_learned(self, projection: F32 | None, centre: F32 | None) -> None:
        """R (bits, head_dim) and the keys' centres (n_kv_heads, head_dim), before `bind`; None: as it is."""
        if projection is not None:
            self.projection = np.ascontiguousarray(projection, np.float32)
        if centre is not None:
            self.centre, self.is_centred = np.ascontiguousarray(centre, np.float32), True

    def layout(self) -> Layout:
        blocks = -(-self.capacity // WORD)
        return {"signs": ((self.n_kv_heads, blocks, self.bits // WORD, WORD), "uint64")}

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * self.bits // 8

    def bind(self, arrays: dict[str, Array], kernels: Kernels) -> None:
        """Takes the arrays of `layout`, (n_kv_heads, ...) each, and the kernels."""
        super().bind(arrays, kernels)
        self.projection = np.asarray(self.projection, like=arrays["signs"])
        self.centre = np.asarray(self.centre, like=arrays["signs"])

    def centred(self, x: F32) -> F32:
        """Keys (n_kv_heads, n, head_dim) as they are projected."""
        return x - self.centre[:, None] if self.is_centred else x

    def encode(self, x: F32, t0: int) -> None:
        pack_signs(self.centred(x) @ self.projection.T, self.arrays["signs"], t0)

    def scores(self, q: F32, t0: int, t1: int) -> F32:
        """H1B-KV, equations 2, 3 and 5: query m = r * n + j has the temperature of head r."""
        scale = np.repeat(1 / (self.bits * self.tau), q.shape[1] // self.tau.shape[1], axis=1)
        s = np.empty((*q.shape[:2], t1 - t0), np.float32)
        scores_signs(pack_sign_rows(q @ self.projection.T), self.arrays["signs"], t0, t1, scale, s, 0)
        return s


class Int4(Codec):
    """4-bit affine per token: round(v / delta) + z (H1B-KV eq. 4), two codes to a byte."""

    kind = "int4"
    backends = in_package("edgekv.papers.int4")

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

    def encode(self, x: F32, t0: int) -> None:
        encode_int4(x, self.arrays["codes"], self.arrays["delta"], self.arrays["zero"], t0)

    def decode(self, t0: int, t1: int) -> F32:
        return decode_int4(*(self.arrays[name][:, t0:t1] for name in ("codes", "delta", "zero")))
