"""Schemes that keep every token: `CodecStore` and `FullCache`, bases for schemes of two codecs, and `Dense`."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

from edgekv.codecs.codec import Codec, Layout, WindowCodecs
from edgekv.codecs.f16 import Float32, f16_codecs
from edgekv.codecs.ints import Int8
from edgekv.kernels import Kernels
from edgekv.kernels.interface import Segment
from edgekv.kvcache.cache import EXAMPLE, Geometry, KVCache, Workspace
from edgekv.kvcache.config import Config, one_of
from edgekv.types import F32


class CodecStore(KVCache):
    """Lays out and binds what `stored` names: array ``half`` of the codec ``key`` is ``key.half``."""

    @abc.abstractmethod
    def stored(self) -> dict[str, Codec]:
        """Its codecs, by the names that their arrays begin with."""

    @classmethod
    def codecs_used(cls, config: Any) -> set[type[Any]] | None:
        return {type(codec) for codec in cls(EXAMPLE, config).stored().values()}

    def layout(self) -> Layout:
        codecs = self.stored().items()
        return {f"{end}.{name}": spec for end, codec in codecs for name, spec in codec.layout().items()}

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        super().allocate(kernels, workspace)
        for end, codec in self.stored().items():
            codec.bind({name: self.arrays[f"{end}.{name}"] for name in codec.layout()}, kernels)


class FullCache(CodecStore):
    """One segment: all tokens."""

    def __init__(self, geometry: Geometry, config: Any) -> None:
        super().__init__(geometry, config)
        self.key_codec, self.value_codec = self.codecs(geometry, config)

    @abc.abstractmethod
    def codecs(self, geometry: Geometry, config: Any) -> tuple[Codec, Codec]:
        """The scheme: how keys and how values are stored."""

    def stored(self) -> dict[str, Codec]:
        return {"key": self.key_codec, "value": self.value_codec}

    def bytes_read(self) -> int:
        reach = min(self.n_seen, self.geometry.sliding_window or self.n_seen)
        return reach * (self.key_codec.token_bytes + self.value_codec.token_bytes)

    def is_static(self) -> bool:
        return self.n_seen < self.geometry.capacity

    def rollback_tokens(self) -> int:
        return self.geometry.capacity - self.n_seen

    def append_prompt(self, keys: F32, values: F32) -> None:
        """Appends a prompt's keys and values (n_kv_heads, n, head_dim)."""
        self.require_room(keys.shape[1])
        self.kernels.encode(self.key_codec, keys, self.n_seen)
        self.kernels.encode(self.value_codec, values, self.n_seen)
        self.n_seen += keys.shape[1]

    def append(self, keys: F32, values: F32) -> None:
        """Stores keys and values (n_kv_heads, n, head_dim) of new tokens."""
        self.kernels.append(self.key_codec, self.value_codec, keys, values, self.n_seen)
        self.n_seen += keys.shape[1]

    def segments(self) -> list[Segment]:
        return [Segment(self.key_codec, self.value_codec, 0, self.n_seen)]


DTYPES: dict[str, WindowCodecs] = {  # of heads, tokens, head_dim
    "f16": f16_codecs,
    "f32": lambda g, n, d: (Float32(g, n, d), Float32(g, n, d)),
    "q8": lambda g, n, d: (Int8(g, n, d), Int8(g, n, d)),
}


@dataclasses.dataclass(frozen=True)
class DenseConfig(Config):
    """What `dense` can be set to.

    dtype: str, default "f16". Format of an element: f16, f32, or q8 (8-bit integers with a scale per token).
    """

    scheme: ClassVar[str] = "dense"

    dtype: str = one_of("f16", DTYPES)


class Dense(FullCache):
    """Every key and value in half precision: 4 * head_dim bytes per token and KV head.

    f32: 8 * head_dim. q8: symmetric levels -127..127 with a float16 scale per token, 2 * (head_dim + 2).
    """

    name = "dense"
    paper = "baseline"
    summary = "keys and values in f16 (or dtype=f32, q8)"
    tradeoff = "nothing but memory"
    is_lossless_when_short = True
    Config = DenseConfig

    @classmethod
    def is_lossless_on_text(cls, config: DenseConfig) -> bool:
        return config.dtype != "q8"

    @classmethod
    def window_codecs(cls, config: DenseConfig) -> WindowCodecs:
        return DTYPES[config.dtype]

    def codecs(self, geometry: Geometry, config: DenseConfig) -> tuple[Codec, Codec]:
        return DTYPES[config.dtype](geometry.n_kv_heads, geometry.capacity, geometry.head_dim)
