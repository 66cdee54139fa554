"""What attention reads: runs of tokens, each with a codec for its keys and one for its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from edgekv.types import I32, I64


class Stored(Protocol):
    """What a backend knows of a codec (`edgekv.kvcache.codecs.Codec`).

    ``backends`` and ``kind`` name the loops that read it.

    The attributes beside these that a kind has are those of its class. In ``backend_state`` a backend keeps what
    it derives from the arrays; who binds others sets it to None.
    """

    kind: ClassVar[str]
    backends: ClassVar[Mapping[str, str]]
    arrays: dict[str, Any]
    n_kv_heads: int
    head_dim: int
    backend_state: Any


class Segment(NamedTuple):
    """Tokens first..stop of the stores of two codecs.

    position: where token ``first`` stands in the conversation; the others follow it, unless ``positions``
    (G, capacity) int32 says where each token stands.
    """

    keys: Any  # Stored
    values: Any  # Stored
    first: int
    stop: int
    position: int = 0
    positions: I32 | None = None


Visible = tuple[I64, I64]
"""(lo, hi), each (n,): query token j sees the positions lo[j] .. hi[j]."""
