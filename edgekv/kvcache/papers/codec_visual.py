"""A span of image tokens in uniform levels between two quantiles of its group: 1 to 8 bits per element."""

from __future__ import annotations

import numpy as np

from edgekv.kvcache.base import Layout
from edgekv.kvcache.codecs import Codec
from edgekv.types import F32

GROUPS = ("layer", "tensor", "head", "head+token")


class LevelSpan(Codec):
    """One span's keys or values as bit planes: bits * ceil(head_dim / 8) bytes per token and head.

    The lowest level and the step are float16: one pair for all (groups "layer" and "tensor"), per head ("head")
    or per head and token ("head+token").
    """

    kind = "levels"

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


def encode_span(keys: LevelSpan, values: LevelSpan, k: F32, v: F32, quantile: float) -> None:
    """Packs a whole span, k and v (n_kv_heads, n, head_dim), between the quantiles of each group of elements."""
    if keys.group == "layer":
        together = np.stack([k, v])
        for codec in (keys, values):
            codec.set_ends(*_quantiles(together, None, quantile))
    else:
        axes = {"tensor": None, "head": (1, 2), "head+token": 2}[keys.group]
        for codec, x in ((keys, k), (values, v)):
            lowest, highest = _quantiles(x, axes, quantile)
            shape = codec.arrays["low"].shape
            codec.set_ends(lowest.reshape(shape), highest.reshape(shape))
    keys.encode(k, 0)
    values.encode(v, 0)


def _quantiles(x: F32, axes: int | tuple[int, ...] | None, quantile: float) -> tuple[F32, F32]:
    lowest, highest = np.quantile(x, (quantile, 1 - quantile), axis=axes).astype(np.float32)
    return lowest, highest
