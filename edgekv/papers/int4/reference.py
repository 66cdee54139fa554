"""Values in four bits with a scale and a zero point per token."""

from typing import Any

import numpy as np

from edgekv.kernels.reference.loops import Loops, round_up_to_f16
from edgekv.kernels.reference.rows import values_f32
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


def values_int4(p: F32, s0: int, codes: U8, delta: U16, zero: U8, t0: int, t1: int, out: F32) -> None:
    """out (G, M, D) += p[:, :, s0:] (G, M, t1 - t0) times tokens t0..t1."""
    packed = codes[:, t0:t1]
    levels = np.concatenate([packed & 15, packed >> 4], axis=2).astype(np.float32)
    step = delta[:, t0:t1].view(np.float16).astype(np.float32)
    values = (levels - zero[:, t0:t1, None]) * step[..., None]
    values_f32(p, s0, values, 0, t1 - t0, out)


def _encode(codec: Any, x: F32, t0: int) -> None:
    encode_int4(x, codec.arrays["codes"], codec.arrays["delta"], codec.arrays["zero"], t0)


def _sums(codec: Any, p: F32, t0: int, t1: int, out: F32) -> None:
    a = codec.arrays
    values_int4(p, 0, a["codes"], a["delta"], a["zero"], t0, t1, out)


LOOPS = {"int4": Loops(encode=_encode, sums=_sums)}
