"""KV schemes of papers, and what they are compared with: a folder each, behind entry points like any package."""

import numpy as np

from edgekv.errors import CacheError
from edgekv.types import F32, U8


def require_whole_bytes(kv: str, head_dim: int, per_byte: int) -> None:
    """Raises CacheError (field kv) where elements, ``per_byte`` of them to a byte, do not fill a head's bytes."""
    if head_dim % per_byte:
        text = f"packs {per_byte} elements to a byte: head_dim {head_dim} must be a multiple of that"
        raise CacheError(text, field="kv", value=kv)


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
