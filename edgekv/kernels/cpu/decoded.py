"""Codecs without loops of their own: what they decode to is read as float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from edgekv.kernels.contract.segment import Segment
from edgekv.kernels.cpu.loops import Loops

DECODED = "decoded"
LOOPS = {DECODED: Loops(lambda codec: ())}


def with_numbers(segment: Segment) -> Segment:
    """The segment, its codecs of kind "decoded" replaced by their tokens in float32."""
    keys, values = segment.keys, segment.values
    if keys.kind != DECODED and values.kind != DECODED:
        return segment
    span = segment.first, segment.stop
    return segment._replace(keys=as_numbers(keys, *span), values=as_numbers(values, *span))


def as_numbers(codec: Any, t0: int, t1: int) -> Any:
    """A codec of kind f32 with tokens t0..t1 of one of kind "decoded"; any other codec is itself."""
    if codec.kind != DECODED:
        return codec
    single = np.empty((codec.n_kv_heads, t1, codec.head_dim), np.float32)
    single[:, t0:] = codec.decode(t0, t1)
    sizes = {"n_kv_heads": codec.n_kv_heads, "capacity": t1, "head_dim": codec.head_dim}
    return SimpleNamespace(kind="f32", arrays={"single": single}, backend_state=None, **sizes)
