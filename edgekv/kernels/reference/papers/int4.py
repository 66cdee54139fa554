"""Values in four bits with a scale and a zero point per token."""

import numpy as np

from edgekv.kernels.reference.rounding import round_up_to_f16
from edgekv.kernels.reference.rows import values_f32
from edgekv.types import F32, U8, U16


def encode_int4(x: F32, codes: U8, delta: U16, zero: U8, t0: int) -> None:
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
    packed = codes[:, t0:t1]
    levels = np.concatenate([packed & 15, packed >> 4], axis=2).astype(np.float32)
    step = delta[:, t0:t1].view(np.float16).astype(np.float32)
    values = (levels - zero[:, t0:t1, None]) * step[..., None]
    values_f32(p, s0, values, 0, t1 - t0, out)
