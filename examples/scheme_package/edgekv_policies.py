"""Two more policies: one that keeps the latest tokens exact and packs the others, and one that evicts.

`bf16_old` is two codecs and three numbers; `latest` shows what a policy of its own must define.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from edgekv_bf16 import BFloat16Codec

from edgekv.plugin import (
    F16,
    Codec,
    Config,
    Geometry,
    Kernels,
    KVCache,
    Layout,
    Segment,
    SinkWindowCache,
    Sizes,
    Workspace,
    number,
    tokens,
)

F32 = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class BFloat16OldConfig(Config):
    """The options of bf16_old. window: latest tokens that stay in f16."""

    scheme: ClassVar[str] = "bf16_old"

    window: int = tokens(64)


class BFloat16Old(SinkWindowCache):
    """A cache of the first 4 and the latest tokens in f16, the others in bfloat16, packed 32 at a time."""

    name = "bf16_old"
    paper = "example"
    summary = "old tokens in bfloat16"
    tradeoff = "3 bits of f16's precision, for float32's range"
    Config = BFloat16OldConfig

    def exact_sizes(self, config: BFloat16OldConfig) -> Sizes:
        """Returns how many tokens stay exact, and how many are packed at a time."""
        return Sizes(sink=4, residual_length=config.window, block=32)

    def codecs(self, geometry: Geometry, capacity: int, config: BFloat16OldConfig) -> tuple[Codec, Codec]:
        """Returns the codecs of the packed keys and values."""
        size = geometry.n_kv_heads, capacity, geometry.head_dim
        return BFloat16Codec(*size, "nearest"), BFloat16Codec(*size, "nearest")


@dataclasses.dataclass(frozen=True)
class LatestConfig(Config):
    """The options of latest. budget: tokens that are kept."""

    scheme: ClassVar[str] = "latest"

    budget: int = number(256, 1, 1 << 20, " tokens")


class Latest(KVCache):
    """A cache of the latest ``budget`` tokens in f16, in a ring: 4 * budget * head_dim bytes per KV head.

    Keys keep the rotation of their position, so that the order in the ring means nothing to attention.
    """

    name = "latest"
    paper = "example"
    summary = "the latest 256 tokens in f16"
    tradeoff = "all that was said before"
    Config = LatestConfig

    def __init__(self, geometry: Geometry, config: LatestConfig) -> None:
        super().__init__(geometry, config)
        self.slots = min(config.budget, geometry.capacity, geometry.sliding_window or geometry.capacity)
        size = geometry.n_kv_heads, self.slots, geometry.head_dim
        self.stored = {"key": F16(*size), "value": F16(*size)}

    def layout(self) -> Layout:
        """Returns every array; planned and allocated bytes are counted from this."""
        codecs = self.stored.items()
        return {f"{end}.{name}": spec for end, codec in codecs for name, spec in codec.layout().items()}

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        """Allocates the arrays, and hands each codec its own."""
        super().allocate(kernels, workspace)
        for end, codec in self.stored.items():
            codec.bind({name: self.arrays[f"{end}.{name}"] for name in codec.layout()}, kernels)

    def bytes_read(self) -> int:
        """Returns the bytes that the next token reads."""
        return 2 * self.stored["key"].bytes_of(min(self.n_seen, self.slots))

    def max_append_tokens(self) -> int:
        """Returns 1, as each token is attended to before the next one takes a slot."""
        return 1

    def append_prefill(self, keys: F32, values: F32) -> None:
        """Stores the last tokens of a prompt: those before leave at once."""
        self.require_room(keys.shape[1])
        self.n_seen += max(0, keys.shape[1] - self.slots)
        for t in range(max(0, keys.shape[1] - self.slots), keys.shape[1]):
            self.append(keys[:, t : t + 1], values[:, t : t + 1])

    def append(self, keys: F32, values: F32) -> None:
        """Stores a token in the slot of the oldest one."""
        self.kernels.encode(self.stored["key"], keys, self.n_seen % self.slots)
        self.kernels.encode(self.stored["value"], values, self.n_seen % self.slots)
        self.n_seen += 1

    def segments(self) -> list[Segment]:
        """Returns the ring; the least of its positions is where the oldest token stands."""
        n_kept = min(self.n_seen, self.slots)
        return [Segment(self.stored["key"], self.stored["value"], 0, n_kept, self.n_seen - n_kept)]

    def truncate(self, n: int, n_same: int = 0) -> int:
        """Goes back to n tokens while none has left, else to the beginning: what left does not come back."""
        self.n_seen = n if self.n_seen <= self.slots or n == self.n_seen else 0
        return self.n_seen
