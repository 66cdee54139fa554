"""Keys and values behind a fixed rotation, which spreads outlier channels: a few bits then suffice."""

from __future__ import annotations

import numpy as np

from edgekv.kernels import Kernels
from edgekv.kernels.spec_planes import CENTRE
from edgekv.kvcache.base import F32, Array, Layout
from edgekv.kvcache.codecs import WORD, KeyCodec, ValueCodec


class Rotation:
    """x -> P x, P (width, head_dim) with orthonormal columns, fixed by ``seed`` and stored with no token.

    A randomised Hadamard transform of x padded with zeros if ``width`` is a power of two, else the orthogonal
    factor of a Gaussian matrix.
    """

    def __init__(self, head_dim: int, width: int, seed: int) -> None:
        self.head_dim, self.width = head_dim, width
        rng = np.random.Generator(np.random.PCG64(seed))
        self._flips: F32 | None = None
        if width & (width - 1) == 0:
            self._flips = rng.choice(np.array([-1, 1], np.float32), width)
        else:
            self._matrix = np.linalg.qr(rng.standard_normal((width, head_dim)))[0].astype(np.float32)

    def forward(self, x: F32, kernels: Kernels) -> F32:
        """(A, n, width) of x (A, n, head_dim)."""
        if self._flips is None:
            rotated: F32 = x @ self._matrix.T
            return rotated
        out = np.empty((*x.shape[:2], self.width), np.float32)
        kernels.hadamard(x, self._flips, out)
        return out

    def add_back(self, x: F32, out: F32, kernels: Kernels) -> None:
        """out (A, n, head_dim) += the inverse of x (A, n, width)."""
        if self._flips is None:
            out += x @ self._matrix
        else:
            kernels.hadamard_back(x, self._flips, out)


class CentredSigns(KeyCodec):
    """A centre per 16 tokens in 4 bits, and per key one sign per element of what is left, and one scale.

    r = P k - c, x = sign(r), f = |r|_2 ** 2 / |r|_1: q . k ~ (P q) . c + lam * f * (P q) . x. The second product
    is made with P q in ``planes`` bit planes, by counting bits. P has ``width`` rows: head_dim rounded up to whole
    words, every bit of which thus tells something. `lam` (n_kv_heads,) shrinks the estimate: 1 is unbiased.
    """

    def __init__(
        self, n_kv_heads: int, capacity: int, head_dim: int, *, planes: int, lam: float, seed: int
    ) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.planes, self.width = planes, -(-head_dim // WORD) * WORD
        self.lam: F32 = np.full(n_kv_heads, lam, np.float32)
        self.rotation = Rotation(head_dim, self.width, seed)

    def layout(self) -> Layout:
        g, capacity, width = self.n_kv_heads, self.capacity, self.width
        return {
            "signs": ((g, capacity // WORD, width // WORD, WORD), "uint64"),
            "scale": ((g, capacity), "uint16"),
            "centres": ((g, capacity // CENTRE, width // 2), "uint8"),
            "centre_step": ((g, capacity // CENTRE), "uint16"),
        }

    @property
    def token_bytes(self) -> int:
        """Rounded up: the centres' share need not be whole."""
        return -(-self.block_bytes // WORD)

    @property
    def block_bytes(self) -> int:
        """Bytes of WORD tokens, all heads together."""
        return self.n_kv_heads * (WORD * (self.width // 8 + 2) + WORD // CENTRE * (self.width // 2 + 2))

    def encode(self, x: F32, t0: int) -> None:
        a = self.arrays
        rotated = self.rotation.forward(x, self.kernels)
        self.kernels.encode_centres(rotated, a["centres"], a["centre_step"], t0)
        self.kernels.encode_signs(rotated, a["signs"], a["scale"], t0)

    def scores(self, queries: F32, t0: int, t1: int, s: F32, s0: int) -> None:
        self.scan(*self.pack(queries), t0, t1, s, s0)

    def pack(self, queries: F32) -> tuple[F32, Array, F32]:
        """Queries rotated, and their bit planes and steps."""
        rotated = self.rotation.forward(queries, self.kernels)
        planes = np.empty((*queries.shape[:2], self.planes, self.width // WORD), np.uint64)
        step = np.empty(queries.shape[:2], np.float32)
        self.kernels.pack_queries(rotated, planes, step)
        return rotated, planes, step

    def scan(self, rotated: F32, planes: Array, step: F32, t0: int, t1: int, s: F32, s0: int) -> None:
        a = self.arrays
        keys = a["signs"], a["scale"], a["centres"], a["centre_step"]
        self.kernels.scores_centred(rotated, planes, step * self.lam[:, None], *keys, t0, t1, s, s0)


class QuadValues(ValueCodec):
    """``bits`` per element of P v, with one scale: the best uniform levels for a Gaussian, not shrunk."""

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, *, bits: int, seed: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.bits = bits
        self.rotation = Rotation(head_dim, head_dim, seed)

    def layout(self) -> Layout:
        g, capacity = self.n_kv_heads, self.capacity
        return {
            "codes": ((g, capacity // WORD, 2 * self.bits, self.head_dim, 4), "uint8"),
            "scale": ((g, capacity), "uint16"),
        }

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * -(-(self.bits * self.head_dim + 16) // 8)

    def encode(self, x: F32, t0: int) -> None:
        a = self.arrays
        self.kernels.encode_quads(self.rotation.forward(x, self.kernels), a["codes"], a["scale"], t0)

    def accumulate(self, p: F32, s0: int, t0: int, t1: int, out: F32) -> None:
        a = self.arrays
        rotated = np.zeros_like(out)
        self.kernels.values_quads(p, s0, a["codes"], a["scale"], t0, t1, rotated)
        self.rotation.add_back(rotated, out, self.kernels)
