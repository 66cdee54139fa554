"""Tokens from one codec into a coarser one: copied where both store them alike, else decoded and packed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edgekv.kernels.contract.planes import CENTRE, place_of
from edgekv.kernels.memory import contiguous
from edgekv.kvcache.codec_planes import CentredPlanes, InterleavedValues, runs_of_heads
from edgekv.kvcache.codecs import F16, WORD, Codec
from edgekv.types import F32, Array

CONVERT_TOKENS = 512  # decoded at a time: bounds the float32 copies
PLACES = np.array([16 * group + byte for group, byte in map(place_of, range(WORD))])
"""Of a block's tokens in its planes."""


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
    units = [
        {name: (shape[0], shape[2:], dtype) for name, (shape, dtype) in codec.layout().items()}
        for codec in (old, new)
    ]
    return all(units[0][name] == unit for name, unit in units[1].items())


def copy_tokens(old: Codec, new: Codec, t0: int, t1: int, to: int) -> None:
    """Arrays of all these codecs have tokens, or blocks of WORD tokens, along the second axis of `_parts`."""
    for name in new.arrays:
        for array, source in zip(_parts(new, name), _parts(old, name), strict=True):
            each, other = new.capacity // array.shape[1], old.capacity // source.shape[1]
            array[:, to // each : (to + t1 - t0) // each] = source[:, t0 // other : t1 // other]


def _parts(codec: Codec, name: str) -> list[Array]:
    """An array; one whose first axis are the bits of all heads by heads of as many bits."""
    array = codec.arrays[name]
    if isinstance(codec, (CentredPlanes, InterleavedValues)) and name in ("planes", "codes"):
        return [part for _, part in runs_of_heads(codec.bits, array)]
    return [array]


def decode(codec: Any, t0: int, t1: int) -> F32:
    """(n_kv_heads, t1 - t0, head_dim) of a codec in DECODERS; t0, t1 are multiples of WORD."""
    return contiguous(DECODERS[type(codec)](codec, t0, t1))


def _decode_centred(codec: CentredPlanes, t0: int, t1: int) -> F32:
    a, blocks, width = codec.arrays, slice(t0 // WORD, t1 // WORD), codec.width
    scale = a["scale"][:, t0:t1].view(np.float16).astype(np.float32)
    codes, step = a["centres"][:, blocks], a["centre_step"][:, blocks].view(np.float16).astype(np.float32)
    means = np.concatenate([codes & 15, codes >> 4], axis=3).astype(np.float32) - np.float32(7.5)
    means *= step[..., None]
    centres = np.repeat(means[:, :, :1] + means[:, :, 1:], CENTRE, axis=2)
    rotated = centres.reshape(codec.n_kv_heads, t1 - t0, width)
    places = np.asarray(PLACES, like=codes)
    for heads, planes in runs_of_heads(codec.bits, a["planes"]):
        n, bits = planes.shape[0], planes.shape[2]
        stored = planes[:, blocks].transpose(0, 1, 3, 5, 2, 4).reshape(n, -1, WORD, bits, width // 8)
        columns = contiguous(stored[:, :, places])
        signs = 2 * np.unpackbits(columns.ravel(), bitorder="little").astype(np.float32) - 1
        worth = np.asarray(2.0 ** np.arange(bits - 1, -1, -1, dtype=np.float32)[:, None], like=signs)
        levels = (signs.reshape(n, t1 - t0, bits, width) * worth).sum(axis=2)
        rotated[heads] += levels * scale[heads][..., None]
    out = np.zeros_like(rotated, shape=(codec.n_kv_heads, t1 - t0, codec.head_dim))
    codec.rotation.add_back(contiguous(rotated), out, codec.kernels)
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
    CentredPlanes: _decode_centred,
    InterleavedValues: _decode_interleaved,
}
