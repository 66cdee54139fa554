"""H1B-KV's keys: signs of a random projection, 64 to a word, compared by XOR and a count of 1 bits."""

from __future__ import annotations

import numpy as np

from edgekv.codecs.codec import Codec, Layout, in_package
from edgekv.kernels import BLOCK, Kernels
from edgekv.types import F32, U64, Array


class SignSketch(Codec):
    """Keys as sign(R k), ``bits`` sign bits under a fixed Gaussian R (H1B-KV eq. 2); queries likewise (eq. 3).

    Scores are (1 / bits) s_q . s_k / tau. tau (n_kv_heads, 1 or n_rep): softmax temperature (eq. 5) of all query
    heads of a KV head, or of each. centre (n_kv_heads, head_dim): is subtracted from keys before projecting.
    """

    kind = "signs"
    backends = in_package("edgekv.papers.h1b")

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int, seed: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.bits = bits
        self.tau: F32 = np.ones((n_kv_heads, 1), np.float32)
        rng = np.random.Generator(np.random.PCG64(seed))
        self.projection = rng.standard_normal((bits, head_dim)).astype(np.float32)  # R: not stored per token
        self.fixed = self.projection
        self.centre: F32 = np.zeros((n_kv_heads, head_dim), np.float32)
        self.is_centred = False

    def set_learned(self, projection: F32 | None, centre: F32 | None) -> None:
        """Replaces, before `bind`, R (bits, head_dim) and the keys' centres (n_kv_heads, head_dim) if given."""
        if projection is not None:
            self.projection = self.fixed = np.ascontiguousarray(projection, np.float32)
        if centre is not None:
            self.centre, self.is_centred = np.ascontiguousarray(centre, np.float32), True

    def layout(self) -> Layout:
        blocks = -(-self.capacity // BLOCK)
        return {"signs": ((self.n_kv_heads, blocks, self.bits // BLOCK, BLOCK), "uint64")}

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * self.bits // 8

    def bind(self, arrays: dict[str, Array], kernels: Kernels) -> None:
        """Takes the arrays of `layout`, (n_kv_heads, ...) each, and the kernels."""
        super().bind(arrays, kernels)
        self.projection = np.asarray(self.projection, like=arrays["signs"])
        self.centre = np.asarray(self.centre, like=arrays["signs"])

    def centred(self, x: F32) -> F32:
        """Returns keys (n_kv_heads, n, head_dim) minus their centres."""
        return x - self.centre[:, None] if self.is_centred else x

    def encode(self, x: F32, t0: int) -> None:
        pack_signs(self.centred(x) @ self.projection.T, self.arrays["signs"], t0)

    def scores(self, q: F32, t0: int, t1: int) -> F32:
        """Returns the scores (n_kv_heads, rows, t1 - t0) of H1B-KV, equations 2, 3 and 5.

        Row m = r * n + j of q (n_kv_heads, rows, head_dim) has the temperature of head r.
        """
        scale = np.repeat(1 / (self.bits * self.tau), q.shape[1] // self.tau.shape[1], axis=1)
        tokens = np.arange(t0, t1)
        keys = self.arrays["signs"][:, tokens // BLOCK, :, tokens % BLOCK].transpose(1, 0, 2)  # (G, tokens, words)
        scores = np.empty((*q.shape[:2], t1 - t0), np.float32)
        for m, query in enumerate(pack_sign_rows(q @ self.projection.T).transpose(1, 0, 2)):
            differing = np.ascontiguousarray(query[:, None] ^ keys).view(np.uint8)
            n_differing = np.unpackbits(differing, axis=-1).sum(axis=-1, dtype=np.int32)
            scores[:, m] = scale[:, m, None] * (self.bits - 2 * n_differing).astype(np.float32)
        return scores


def pack_signs(x: F32, codes: U64, t0: int) -> None:
    """Stores the signs of x (G, n, b) at tokens t0.. of codes (G, cap // 64, W, 64), W = b // 64.

    Token t lies at [:, t // 64, :, t % 64]; bit j of word w is x[..., 64 * w + j] >= 0.
    """
    tokens = np.arange(t0, t0 + x.shape[1])
    # two index arrays apart from each other bring the token axis to the front
    codes[:, tokens // BLOCK, :, tokens % BLOCK] = pack_sign_rows(x).transpose(1, 0, 2)


def pack_sign_rows(x: F32) -> U64:
    """Returns the signs of x (G, M, b) as (G, M, b // 64) words: bit j of word w is x[..., 64 * w + j] >= 0."""
    return np.packbits(x >= 0, axis=-1, bitorder="little").view("<u8")
