"""The simplest policy: every token stays, keys in one codec and values in another."""

from __future__ import annotations

import abc
from typing import Any

from edgekv.kernels.contract.segment import Segment
from edgekv.kvcache.codec_store import CodecStore
from edgekv.kvcache.codecs import Codec
from edgekv.kvcache.geometry import Geometry
from edgekv.types import F32


class KeepAll(CodecStore):
    """One segment: all tokens."""

    def __init__(self, geometry: Geometry, knobs: Any) -> None:
        super().__init__(geometry, knobs)
        self.key_codec, self.value_codec = self.codecs(geometry, knobs)

    @abc.abstractmethod
    def codecs(self, geometry: Geometry, knobs: Any) -> tuple[Codec, Codec]:
        """The scheme: how keys and how values are stored."""

    def stored(self) -> dict[str, Codec]:
        return {"key": self.key_codec, "value": self.value_codec}

    def bytes_read(self) -> int:
        reach = min(self.n_seen, self.geometry.sliding_window or self.n_seen)
        return reach * (self.key_codec.token_bytes + self.value_codec.token_bytes)

    def is_steady(self) -> bool:
        return self.n_seen < self.geometry.capacity

    def tentative_tokens(self) -> int:
        return self.geometry.capacity - self.n_seen

    def extend(self, keys: F32, values: F32) -> None:
        self.require_room(keys.shape[1])
        self.key_codec.encode(keys, self.n_seen)
        self.value_codec.encode(values, self.n_seen)
        self.n_seen += keys.shape[1]

    def append(self, keys: F32, values: F32) -> None:
        self.kernels.append(self.key_codec, self.value_codec, keys, values, self.n_seen)
        self.n_seen += keys.shape[1]

    def segments(self) -> list[Segment]:
        return [Segment(self.key_codec, self.value_codec, 0, self.n_seen)]
