"""Keys and values behind a fixed rotation, which spreads outlier channels: a few bits then suffice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from edgekv.kernels import Kernels
from edgekv.kernels.interface import CENTRES, GROUPS
from edgekv.kvcache.cache import Layout
from edgekv.kvcache.codecs import WORD, Codec, in_backends
from edgekv.types import F32, I64, Array


class Rotation:
    """x -> P x, P (width, head_dim) with orthonormal columns, fixed by ``seed`` and stored with no token.

    A randomised Hadamard transform of x padded with zeros if ``width`` is a power of two, else the orthogonal
    factor of a Gaussian matrix.
    """

    def __init__(self, head_dim: int, width: int, seed: int) -> None:
        self.head_dim, self.width = head_dim, width
        rng = np.random.Generator(np.random.PCG64(seed))
        self.flips: F32 | None = None
        if width & (width - 1) == 0:
            self.flips = rng.choice(np.array([-1, 1], np.float32), width)
        else:
            self.matrix = np.linalg.qr(rng.standard_normal((width, head_dim)))[0].astype(np.float32)
            self.inverse = np.ascontiguousarray(self.matrix.T)

    def bind(self, like: Array) -> None:
        """Brings the constants to where ``like`` is."""
        if self.flips is None:
            self.matrix = np.asarray(self.matrix, like=like)
            self.inverse = np.asarray(self.inverse, like=like)
        else:
            self.flips = np.asarray(self.flips, like=like)

    def forward(self, x: F32, kernels: Kernels) -> F32:
        """(A, n, width) of x (A, n, head_dim)."""
        if self.flips is None:
            return kernels.project(x, self.matrix)
        out = np.empty_like(x, shape=(*x.shape[:2], self.width))
        kernels.hadamard(x, self.flips, out)
        return out

    def add_back(self, x: F32, out: F32, kernels: Kernels) -> None:
        """out (A, n, head_dim) += the inverse of x (A, n, width)."""
        if self.flips is None:
            out += kernels.project(x, self.inverse)
        else:
            kernels.hadamard_back(x, self.flips, out)


class CentredPlanes(Codec):
    """Centres of 64 and of 16 tokens in 4 bits, and planes of a few bits per element of the rest, with one scale.

    r = P k - c; x is r in the best uniform levels for a Gaussian (for 1 bit sign(r)), f = |r|_2 ** 2 / (r . x):
    q . k ~ (P q) . c + key_scale * f * (P q) . x, by tables of signed sums. P has ``width`` rows: head_dim rounded
    up to a multiple of 64, every bit of which thus tells something. `bits` (n_kv_heads,) are those of each head, 1
    to 4, `first_plane` (n_kv_heads,) says where its planes begin; `key_scale` (n_kv_heads,) shrinks the estimate:
    1 is unbiased. `spread` (n_kv_heads, head_dim) stretches a key's channels before all that, and `query_factors`,
    1 / spread, a query's, so that the noise, even in all directions, is least where queries are long.
    """

    kind = "centred_planes"
    backends = in_backends("planes")

    def __init__(
        self,
        n_kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        bits: int | Sequence[int],
        key_scale: float | Sequence[float],
        seed: int,
        spread: F32 | None = None,
    ) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.bits, self.first_plane = bits_of_heads(bits, n_kv_heads)
        even = np.ones((n_kv_heads, head_dim), np.float32)
        self.spread = even if spread is None else np.ascontiguousarray(spread)
        self.query_factors: F32 = np.divide(np.float32(1), self.spread)
        self.query_flips: F32 | None = None  # of a Hadamard rotation: its signs times query_factors
        self.heads = np.stack([self.first_plane, self.bits], axis=1).astype(np.int32)
        self.width = -(-head_dim // WORD) * WORD
        self.key_scale: F32 = np.broadcast_to(np.asarray(key_scale, np.float32), n_kv_heads).copy()
        self.rotation = Rotation(head_dim, self.width, seed)

    def layout(self) -> Layout:
        g, blocks, width = self.n_kv_heads, self.capacity // WORD, self.width
        return {
            "planes": ((int(self.bits.sum()), blocks, GROUPS, width // 8, WORD // GROUPS), "uint8"),
            "scale": ((g, self.capacity), "uint16"),
            "centres": ((g, blocks, CENTRES, width // 2), "uint8"),
            "centre_step": ((g, blocks, CENTRES), "uint16"),
        }

    @property
    def token_bytes(self) -> int:
        """Rounded up: the centres' share need not be whole."""
        return -(-self.block_bytes // WORD)

    def bytes_of(self, n_tokens: int) -> int:
        return -(-n_tokens * self.block_bytes // WORD)

    @property
    def block_bytes(self) -> int:
        """Bytes of WORD tokens, all heads together."""
        centres = WORD * 2 + CENTRES * (self.width // 2 + 2)
        return int(self.bits.sum()) * WORD * self.width // 8 + self.n_kv_heads * centres

    def bind(self, arrays: dict[str, Array], kernels: Kernels) -> None:
        """Takes the arrays of `layout`, (n_kv_heads, ...) each, and the kernels."""
        super().bind(arrays, kernels)
        self.rotation.bind(arrays["planes"])
        self.key_scale = np.asarray(self.key_scale, like=arrays["planes"])
        self.spread = np.asarray(self.spread, like=arrays["planes"])
        self.query_factors = np.asarray(self.query_factors, like=arrays["planes"])
        if self.rotation.flips is not None:
            self.query_flips = self.query_factors * self.rotation.flips[: self.head_dim]
        self.heads = np.asarray(self.heads, like=arrays["planes"])

    def encode(self, x: F32, t0: int) -> None:
        """Stores x (n_kv_heads, n, head_dim) as tokens t0.."""
        a = self.arrays
        rotated = self.rotation.forward(x * self.spread[:, None], self.kernels)
        self.kernels.encode_centres(rotated, a["centres"], a["centre_step"], t0)
        for heads, planes in runs_of_heads(self.bits, a["planes"]):
            self.kernels.encode_keys(rotated[heads], planes, a["scale"][heads], t0)


def bits_of_heads(bits: int | Sequence[int], n_kv_heads: int) -> tuple[I64, I64]:
    """Bits of each head, and how many all heads before it have. Both (n_kv_heads,)."""
    each = np.broadcast_to(np.asarray(bits, np.int64), n_kv_heads).copy()
    return each, np.cumsum(each) - each


def runs_of_heads(bits: I64, store: Array) -> Iterator[tuple[slice, Array]]:
    """Neighbouring heads of as many bits, and their part of store (all bits, blocks, ...): head, block, bit."""
    first, row = 0, 0
    for b, run in itertools.groupby(bits.tolist()):
        n = len(list(run))
        yield slice(first, first + n), store[row : row + n * b].reshape(n, store.shape[1], b, *store.shape[2:])
        first, row = first + n, row + n * b


class InterleavedValues(Codec):
    """A few bits per element of P v, with one scale: the best uniform levels for a Gaussian, not shrunk.

    `bits` and `first_plane` (n_kv_heads,) as those of `CentredPlanes`; a plane is two rows of codes here.
    """

    kind = "interleaved"
    backends = in_backends("planes")

    def __init__(
        self, n_kv_heads: int, capacity: int, head_dim: int, *, bits: int | Sequence[int], seed: int
    ) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.bits, self.first_plane = bits_of_heads(bits, n_kv_heads)
        self.heads = np.stack([self.first_plane, self.bits], axis=1).astype(np.int32)
        self.rotation = Rotation(head_dim, head_dim, seed)

    def layout(self) -> Layout:
        g, capacity = self.n_kv_heads, self.capacity
        return {
            "codes": ((int(self.bits.sum()), capacity // WORD, 2, self.head_dim, 4), "uint8"),
            "scale": ((g, capacity), "uint16"),
        }

    @property
    def token_bytes(self) -> int:
        return int((-(-(self.bits * self.head_dim + 16) // 8)).sum())

    def bind(self, arrays: dict[str, Array], kernels: Kernels) -> None:
        """Takes the arrays of `layout`, (n_kv_heads, ...) each, and the kernels."""
        super().bind(arrays, kernels)
        self.rotation.bind(arrays["codes"])
        self.heads = np.asarray(self.heads, like=arrays["codes"])

    def encode(self, x: F32, t0: int) -> None:
        """Stores x (n_kv_heads, n, head_dim) as tokens t0.."""
        a = self.arrays
        rotated = self.rotation.forward(x, self.kernels)
        for heads, planes in runs_of_heads(self.bits, a["codes"]):
            codes = planes.reshape(*planes.shape[:2], -1, self.head_dim, 4)
            self.kernels.encode_interleaved(rotated[heads], codes, a["scale"][heads], t0)
