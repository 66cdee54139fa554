"""A sliding layer that keeps its window alone: a ring of tokens, whatever the length of the conversation."""

from __future__ import annotations

import copy
from typing import Any

from edgekv.codecs.codec import Codec, WindowCodecs
from edgekv.kernels import BLOCK
from edgekv.kernels.interface import Segment
from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.full import CodecStore
from edgekv.types import F32

MORE = 512  # tokens beside the window, at most: so many can be rewound without computing the layer anew


def ring_tokens(window: int) -> int:
    """Tokens that a layer with this window keeps."""
    return -(-(window + min(window, MORE)) // BLOCK) * BLOCK


class SlidingCache(CodecStore):
    """The latest `ring_tokens`; position p lies in slot p modulo their number."""

    name = "rolling"
    paper = "ours"
    summary = "the window of a sliding layer"
    tradeoff = "long rewinds: they compute the conversation anew"

    def __init__(self, geometry: Geometry, config: Any, codecs: WindowCodecs) -> None:
        super().__init__(geometry, config)
        self.window = geometry.sliding_window or geometry.capacity
        self.size = ring_tokens(self.window)
        self._codecs = codecs
        self.key_codec, self.value_codec = codecs(geometry.n_kv_heads, self.size, geometry.head_dim)
        self.n_lost = 0  # tokens whose slots were taken by later ones

    def cut(self, n_tokens: int) -> SlidingCache:
        small, shape = copy.copy(self), self.geometry
        size = min(n_tokens, self.size)
        small.key_codec, small.value_codec = self._codecs(shape.n_kv_heads, size, shape.head_dim)
        return small

    def stored(self) -> dict[str, Codec]:
        return {"key": self.key_codec, "value": self.value_codec}

    @property
    def n_kept(self) -> int:
        return min(self.n_seen, self.size)

    def bytes_read(self) -> int:
        token_bytes = self.key_codec.token_bytes + self.value_codec.token_bytes
        return min(self.n_seen, self.window) * token_bytes

    def is_static(self) -> bool:
        """Before the ring is full."""
        return self.n_seen < min(self.geometry.capacity, self.window)

    @property
    def _slot(self) -> int:
        """Of the next token."""
        return self.n_seen if self.n_seen < self.size else self.n_seen % self.size

    def rollback_tokens(self) -> int:
        """What they take the slots of is behind the window with or without them."""
        return min(self.geometry.capacity - self.n_seen, self.size - self.window)

    def max_append_tokens(self) -> int:
        """No token that a query of the piece still sees loses its slot, and the piece does not go round."""
        return min(self.size - self.window, self.size - self._slot)

    def append_prompt(self, keys: F32, values: F32) -> None:
        """Appends a prompt's keys and values (n_kv_heads, n, head_dim)."""
        n = keys.shape[1]
        self.require_room(n)
        self.n_seen += n
        begin = max(0, n - self.size)
        while begin < n:
            slot = (self.n_seen - n + begin) % self.size
            end = min(n, begin + self.size - slot)
            self.kernels.encode(self.key_codec, keys[:, begin:end], slot)
            self.kernels.encode(self.value_codec, values[:, begin:end], slot)
            begin = end
        self.n_lost = max(self.n_lost, self.n_seen - self.size)

    def append(self, keys: F32, values: F32) -> None:
        """Stores keys and values (n_kv_heads, n, head_dim) of new tokens."""
        self.kernels.append(self.key_codec, self.value_codec, keys, values, self._slot)
        self.advance(keys.shape[1])

    def advance(self, n: int) -> None:
        super().advance(n)
        self.n_lost = max(self.n_lost, self.n_seen - self.size)

    def segments(self) -> list[Segment]:
        """The older part of the ring, then the newer one."""
        slot, codecs = self._slot, (self.key_codec, self.value_codec)
        newer = Segment(*codecs, 0, slot, self.n_seen - slot)
        older = Segment(*codecs, slot, self.size, self.n_seen - self.size)
        return [part for part in (older, newer) if part.stop > part.first and part.position >= 0]

    def truncate(self, n: int, n_same: int = 0) -> int:
        """All or nothing: what the window before the n-th token held must still be there."""
        if self.n_lost and n - self.window < self.n_lost:
            n = self.n_lost = 0
        self.n_seen = n
        return n

    def counters_valid(self) -> bool:
        whole = self.n_lost == 0 or self.n_seen - self.window >= self.n_lost
        return super().counters_valid() and whole and self.n_lost >= self.n_seen - self.size
