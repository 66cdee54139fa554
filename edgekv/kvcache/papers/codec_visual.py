"""A span of image tokens in uniform levels between two quantiles of its group: 1 to 8 bits per element."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from edgekv.kvcache.cache import Layout
from edgekv.kvcache.codecs import Codec, in_backends
from edgekv.types import F32

AXES: dict[str, int | tuple[int, ...] | None] = {
    "layer": None,
    "tensor": None,
    "head": (1, 2),
    "head+token": 2,
    "channel": 1,
}
"""Of (n_kv_heads, tokens, head_dim), the axes that share two ends; "layer": of keys and values together."""
GROUPS = tuple(AXES)


class LevelSpan(Codec):
    """One span's keys or values as bit planes: bits * ceil(head_dim / 8) bytes per token and head.

    The lowest level and the step are float16: one pair for all (groups "layer" and "tensor"), per head ("head")
    or per head and token ("head+token").
    """

    kind = "levels"
    backends = in_backends("papers.visual", "reference", "cpu")

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int, group: str) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.bits, self.group = bits, group

    def layout(self) -> Layout:
        heads = self.n_kv_heads if self.group in ("head", "head+token") else 1
        ends = ((heads, self.capacity if self.group == "head+token" else 1), "uint16")
        planes = (self.n_kv_heads, self.capacity, self.bits, -(-self.head_dim // 8))
        return {"planes": (planes, "uint8"), "low": ends, "step": ends}

    @property
    def token_bytes(self) -> int:
        ends = 4 * self.n_kv_heads if self.group == "head+token" else 0
        return self.n_kv_heads * self.bits * -(-self.head_dim // 8) + ends

    def set_ends(self, lowest: F32, highest: F32) -> None:
        """Where the lowest and the highest level lie: shapes that broadcast to those of ``low`` and ``step``."""
        step = (highest - lowest) / np.float32(2**self.bits - 1)
        for name, ends in (("low", lowest), ("step", step)):
            self.arrays[name][:] = ends.astype(np.float16).view(np.uint16)

    def encode(self, x: F32, t0: int) -> None:
        """Codes of tokens t0..: round to nearest, clipped to the ends."""
        self.kernels.encode_levels(x, self.arrays["low"], self.arrays["step"], self.arrays["planes"], t0)


class ChannelLevels(LevelSpan):
    """`LevelSpan` with a float16 pair per head and channel."""

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim, bits, "channel")

    def layout(self) -> Layout:
        ends = ((self.n_kv_heads, self.head_dim), "uint16")
        return {"planes": super().layout()["planes"], "low": ends, "step": ends}

    def encode(self, x: F32, t0: int) -> None:
        """As levels 0, 1, .. of (x - low) / step; code 0 where step is 0."""
        low, step = (self.arrays[name].view(np.float16).astype(np.float32)[:, None] for name in ("low", "step"))
        position = np.where(step > 0, (x - low) / np.where(step > 0, step, 1), 0)
        zero, one = (np.full((1, 1), end, np.float16).view(np.uint16) for end in (0, 1))
        self.kernels.encode_levels(position.astype(np.float32), zero, one, self.arrays["planes"], t0)


class Levels(Protocol):
    """Where levels lie: fields of `VisualKnobs`."""

    @property
    def quantile(self) -> float: ...
    @property
    def k_range(self) -> float: ...
    @property
    def v_range(self) -> float: ...


def encode_span(packed: tuple[Codec, Codec], k: F32, v: F32, levels: Levels) -> None:
    """Packs a whole span, k and v (n_kv_heads, n, head_dim), between the quantiles of each group of elements."""
    for codec, x, share in zip(packed, (k, v), (levels.k_range, levels.v_range), strict=True):
        assert isinstance(codec, LevelSpan)
        shared = np.stack([k, v]) if codec.group == "layer" else x
        quantiles = levels.quantile, 1 - levels.quantile
        lowest, highest = np.quantile(shared, quantiles, axis=AXES[codec.group]).astype(np.float32)
        if share < 1:
            middle, reach = (lowest + highest) / 2, np.float32(share / 2) * (highest - lowest)
            lowest, highest = middle - reach, middle + reach
        shape = codec.arrays["low"].shape
        codec.set_ends(lowest.reshape(shape), highest.reshape(shape))
        codec.encode(x, 0)
