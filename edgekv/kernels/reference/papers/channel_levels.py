"""Uniform levels between ends of each channel's own, and scores whose largest is pulled down (CalibQuant)."""

from typing import Any

import numpy as np

from edgekv.kernels.reference.loops import Loops
from edgekv.kernels.reference.papers.visual import unpacked
from edgekv.types import F32


def channel_levels(codec: Any, t0: int, t1: int) -> F32:
    """Tokens t0..t1 of a codec as numbers (G, t1 - t0, D); its low and step are (G, D)."""
    low, step = (codec.arrays[name].view(np.float16).astype(np.float32)[:, None] for name in ("low", "step"))
    numbers: F32 = low + unpacked(codec, t0, t1) * step
    return numbers


def _scores(codec: Any, q: F32, t0: int, t1: int, s: F32) -> None:
    """Changed linearly: of a query's scores with all tokens the least stays and the largest loses codec.pull."""
    scores = q @ channel_levels(codec, 0, codec.capacity).transpose(0, 2, 1)
    if codec.pull[0] > 0:
        least, largest = scores.min(-1, keepdims=True), scores.max(-1, keepdims=True)
        spread = largest - least
        scores = least + (scores - least) * np.maximum(1 - codec.pull[0] / np.where(spread > 0, spread, 1), 0)
    s[...] = scores[:, :, t0:t1]


LOOPS = {"channel_levels": Loops(channel_levels, scores=_scores)}
