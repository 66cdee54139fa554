"""What a kind of codec means: how its tokens are stored, and what they give attention; how scales are rounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from edgekv.kernels.interface import LARGEST_F16
from edgekv.kernels.registry import find_loops
from edgekv.types import F32, U16, U64


@dataclasses.dataclass(frozen=True)
class Loops:
    """Functions of a codec; G KV heads, M = n_rep * n query rows, D = head_dim, tokens t0..t1 half-open.

    decode: (codec, t0, t1) -> the numbers (G, t1 - t0, D) that tokens stand for. With it nothing else is needed.
    encode: (codec, x (G, n, D), t0) stores x as tokens t0.., where `Codec.encode` does not do so itself.
    scores: (codec, q (G, M, D), t0, t1, s (G, M, t1 - t0)) fills s, where that is not q times what `decode` gives.
    sums: (codec, p (G, M, t1 - t0), t0, t1, out (G, M, D)) adds p times the values, likewise.
    """

    decode: Callable[[Any, int, int], F32] | None = None
    encode: Callable[[Any, F32, int], None] | None = None
    scores: Callable[[Any, F32, int, int, F32], None] | None = None
    sums: Callable[[Any, F32, int, int, F32], None] | None = None


DECODED = Loops(decode=lambda codec, t0, t1: codec.decode(t0, t1))
"""Of a codec that brings none: what it decodes to is read."""


def loops_of(codec: Any) -> Loops:
    """Returns how a codec, or a codec of that class, is read."""
    return cast(Loops, find_loops("reference", codec) or DECODED)


def decoded(codec: Any, t0: int, t1: int) -> F32:
    """Tokens t0..t1 of a codec as numbers (G, t1 - t0, D)."""
    decode = loops_of(codec).decode
    assert decode is not None, codec.kind
    return decode(codec, t0, t1)


def round_up_to_f16(x: F32) -> U16:
    """Bits of the smallest float16 not below x >= 0, or of the largest float16."""
    x = np.minimum(x, LARGEST_F16)
    half = x.astype(np.float16)
    bits: U16 = half.view(np.uint16) + (half.astype(np.float32) < x).astype(np.uint16)
    return bits


def pack_sign_rows(x: F32) -> U64:
    """The signs of x (G, M, b) as (G, M, b // 64) words: bit j of word w is x[..., 64 * w + j] >= 0."""
    return np.packbits(x >= 0, axis=-1, bitorder="little").view("<u8")
