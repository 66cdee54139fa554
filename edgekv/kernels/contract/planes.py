"""The part of `edgekv.kernels.contract` about rotated keys and values in bit planes and small centred codes.

Shapes and token ranges are those of `attention`, beside this.

"Rotated" is whatever orthogonal transform the
caller uses on queries, keys and values alike; here only their width counts: D, a multiple of 64 where bits are
packed in words, W = D / 64 of them. Scales are float16 bits.

A code of b bits stands for (code - (2 ** b - 1) / 2) * scale: levels lie symmetrically about 0 and the top bit is
the sign, 1 for x >= 0. x must be finite.
"""

from typing import Protocol

from edgekv.types import F32, U8, U16

CENTRE = 16
"""Tokens that share a centre."""

CENTRES = 5
"""Rows of centres of a block of 64 tokens: its mean, and one for each CENTRE tokens."""

GAUSS_STEP = {1: 1.5958, 2: 0.9957, 3: 0.586, 4: 0.3352}
"""Step of the best uniform quantiser of b bits for a Gaussian of variance 1: what rotated elements look like."""

LARGEST_FOUR = 61
"""Magnitudes of four neighbouring elements of a query add up to at most as many of its steps, before rounding.

See `edgekv.kernels.reference.planes.round_queries`.
"""

GROUPS = 4
"""Runs of 16 bytes that a block's tokens lie in, in `encode_keys`."""


def place_of(token: int) -> tuple[int, int]:
    """Group and byte of a token of a block of 64 in `encode_keys`."""
    return token % 16 // 4, 4 * (token % 4) + (0, 2, 1, 3)[token // 16]


LEAST_WEIGHT = 1e-30
"""p * scale: where a block's largest is smaller, its 8-bit weights are too, down to 0."""


class PlaneKernels(Protocol):
    """What a backend provides for `planes` and its presets."""

    def hadamard(self, x: F32, flips: F32, out: F32) -> None:
        """out (A, n, D) = H (flips * x) / sqrt(D), x (A, n, d <= D) padded with zeros, D = 2 ** k, flips (D,) +-1.

        H is the Walsh-Hadamard matrix. The sums are made in k passes over pairs D / 2 apart, and are thus equal to
        the bit in all backends.
        """

    def hadamard_back(self, x: F32, flips: F32, out: F32) -> None:
        """out (A, n, d) += the first d elements of the inverse of `hadamard` of x (A, n, D)."""

    def encode_centres(self, x: F32, codes: U8, step: U16, t0: int) -> None:
        """Stores means of x (G, n, D) in 4 bits and leaves x - (what was stored) in x; n, t0 are multiples of 64.

        codes (G, cap / 64, CENTRES, D / 2): row 0 has the mean of the block of 64 tokens, rows 1.. those of each
        CENTRE tokens of what that leaves. Two steps hold an offset of all keys, however large, as well as the
        differences. Byte j has element j in its low nibble and j + D / 2 in its high one.
        step (G, cap / 64, CENTRES): the row's largest magnitude / 8.
        """

    def encode_keys(self, x: F32, planes: U8, scale: U16, t0: int) -> None:
        """Stores x (G, n, D), n and t0 multiples of 64, in B bits: planes (G, cap / 64, B, GROUPS, D / 8, 16).

        The planes come by successive approximation: the first has the signs of x, the next ones those of what is
        left when sign * step * 2 ** (B - 2 - p) is taken off for plane p; step = GAUSS_STEP[B] * the token's root
        mean square. Byte [p, i, c, j] of a block has channels 8 * c.. from its low bit up, of the token that
        `place_of` puts at (i, j): 16 tokens are looked up at once, and sums come out in order. With
        level = sum of 2 ** (B - 1 - p) * sign, odd whole numbers, scale (G, cap) = |x| ** 2 / (x . level):
        level * scale has the inner product |x| ** 2 with x (RaBitQ for B = 1). A codec whose heads have different
        B keeps their planes one behind the other.
        """

    def encode_interleaved(self, x: F32, codes: U8, scale: U16, t0: int) -> None:
        """Stores x (G, n, D), n and t0 multiples of 64, in codes of b bits at blocks of 64 tokens; any D.

        codes (G, cap / 64, 2 * b, D, 4). For 4, 2 and 1 bits, byte [q, d, i] has element d of the tokens
        t = 4 * q + i, t + 8 * b, t + 16 * b, ... of the block, from its low bits up: four tokens lie side by side,
        as the dot product instructions of 8-bit integers want them. 3 bits are the upper 2 bits (4 rows q)
        followed by the lowest (2 rows).
        The codes are those of the best uniform step for a Gaussian of the token's mean square; scale (G, cap) is
        then |x| ** 2 / (x . levels), so that the stored vector has the inner product |x| ** 2 with x: sums of
        many values are not shrunk.
        """
