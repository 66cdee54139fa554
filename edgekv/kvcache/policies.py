"""Policies: all tokens in one store, the first and latest exact and the rest packed, or a sliding window alone.

A policy decides which token lies in which store; how a store encodes tokens is its codec's.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
from typing import Any, ClassVar

import numpy as np

from edgekv.codecs.codec import Codec, Layout, WindowCodecs
from edgekv.codecs.f16 import F16, Float32, f16_codecs
from edgekv.codecs.ints import Int8
from edgekv.kernels import BLOCK, Kernels
from edgekv.kernels.arrays import contiguous
from edgekv.kernels.interface import Segment
from edgekv.kvcache.cache import EXAMPLE, Geometry, KVCache, Workspace
from edgekv.kvcache.config import Config, one_of
from edgekv.types import F32

EXTEND_TOKENS = 1024  # of a prompt, packed at a time: bounds the float32 copies
MIN_EXACT_SHARE = 0.75  # of the exact window after a rewind: with less, it is computed again
MAX_SPARE_TOKENS = 512  # beside a sliding window: so many can be rewound without computing the layer anew


class CodecCache(KVCache):
    """A cache whose arrays are those of the codecs in `stored`: ``half`` of the codec ``key`` is ``key.half``."""

    @abc.abstractmethod
    def stored(self) -> dict[str, Codec]:
        """Returns the codecs by the prefix of their arrays' names."""

    @classmethod
    def codecs_used(cls, config: Any) -> set[type[Any]] | None:
        return {type(codec) for codec in cls(EXAMPLE, config).stored().values()}

    def fixed(self) -> list[F32]:
        return [fixed for codec in self.stored().values() if (fixed := codec.fixed) is not None]

    def layout(self) -> Layout:
        codecs = self.stored().items()
        return {f"{prefix}.{name}": spec for prefix, codec in codecs for name, spec in codec.layout().items()}

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        super().allocate(kernels, workspace)
        for prefix, codec in self.stored().items():
            codec.bind({name: self.arrays[f"{prefix}.{name}"] for name in codec.layout()}, kernels)


class FullCache(CodecCache):
    """A cache with all tokens in one segment."""

    def __init__(self, geometry: Geometry, config: Any) -> None:
        super().__init__(geometry, config)
        self.key_codec, self.value_codec = self.codecs(geometry, config)

    @abc.abstractmethod
    def codecs(self, geometry: Geometry, config: Any) -> tuple[Codec, Codec]:
        """Returns the codecs of keys and of values, for ``geometry.capacity`` tokens."""

    def stored(self) -> dict[str, Codec]:
        return {"key": self.key_codec, "value": self.value_codec}

    def bytes_read(self) -> int:
        reach = min(self.n_seen, self.geometry.sliding_window or self.n_seen)
        return reach * (self.key_codec.token_bytes + self.value_codec.token_bytes)

    def is_static(self) -> bool:
        return self.n_seen < self.geometry.capacity

    def rollback_tokens(self) -> int:
        return self.geometry.capacity - self.n_seen

    def append_prefill(self, keys: F32, values: F32) -> None:
        self.require_room(keys.shape[1])
        self.kernels.encode(self.key_codec, keys, self.n_seen)
        self.kernels.encode(self.value_codec, values, self.n_seen)
        self.n_seen += keys.shape[1]

    def append(self, keys: F32, values: F32) -> None:
        self.kernels.append(self.key_codec, self.value_codec, keys, values, self.n_seen)
        self.n_seen += keys.shape[1]

    def segments(self) -> list[Segment]:
        return [Segment(self.key_codec, self.value_codec, 0, self.n_seen)]


DTYPES: dict[str, WindowCodecs] = {
    "f16": f16_codecs,
    "f32": lambda g, n, d: (Float32(g, n, d), Float32(g, n, d)),
    "q8": lambda g, n, d: (Int8(g, n, d), Int8(g, n, d)),
}


@dataclasses.dataclass(frozen=True)
class DenseConfig(Config):
    """The options of `dense`.

    dtype: str, default "f16". Format of an element: f16, f32, or q8 (8-bit integers with a scale per token).
    """

    scheme: ClassVar[str] = "dense"

    dtype: str = one_of("f16", DTYPES)


class Dense(FullCache):
    """Stores every key and value in half precision: 4 * head_dim bytes per token and KV head.

    f32: 8 * head_dim. q8: symmetric levels -127..127 with a float16 scale per token, 2 * (head_dim + 2).
    """

    name = "dense"
    paper = "baseline"
    summary = "keys and values in f16 (or dtype=f32, q8)"
    tradeoff = "nothing but memory"
    Config = DenseConfig

    @classmethod
    def is_lossless_on_text(cls, config: DenseConfig) -> bool:
        return config.dtype != "q8"

    @classmethod
    def window_codecs(cls, config: DenseConfig) -> WindowCodecs:
        return DTYPES[config.dtype]

    def codecs(self, geometry: Geometry, config: DenseConfig) -> tuple[Codec, Codec]:
        return DTYPES[config.dtype](geometry.n_kv_heads, geometry.capacity, geometry.head_dim)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Numbers of tokens: ``sink`` first and ``residual_length`` latest are exact, ``block`` are packed at once."""

    sink: int
    residual_length: int
    block: int


class SinkWindowCache(CodecCache):
    """A cache of three stores, tokens in order: [sink | packed | recent].

    Tokens enter the recent store exactly (f16). Whenever it holds residual_length + block tokens its oldest block
    is packed, so the packed part always holds whole blocks, and between residual_length and residual_length +
    block - 1 of the latest tokens are exact between two calls. The tail of a prompt stays exact too.

    A rewind shortens the recent part, without computing anything, while MIN_EXACT_SHARE of that is left.
    Further back it is made anew: residual_length tokens or more are computed again, and as many before these, so
    that each sees an exact window, as in decoding. What was packed of them stays as it was packed.
    """

    version = 2

    def __init__(self, geometry: Geometry, config: Any) -> None:
        super().__init__(geometry, config)
        self.sizes = self.exact_sizes(config)
        g, d, sink = geometry.n_kv_heads, geometry.head_dim, min(geometry.capacity, self.sizes.sink)
        self.packed_capacity = max(0, geometry.capacity - self.sizes.sink - self.sizes.residual_length)
        self.packed_capacity -= self.packed_capacity % self.sizes.block
        self.key_codec, self.value_codec = self.codecs(geometry, self.packed_capacity, config)
        recent = min(geometry.capacity, self.sizes.residual_length + self.sizes.block)
        self._stores = {
            "sink_key": F16(g, sink, d),
            "sink_value": F16(g, sink, d),
            "recent_key": F16(g, recent, d),
            "recent_value": F16(g, recent, d),
        }
        self._recent_capacity = recent
        self.n_sink = self.n_packed = self.n_recent = 0
        self.n_stored = 0  # n_packed, and the tokens behind them that a rewind has left in the packed store

    @abc.abstractmethod
    def exact_sizes(self, config: Any) -> Sizes:
        """Returns how many tokens stay exact, and how many are packed at a time."""

    @abc.abstractmethod
    def codecs(self, geometry: Geometry, capacity: int, config: Any) -> tuple[Codec, Codec]:
        """Returns the codecs of ``capacity`` packed keys and values (a multiple of the block, possibly 0)."""

    def stored(self) -> dict[str, Codec]:
        return {"key": self.key_codec, "value": self.value_codec, **self._stores}

    def segments(self) -> list[Segment]:
        s, packed = self._stores, self.n_sink + self.n_packed
        every = [
            Segment(s["sink_key"], s["sink_value"], 0, self.n_sink),
            *self.packed(),
            Segment(s["recent_key"], s["recent_value"], 0, self.n_recent, packed),
        ]
        return [segment for segment in every if segment.stop > segment.first]

    def packed(self) -> list[Segment]:
        """Returns the segments of the tokens between the sink and the recent ones."""
        return [Segment(self.key_codec, self.value_codec, 0, self.n_packed, self.n_sink)]

    def bytes_read(self) -> int:
        reach = min(self.n_seen, self.geometry.sliding_window or self.n_seen)
        total = 0
        for keys, values, first, stop, position, *_ in self.segments():
            seen = max(0, min(stop - first, position + stop - first - (self.n_seen - reach)))
            total += keys.bytes_of(seen) + values.bytes_of(seen)
        return total

    def append_prefill(self, keys: F32, values: F32) -> None:
        self.require_room(keys.shape[1])
        taken = self._fill_sink(keys, values)
        for a in range(taken, keys.shape[1], EXTEND_TOKENS):
            self._extend_chunk(keys[:, a : a + EXTEND_TOKENS], values[:, a : a + EXTEND_TOKENS])

    def _extend_chunk(self, keys: F32, values: F32) -> None:
        """Packs whole blocks of recent and new tokens at once; the rest becomes the recent tokens."""
        total, block = self.n_recent + keys.shape[1], self.sizes.block
        surplus = min(total - self.sizes.residual_length, self.packed_capacity - self.n_packed)
        packed = max(0, surplus // block * block)
        for codec, store, new in (
            (self.key_codec, self._stores["recent_key"], keys),
            (self.value_codec, self._stores["recent_value"], values),
        ):
            rounded = np.concatenate([store.decode(0, self.n_recent), store.round(new)], axis=1)
            stored = min(packed, self.n_stored - self.n_packed)
            if packed > stored:
                self.kernels.encode(codec, contiguous(rounded[:, stored:packed]), self.n_packed + stored)
            self.kernels.encode(store, contiguous(rounded[:, packed:]), 0)
        self._count_packed(packed)
        self.n_recent = total - packed
        self.n_seen += keys.shape[1]

    def max_append_tokens(self) -> int:
        free_sink = self.sizes.sink - self.n_sink
        return free_sink or self._recent_capacity - self.n_recent

    def append(self, keys: F32, values: F32) -> None:
        taken = self._fill_sink(keys, values)
        if n := keys.shape[1] - taken:
            recent = self._stores["recent_key"], self._stores["recent_value"]
            self.kernels.append(*recent, keys[:, taken:], values[:, taken:], self.n_recent)
            self.advance(n)

    def _fill_sink(self, keys: F32, values: F32) -> int:
        """Stores the first tokens of a conversation; returns how many were taken."""
        taken: int = min(self.sizes.sink - self.n_sink, keys.shape[1])
        if taken:
            self.kernels.encode(self._stores["sink_key"], keys[:, :taken], self.n_sink)
            self.kernels.encode(self._stores["sink_value"], values[:, :taken], self.n_sink)
            self.n_sink += taken
            self.n_seen += taken
        return taken

    def is_static(self) -> bool:
        return self.n_sink == self.sizes.sink and self.n_seen < self.geometry.capacity

    def rollback_tokens(self) -> int:
        if self.n_sink < self.sizes.sink:
            return 0
        before_packing = self.sizes.residual_length + self.sizes.block - 1 - self.n_recent
        return max(0, min(self.geometry.capacity - self.n_seen, before_packing))

    def advance(self, n: int) -> None:
        super().advance(n)
        self.n_recent += n

    def needs_flush(self) -> bool:
        block, room = self.sizes.block, self.packed_capacity - self.n_packed
        return self.n_recent >= self.sizes.residual_length + block and block <= room

    def flush(self) -> None:
        if not self.needs_flush():
            return
        block, stores = self.sizes.block, (self._stores["recent_key"], self._stores["recent_value"])
        if self.n_stored == self.n_packed:
            keys, values = (store.decode(0, block) for store in stores)
            self.kernels.append(self.key_codec, self.value_codec, keys, values, self.n_packed)
        n_seen, self.n_seen = self.n_seen, 0  # after an interrupt none of its tokens is used again
        for store in stores:
            store.move(block, self.n_recent, 0)
        self.n_recent -= block
        self._count_packed(block)
        self.n_seen = n_seen

    def _count_packed(self, n: int) -> None:
        self.n_packed += n
        self.n_stored = max(self.n_stored, self.n_packed)

    def counters_valid(self) -> bool:
        s, n_exact = self.sizes, self.n_seen - self.n_sink - self.n_packed
        return (
            super().counters_valid()
            and self.n_sink == min(self.n_seen, s.sink)
            and self.n_packed % s.block == self.n_stored % s.block == 0
            and self.n_packed <= self.n_stored <= self.packed_capacity
            and self.n_recent == n_exact <= self._recent_capacity
        )

    def recompute_from(self, n: int) -> int:
        held = n - min(n, self.sizes.sink)  # packed and recent tokens
        if not self.n_packed or held - self.n_packed >= MIN_EXACT_SHARE * self.sizes.residual_length:
            return n
        before_windows = self._whole_blocks(held - 2 * self.sizes.residual_length)
        return self.sizes.sink + before_windows if before_windows else 0

    def truncate(self, n: int, n_same: int = 0) -> int:
        self.n_sink = min(n, self.sizes.sink)
        held = n - self.n_sink
        self.n_recent = max(0, held - self.n_packed)
        self.n_packed = min(self.n_packed, self._whole_blocks(held))
        self.n_seen = self.n_sink + self.n_packed + self.n_recent
        self.n_stored = min(self.n_stored, self._whole_blocks(held + n_same)) if self.n_seen else 0
        return self.n_seen

    def _whole_blocks(self, n: int) -> int:
        return max(0, n // self.sizes.block * self.sizes.block)


def rolling_tokens(window: int) -> int:
    """Returns the slots of a layer with this sliding window: whole blocks, with room for tokens to be rewound."""
    return -(-(window + min(window, MAX_SPARE_TOKENS)) // BLOCK) * BLOCK


class RollingCache(FullCache):
    """A ring of `rolling_tokens` slots with the latest tokens: position p lies in slot p modulo their number."""

    name = "rolling"

    def __init__(self, geometry: Geometry, config: Any, codecs: WindowCodecs) -> None:
        self.window = geometry.sliding_window or geometry.capacity
        self.size, self._codecs = rolling_tokens(self.window), codecs
        super().__init__(geometry, config)
        self.n_lost = 0  # tokens whose slots were taken by later ones

    def codecs(self, geometry: Geometry, config: Any) -> tuple[Codec, Codec]:
        return self._codecs(geometry.n_kv_heads, self.size, geometry.head_dim)

    def cut(self, n_tokens: int) -> RollingCache:
        small = copy.copy(self)
        small.size = min(n_tokens, self.size)
        small.key_codec, small.value_codec = small.codecs(self.geometry, self.config)
        return small

    def is_static(self) -> bool:
        return self.n_seen < min(self.geometry.capacity, self.window)

    @property
    def _slot(self) -> int:
        """The slot of the next token."""
        return self.n_seen if self.n_seen < self.size else self.n_seen % self.size

    def rollback_tokens(self) -> int:
        # Tokens whose slots they take are out of the window with or without them.
        return min(self.geometry.capacity - self.n_seen, self.size - self.window)

    def max_append_tokens(self) -> int:
        # No token that a query of the piece still sees loses its slot, and the piece does not wrap around.
        return min(self.size - self.window, self.size - self._slot)

    def append_prefill(self, keys: F32, values: F32) -> None:
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
        self.kernels.append(self.key_codec, self.value_codec, keys, values, self._slot)
        self.advance(keys.shape[1])

    def advance(self, n: int) -> None:
        super().advance(n)
        self.n_lost = max(self.n_lost, self.n_seen - self.size)

    def segments(self) -> list[Segment]:
        slot, codecs = self._slot, (self.key_codec, self.value_codec)
        newer = Segment(*codecs, 0, slot, self.n_seen - slot)
        older = Segment(*codecs, slot, self.size, self.n_seen - self.size)
        return [segment for segment in (older, newer) if segment.stop > segment.first and segment.position >= 0]

    def truncate(self, n: int, n_same: int = 0) -> int:
        # All or nothing: the whole window before the n-th token must still be there.
        if self.n_lost and n - self.window < self.n_lost:
            n = self.n_lost = 0
        self.n_seen = n
        return n

    def counters_valid(self) -> bool:
        whole = self.n_lost == 0 or self.n_seen - self.window >= self.n_lost
        return super().counters_valid() and whole and self.n_lost >= self.n_seen - self.size
