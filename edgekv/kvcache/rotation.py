"""A fixed rotation of keys or values, which spreads outlier channels over all of them."""

from __future__ import annotations

import numpy as np

from edgekv.kernels import Kernels
from edgekv.types import F32, Array


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
