"""Symmetric integers of four or eight bits with a scale per token."""

from typing import Any

import numpy as np

from edgekv.kernels.reference.loops import Loops
from edgekv.kernels.reference.rounding import round_up_to_f16
from edgekv.types import F32, U8, U16


def encode_sym(x: F32, codes: U8, scale: U16, t0: int) -> None:
    _, n_tokens, head_dim = x.shape
    n_bytes, block = codes.shape[2:]
    top = 2 ** (8 * n_bytes // head_dim - 1) - 1
    tokens = np.arange(t0, t0 + n_tokens)
    scale[:, tokens] = round_up_to_f16(np.abs(x).max(axis=2) / np.float32(top))
    step = _widen(scale[:, tokens])
    step[step == 0] = 1  # only if all elements are (nearly) zero: they round to 0
    levels = np.clip(np.rint(x / step[..., None]), -top, top) + (top + 1)
    packed = pack_codes(levels.astype(np.uint8), n_bytes)
    # two index arrays apart from each other bring the token axis to the front
    codes[:, tokens // block, :, tokens % block] = packed.transpose(1, 0, 2)


def symmetric(codec: Any, t0: int, t1: int) -> F32:
    """Tokens t0..t1 of a codec as numbers (G, t1 - t0, D)."""
    return decode_symmetric(codec.arrays["codes"], codec.arrays["scale"], t0, t1, codec.head_dim)


def decode_symmetric(codes: U8, scale: U16, t0: int, t1: int, head_dim: int) -> F32:
    """Tokens t0..t1 (G, t1 - t0, D)."""
    n_bytes, block = codes.shape[2:]
    tokens = np.arange(t0, t1)
    packed = codes[:, tokens // block, :, tokens % block].transpose(1, 0, 2)  # (G, T, n_bytes)
    middle = np.float32(2 ** (8 * n_bytes // head_dim - 1))
    values: F32 = (unpack_codes(packed, head_dim) - middle) * _widen(scale[:, tokens])[..., None]
    return values


def pack_codes(levels: U8, n_bytes: int) -> U8:
    """Codes (..., D) of 8, 4 or 2 bits, the parts of a head over each other in (..., n_bytes)."""
    parts = levels.reshape(*levels.shape[:-1], -1, n_bytes)
    n_bits = 8 // parts.shape[-2]
    shifts = np.arange(0, 8, n_bits, dtype=np.uint8)[:, None]
    packed: U8 = np.bitwise_or.reduce(parts << shifts, axis=-2)
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


LOOPS = dict.fromkeys(("symmetric_keys", "symmetric_values"), Loops(symmetric, _encode))
