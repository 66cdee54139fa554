"""Values in four bits with a scale and a zero point per token."""

import numpy as np

from edgekv.codecs.codec import round_up_to_f16
from edgekv.types import F32, U8, U16


def encode_int4(x: F32, codes: U8, delta: U16, zero: U8, t0: int) -> None:
    """Stores x (G, n, D), D even, at tokens t0.. as round(x / delta) + zero in 0..15: H1B-KV, equation 4.

    codes (G, cap, D // 2): byte j has element j in its low nibble and element j + D // 2 in its high one.
    delta (G, cap): float16 bits of (hi - lo) / 15, rounded up so that the range is covered, where
    lo = min(x, 0) and hi = max(x, 0) over the token. zero (G, cap) = round(-lo / delta). Halves round to
    even. A token of zeros has delta 0 and decodes to zeros. x must be finite.
    """
    tokens = slice(t0, t0 + x.shape[1])
    lo = np.minimum(x.min(axis=2), 0)  # (G, n)
    hi = np.maximum(x.max(axis=2), 0)
    delta[:, tokens] = round_up_to_f16((hi - lo) / np.float32(15))
    step = delta[:, tokens].view(np.float16).astype(np.float32)
    step[step == 0] = 1  # only if all elements are (nearly) zero: they round to code 0
    offset = np.rint(-lo / step)
    zero[:, tokens] = offset
    levels = np.clip(np.rint(x / step[..., None]) + offset[..., None], 0, 15).astype(np.uint8)
    half = x.shape[2] // 2
    codes[:, tokens] = levels[..., :half] | levels[..., half:] << 4


def decode_int4(packed: U8, delta: U16, zero: U8) -> F32:
    """Tokens as numbers (G, n, D), of packed (G, n, D // 2), delta and zero (G, n)."""
    levels = np.concatenate([packed & 15, packed >> 4], axis=2).astype(np.float32)
    values: F32 = (levels - zero[..., None]) * delta.view(np.float16).astype(np.float32)[..., None]
    return values
