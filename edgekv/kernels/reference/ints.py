"""Symmetric integers of four or eight bits with a scale per token."""

from typing import Any

import numpy as np

from edgekv.kernels.reference.loops import Loops, round_up_to_f16
from edgekv.types import F32, I8, U8, U16


def encode_sym(x: F32, codes: I8 | U8, scale: U16, t0: int) -> None:
    """Stores x (G, n, D) at tokens t0.. as round(x / scale), in 8 bits, or in 4 bits plus 8.

    codes (G, cap, D) int8, or (G, cap, D // 2) uint8 as `pack_codes` makes it. scale (G, cap): float16 bits of the
    token's largest magnitude over top, 127 or 7, rounded up. The levels are -top..top, halves rounded to even. A
    token of zeros has scale 0 and decodes to zeros.
    """
    n_bytes, tokens = codes.shape[2], slice(t0, t0 + x.shape[1])
    top = 127 if n_bytes == x.shape[2] else 7
    scale[:, tokens] = round_up_to_f16(np.abs(x).max(axis=2) / np.float32(top))
    step = _widen(scale[:, tokens])
    step[step == 0] = 1  # only if all elements are (nearly) zero: they round to 0
    levels = np.clip(np.rint(x / step[..., None]), -top, top)
    if n_bytes == x.shape[2]:
        codes[:, tokens] = levels
    else:
        codes[:, tokens] = pack_codes((levels + 8).astype(np.uint8), n_bytes)


def symmetric(codec: Any, t0: int, t1: int) -> F32:
    """Tokens t0..t1 of a codec as numbers (G, t1 - t0, D)."""
    codes, scale = codec.arrays["codes"][:, t0:t1], _widen(codec.arrays["scale"][:, t0:t1])
    if codes.shape[2] < codec.head_dim:
        codes = unpack_codes(codes, codec.head_dim) - 8
    values: F32 = codes.astype(np.float32) * scale[..., None]
    return values


def pack_codes(levels: U8, n_bytes: int) -> U8:
    """Codes (..., D) of 8, 4 or 2 bits, the parts of a head over each other in (..., n_bytes)."""
    parts = levels.reshape(*levels.shape[:-1], -1, n_bytes)
    packed: U8 = parts[..., 0, :].copy()
    for i in range(1, parts.shape[-2]):
        packed |= parts[..., i, :] << np.uint8(8 // parts.shape[-2] * i)
    return packed


def unpack_codes(codes: U8, head_dim: int) -> F32:
    """The codes (..., D) in bytes (..., n_bytes), as numbers."""
    n_bits = 8 * codes.shape[-1] // head_dim
    shifts = np.arange(0, 8, n_bits, dtype=np.uint8)[:, None]
    parts: U8 = (codes[..., None, :] >> shifts) & np.uint8(2**n_bits - 1)
    return parts.reshape(*codes.shape[:-1], head_dim).astype(np.float32)


def _widen(bits: U16) -> F32:
    return bits.view(np.float16).astype(np.float32)


def _encode(codec: Any, x: F32, t0: int) -> None:
    encode_sym(x, codec.arrays["codes"], codec.arrays["scale"], t0)


LOOPS = dict.fromkeys(("int8", "symmetric4"), Loops(symmetric, _encode))
