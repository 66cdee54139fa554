"""What the codes of weights stand for, in the store and in every backend.

Most codes of 4 and 8 bits stand for the whole number code - `code_of_zero`. Rotated weights
(`edgekv.weights.gaussian`) have codes of 2 to 5 bits, which stand for levels in `level_tables`.
"""

from __future__ import annotations

import functools

import numpy as np

from edgekv.types import I8

ROTATED_INPUTS = 128
"""Inputs that a product rotates together, for weights of 2 to 5 bits; a row's last group is padded with zeros."""

FLIPS = np.array([1 - 2 * int(bit) for bit in f"{0x243F6A8885A308D313198A2E03707344:0128b}"], np.float32)
"""The signs (ROTATED_INPUTS,) in front of their Hadamard transform: the first bits of pi behind the point."""

CODEBOOKS = {
    2: (-50, -15, 9, 36),
    3: (-60, -32, -18, -6, 5, 16, 28, 44),
    4: (-60, -41, -31, -24, -18, -13, -8, -3, 2, 7, 12, 17, 22, 28, 36, 49),
    5: (
        *(-53, -40, -34, -30, -26, -23, -20, -18, -15, -13, -11, -9, -7, -5, -3, -1),
        *(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 22, 25, 28, 32, 37, 45),
    ),
}
"""By bits, the levels of codes with even partners, of least squared error for pairs of a Gaussian."""


def code_of_zero(bits: int) -> int:
    """Returns the code of a whole number that stands for 0, where a block has no zero point of its own."""
    return 1 << (bits - 1)


@functools.cache
def level_tables(bits: int) -> I8:
    """Returns the levels (2, 2 ** bits) of codes with even partners and with odd ones.

    A code's partner is that of the input 64 away in its block. The second table is the first one's mirror image.
    """
    even = np.array(CODEBOOKS[bits], np.int8)
    return np.stack([even, -even[::-1]])


def code_planes(bits: int) -> list[tuple[int, int]]:
    """Returns the bits of each plane of codes of 2 to 5 bits, and those of the planes before it.

    5 bits are planes of 4 and 1, 3 of 2 and 1. A plane of p bits of a block of ROTATED_INPUTS has 16 p bytes; bits
    p c to p c + p - 1 of byte j belong to input 16 p c + j.
    """
    return [(bits, 0)] if bits % 2 == 0 else [(bits - 1, 0), (1, bits - 1)]
