"""Rotated values in 1 to 4 bits, four tokens side by side."""

from __future__ import annotations

from typing import Any

from edgekv.kernels.cuda.loops import Loops, Reader


def _read(codec: Any) -> Reader:
    codes, scale = codec.arrays["codes"], codec.arrays["scale"]
    bits, name = int(codec.bits.max()), "interleaved_values"
    macros = ("VALUE_BITS", bits), ("VALUE_HEADS", int(codec.bits.min() < bits))
    store = (codes, scale, codec.heads), scale.shape[1], codes.shape[3], macros
    return Reader("InterleavedValues", name, *store, tiles=4, rotation=codec.rotation)


LOOPS = {"interleaved": Loops(values=_read)}
