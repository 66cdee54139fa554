"""What every kernel backend provides: the same functions, with the meaning written here.

`attend` is all that decoding needs, beside each codec's encoding. What a kind of codec means is written where
NumPy computes it: its class names the file.

One layer at a time, no batch axis. H query heads share G KV heads, R = H // G each. Queries (H, n, D) are
reinterpreted for free as q (G, M, D) with M = R * n: the head of the group outer, the token inner. Stores are
preallocated for `cap` tokens (`edgekv.kernels.arrays.zeros`), hold float16 as its bits in uint16, and are
C-contiguous, as is every array here except scores, whose last axis alone must be.

Token ranges are half-open and need not touch block borders. A kernel writes all that it promises and nothing
else, and trusts its arguments: shapes and ranges are the caller's duty.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edgekv.kernels.contract.planes import PlaneKernels
from edgekv.kernels.contract.segment import Segment, Stored, Visible
from edgekv.types import F32, I64, U16, Array

BLOCK = 64
"""Tokens per block of sign codes, and per unit of work in every kernel."""

LARGEST_F16 = np.float32(65504)
"""What scales and other stored float16 numbers are bounded by."""


def bound_scores(s: Array, cap: float | None) -> None:
    """s = cap * tanh(s / cap), in place, in whatever memory it is; None: it stays."""
    if cap is not None:
        s *= np.float32(1 / cap)
        np.tanh(s, out=s)
        s *= np.float32(cap)


class Kernels(PlaneKernels, Protocol):
    """A backend is a module with these functions, or an object."""

    backend: str
    """reference, cpu or cuda."""

    def attend(
        self,
        queries: F32,
        segments: Sequence[Segment],
        visible: Visible,
        out: F32,
        weights: F32 | None = None,
        sinks: F32 | None = None,
        cap: float | None = None,
    ) -> None:
        """out (H, n, D) = softmax(queries . keys) values over the visible tokens of all segments.

        queries (H, n, D), multiplied by the score scale, are C-contiguous, as is ``out``. Each codec's kind says
        what a score and a sum of values are: `scores`, `sums`. A query that sees nothing gets zeros. ``weights``
        (G, R * n, tokens of all segments), where given, gets the softmax, segment after segment. ``sinks`` (H,),
        where given, is a score more for each head's queries, of no token and without a value: the weights of the
        tokens then sum to less than 1. ``cap``, where given, makes a token's score cap * tanh(score / cap), as in
        Gemma 2.
        """

    def append(self, keys: Stored, values: Stored, k: F32, v: F32, t0: int) -> None:
        """Encodes k and v (G, n, D) as tokens t0.. of two codecs: one call where both take tokens one by one."""

    def encode(self, codec: Stored, x: F32, t0: int) -> None:
        """Stores x (G, n, D) as tokens t0.. of a codec, as its kind does.

        Kinds of several steps are encoded by their codec's own `encode`.
        """

    def scores(self, codec: Stored, queries: F32, t0: int, t1: int, s: F32) -> None:
        """s (G, M, t1 - t0) = scores of queries (G, M, D) with tokens t0..t1 of a codec that holds keys.

        Of a page_index t0 and t1 are pages.
        """

    def sums(self, codec: Stored, p: F32, t0: int, t1: int, out: F32) -> None:
        """out (G, M, D) += p (G, M, t1 - t0) times tokens t0..t1 of a codec of values, rotations undone."""

    def encode_f16(self, x: F32, store: U16, t0: int) -> None:
        """Stores x (G, n, D) at tokens t0.. of store (G, cap, D), rounded to nearest even."""

    def project(self, x: F32, matrix: F32) -> F32:
        """x (G, n, d) times the transpose of matrix (b, d): (G, n, b)."""

    def softmax(self, s: F32, lo: I64, hi: I64) -> None:
        """Row m of every group: softmax over columns lo[m]..hi[m] in place, 0 in every other column of s.

        Scores of -inf get probability 0; a range that is empty or all -inf becomes zeros. lo, hi (M,).
        """

    def split_rope(
        self,
        qkv: F32,
        cos: F32,
        sin: F32,
        q: F32,
        k: F32,
        v: F32,
        scale: float,
        q_norm: F32,
        k_norm: F32,
        eps: float,
    ) -> None:
        """Splits the fused projection qkv (n, (H + 2G) * D) into q (H, n, D) and k, v (G, n, D).

        q and k are rotated as Hugging Face does: with x1, x2 the halves of the first 2 * cos.shape[1] elements
        of a head, [x1 * cos - x2 * sin, x2 * cos + x1 * sin]; the rest is copied. cos, sin (n, rot // 2), with
        rot = 0 for learned positions. q is then multiplied by `scale`. q_norm and k_norm (D,) are the weights
        of a per-head RMS norm before the rotation (Qwen3), or empty.
        """
