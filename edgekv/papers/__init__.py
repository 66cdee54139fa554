"""KV schemes of papers, and what they are compared with, behind entry points as any other package's schemes.

    h1b, int4, kivi, kvcomp    a codec each: H1B-KV and its baselines, KIVI, KVComp
    visual                     codecs for image tokens: Visual 1-bit KV, CalibQuant, and ours
    evicting                   a bounded number of tokens: H2O, TOVA, StreamingLLM, SnapKV, MiKV
    retrieval, fier, quest     every token is stored and few are read: the policy, and the index of each paper

Each package's docstring has the idea, the paper's equations, deviations and what was measured here.
"""

from collections.abc import Callable

import numpy as np

from edgekv.codecs.codec import from_half as from_half
from edgekv.codecs.codec import round_up_to_f16
from edgekv.codecs.codec import to_half as to_half
from edgekv.errors import CacheError
from edgekv.kernels.interface import MAX_F16
from edgekv.types import F32, U8, U16


def require_whole_bytes(kv: str, head_dim: int, per_byte: int) -> None:
    """Raises CacheError (field kv) where head_dim is no multiple of the ``per_byte`` elements in a byte."""
    if head_dim % per_byte:
        text = f"packs {per_byte} elements to a byte: head_dim {head_dim} must be a multiple of that"
        raise CacheError(text, field="kv", value=kv)


def pack_codes(levels: U8, n_bytes: int) -> U8:
    """Packs codes (..., D) of 8, 4 or 2 bits into (..., n_bytes).

    Byte j has element j in its lowest bits, then element n_bytes + j, and so on.
    """
    parts = levels.reshape(*levels.shape[:-1], -1, n_bytes)
    packed: U8 = parts[..., 0, :].copy()
    for i in range(1, parts.shape[-2]):
        packed |= parts[..., i, :] << np.uint8(8 // parts.shape[-2] * i)
    return packed


def unpack_codes(codes: U8, head_dim: int) -> F32:
    """Returns the codes (..., D) that `pack_codes` has put into bytes (..., n_bytes)."""
    n_bits = 8 * codes.shape[-1] // head_dim
    shifts = np.arange(0, 8, n_bits, dtype=np.uint8)[:, None]
    parts: U8 = (codes[..., None, :] >> shifts) & np.uint8(2**n_bits - 1)
    return parts.reshape(*codes.shape[:-1], head_dim).astype(np.float32)


def affine_levels(x: F32, axis: int, low: U16, step: U16, n_levels: int, step_of: Callable[[F32], F32]) -> U8:
    """Returns round((x - low) / step) in 0..n_levels - 1, halves to even; fills low and step, float16 bits.

    Elements of x (n_kv_heads, ...) along the axis share low, their least in float16 (or the nearest of its finite
    numbers), and step, which is step_of(largest - low), rounded up to float16.
    """
    least = np.clip(x.min(axis), -MAX_F16, MAX_F16).astype(np.float16) + np.float16(0)  # no -0
    low[...] = least.view(np.uint16)
    least = least.astype(np.float32)
    step[...] = round_up_to_f16(step_of(np.maximum(x.max(axis) - least, 0)))
    size = from_half(step)
    size[size == 0] = 1
    position = (x - np.expand_dims(least, axis)) / np.expand_dims(size, axis)
    levels: U8 = np.clip(np.rint(position), 0, n_levels - 1).astype(np.uint8)
    return levels
