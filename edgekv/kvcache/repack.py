"""Tokens from one codec into a coarser one: copied where both store them alike, else decoded and packed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edgekv.kernels.memory import contiguous
from edgekv.kvcache.codec_planes import InterleavedValues, PlaneValues
from edgekv.kvcache.codecs import F16, WORD, Codec
from edgekv.types import F32

CONVERT_TOKENS = 512  # decoded at a time: bounds the float32 copies


def repack(old: Codec, new: Codec, t0: int, t1: int, to: int) -> None:
    """Tokens t0..t1 of ``old`` become tokens ``to``.. of ``new``; all are multiples of WORD.

    ``new`` is a codec of the same tier or a coarser one: `TIERS` of tiers.py.
    """
    alike = new.layout().keys() <= old.layout().keys() and _same_units(old, new)
    for a in range(t0, t1, CONVERT_TOKENS):
        b = min(a + CONVERT_TOKENS, t1)
        if alike:
            copy_tokens(old, new, a, b, to + a - t0)
        else:
            new.encode(decode(old, a, b), to + a - t0)


def _same_units(old: Codec, new: Codec) -> bool:
    """Whether a token takes the same place in the arrays that both have."""
    units = [{name: (spec[0][2:], spec[1]) for name, spec in codec.layout().items()} for codec in (old, new)]
    return all(units[0][name] == unit for name, unit in units[1].items())


def copy_tokens(old: Codec, new: Codec, t0: int, t1: int, to: int) -> None:
    """Arrays of all these codecs have tokens, or blocks of WORD tokens, along their second axis."""
    for name, array in new.arrays.items():
        source = old.arrays[name]
        each, other = new.capacity // array.shape[1], old.capacity // source.shape[1]
        array[:, to // each : (to + t1 - t0) // each] = source[:, t0 // other : t1 // other]


def decode(codec: Any, t0: int, t1: int) -> F32:
    """(n_kv_heads, t1 - t0, head_dim) of a codec in DECODERS; t0, t1 are multiples of WORD."""
    return contiguous(DECODERS[type(codec)](codec, t0, t1))


def _decode_planes(codec: PlaneValues, t0: int, t1: int) -> F32:
    a = codec.arrays
    planes = np.concatenate([a["top"][:, t0:t1], a["low"][:, t0:t1]], axis=2)  # (g, n, 4, words)
    bits = np.unpackbits(contiguous(planes).view(np.uint8).ravel(), bitorder="little").astype(np.float32)
    steps = np.asarray(np.array([[4], [2], [1], [0.5]], np.float32), like=bits)
    levels = ((2 * bits - 1).reshape(*planes.shape[:3], -1) * steps).sum(axis=2)
    rotated = levels * a["scale"][:, t0:t1].view(np.float16).astype(np.float32)[..., None]
    out = np.zeros_like(rotated, shape=(codec.n_kv_heads, t1 - t0, codec.head_dim))
    codec.keys.rotation.add_back(contiguous(rotated), out, codec.keys.kernels)
    return out


def _decode_interleaved(codec: InterleavedValues, t0: int, t1: int) -> F32:
    """The sum over values with a weight of 1 for one of them: exact, as weights are rounded in each block."""
    like, n_kv_heads = codec.arrays["codes"], codec.n_kv_heads
    out = np.zeros_like(like, np.float32, shape=(n_kv_heads, t1 - t0, codec.head_dim))
    one = np.asarray(np.stack([np.eye(WORD, dtype=np.float32)] * n_kv_heads), like=like)
    for a in range(t0, t1, WORD):
        part = np.zeros_like(out, shape=(n_kv_heads, WORD, codec.head_dim))
        codec.kernels.sums(codec, one, a, a + WORD, part)
        out[:, a - t0 : a - t0 + WORD] = part
    return out


DECODERS: dict[type[Codec], Callable[[Any, int, int], F32]] = {
    F16: lambda codec, t0, t1: codec.decode(t0, t1),
    PlaneValues: _decode_planes,
    InterleavedValues: _decode_interleaved,
}
