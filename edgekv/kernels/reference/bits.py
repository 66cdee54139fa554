"""Signs as bits, 64 to a word."""

import numpy as np

from edgekv.types import F32, U64


def pack_sign_rows(x: F32) -> U64:
    """The signs of x (G, M, b) as (G, M, b // 64) words: bit j of word w is x[..., 64 * w + j] >= 0."""
    return np.packbits(x >= 0, axis=-1, bitorder="little").view("<u8")
