"""What a kind of codec means: how its tokens are stored, and what they give attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

from edgekv.kernels.contract.segment import Segment
from edgekv.kernels.kinds import find_loops
from edgekv.types import F32


@dataclasses.dataclass(frozen=True)
class Loops:
    """Functions of a codec; G KV heads, M = n_rep * n query rows, D = head_dim, tokens t0..t1 half-open.

    decode: (codec, t0, t1) -> the numbers (G, t1 - t0, D) that tokens stand for. With it nothing else is needed.
    encode: (codec, x (G, n, D), t0) stores x as tokens t0.., where `Codec.encode` does not do so itself.
    scores: (codec, q (G, M, D), t0, t1, s (G, M, t1 - t0)) fills s, where that is not q times what `decode` gives.
    estimate: likewise, from what is read of every token before `rescan`.
    sums: (codec, p (G, M, t1 - t0), t0, t1, out (G, M, D)) adds p times the values, likewise.
    rescan: (segment, q, n, total (G, M), s (G, M, tokens)) puts the scores of the blocks that can matter in place
        of the estimates s; total: the logarithm of the sum of exp of all segments' scores, estimates among them.
    second_stage: (segment, q, p, n, out, change (G, M)) reads tokens that p makes worth it once more: adds to out
        their values and all others', to change what the probabilities changed by.
    """

    decode: Callable[[Any, int, int], F32] | None = None
    encode: Callable[[Any, F32, int], None] | None = None
    scores: Callable[[Any, F32, int, int, F32], None] | None = None
    sums: Callable[[Any, F32, int, int, F32], None] | None = None
    estimate: Callable[[Any, F32, int, int, F32], None] | None = None
    rescan: Callable[[Segment, F32, int, F32, F32], None] | None = None
    second_stage: Callable[[Segment, F32, F32, int, F32, F32], None] | None = None


def loops_of(kind: str) -> Loops:
    """Raises CacheError (field kv) for a kind that there is not."""
    return cast(Loops, find_loops("edgekv.kernels.reference", kind))


def decoded(codec: Any, t0: int, t1: int) -> F32:
    """Tokens t0..t1 of a codec as numbers (G, t1 - t0, D)."""
    decode = loops_of(codec.kind).decode
    assert decode is not None, codec.kind
    return decode(codec, t0, t1)
