"""Sign sketches: one bit per element, 64 to a word, compared by XOR and a count of bits."""

import numpy as np
import numpy.typing as npt

from edgekv.kernels.interface import BLOCK
from edgekv.types import F32, U64


def pack_signs(x: F32, codes: U64, t0: int) -> None:
    """Stores the signs of x (G, n, b) at tokens t0.. of codes (G, cap // 64, W, 64), W = b // 64.

    Token t lies at [:, t // 64, :, t % 64]; bit j of word w is x[..., 64 * w + j] >= 0.
    """
    tokens = np.arange(t0, t0 + x.shape[1])
    # two index arrays apart from each other bring the token axis to the front
    codes[:, tokens // BLOCK, :, tokens % BLOCK] = pack_sign_rows(x).transpose(1, 0, 2)


def scores_signs(
    q_codes: U64, codes: U64, t0: int, t1: int, scale: npt.NDArray[np.floating], s: F32, s0: int
) -> None:
    """s[:, :, s0:] = scale (G, M) times the product of signs: q_codes (G, M, W) with tokens t0..t1."""
    tokens = np.arange(t0, t1)
    keys = codes[:, tokens // BLOCK, :, tokens % BLOCK].transpose(1, 0, 2)  # (G, T, W)
    n_bits = 64 * keys.shape[2]
    for m in range(q_codes.shape[1]):
        differing = np.ascontiguousarray(q_codes[:, m, None] ^ keys).view(np.uint8)
        count = np.unpackbits(differing, axis=-1).sum(axis=-1, dtype=np.int32)  # (G, T)
        s[:, m, s0 : s0 + t1 - t0] = scale[:, m, None] * (n_bits - 2 * count).astype(np.float32)


def pack_sign_rows(x: F32) -> U64:
    """The signs of x (G, M, b) as (G, M, b // 64) words: bit j of word w is x[..., 64 * w + j] >= 0."""
    return np.packbits(x >= 0, axis=-1, bitorder="little").view("<u8")
