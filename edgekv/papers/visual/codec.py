"""Storage of a span of image tokens in uniform levels between two quantiles of its group, 1 to 8 bits each."""

from __future__ import annotations

import numpy as np

from edgekv.codecs.codec import Codec, Layout, in_package
from edgekv.papers import from_half, to_half
from edgekv.types import F32, U8

AXES: dict[str, int | tuple[int, ...] | None] = {
    "layer": None,
    "tensor": None,
    "head": (1, 2),
    "head+token": 2,
    "channel": 1,
}
"""Axes of (n_kv_heads, tokens, head_dim) that share a range of levels; "layer": of keys and values together."""


class LevelSpan(Codec):
    """A span's keys or values as bit planes: bits * ceil(head_dim / 8) bytes per token and head.

    The lowest level and the step are float16, a pair for each ``group`` of AXES.
    """

    kind = "levels"
    backends = in_package("edgekv.papers.visual", "cpu")

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int, group: str) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.bits, self.group = bits, group

    def layout(self) -> Layout:
        widths = {"head": 1, "head+token": self.capacity, "channel": self.head_dim}
        ends = ((self.n_kv_heads, widths[self.group]) if self.group in widths else (1, 1)), "uint16"
        planes = (self.n_kv_heads, self.capacity, self.bits, -(-self.head_dim // 8))
        return {"planes": (planes, "uint8"), "low": ends, "step": ends}

    @property
    def token_bytes(self) -> int:
        ends = 4 * self.n_kv_heads if self.group == "head+token" else 0
        return self.n_kv_heads * self.bits * -(-self.head_dim // 8) + ends

    def set_range(self, lowest: F32, highest: F32) -> None:
        """Stores the lowest level, and the step to the highest; both broadcast to ``low`` (n_kv_heads, ...)."""
        step = (highest - lowest) / np.float32(2**self.bits - 1)
        self.arrays["low"][:], self.arrays["step"][:] = to_half(lowest), to_half(step)

    def encode(self, x: F32, t0: int) -> None:
        """Stores x (n_kv_heads, n, head_dim) as tokens t0.., rounded to the nearest level."""
        encode_levels(x, *self._ends(t0, t0 + x.shape[1]), self.arrays["planes"], t0)

    def decode(self, t0: int, t1: int) -> F32:
        """Returns the levels of tokens t0..t1 (Visual 1-bit KV, equation 9)."""
        bits = np.unpackbits(self.arrays["planes"][:, t0:t1], axis=3, count=self.head_dim, bitorder="little")
        codes = (bits << np.arange(self.bits, dtype=np.uint8)[:, None]).sum(axis=2, dtype=np.float32)
        low, step = self._ends(t0, t1)
        values: F32 = low + codes * step
        return values

    def _ends(self, t0: int, t1: int) -> tuple[F32, F32]:
        """Returns low and step of tokens t0..t1, which broadcast to (n_kv_heads, t1 - t0, head_dim)."""
        low, step = from_half(self.arrays["low"]), from_half(self.arrays["step"])
        if self.group == "channel":
            return low[:, None], step[:, None]
        if self.group == "head+token":
            low, step = low[:, t0:t1], step[:, t0:t1]
        return low[..., None], step[..., None]


def encode_levels(x: F32, low: F32, step: F32, planes: U8, t0: int) -> None:
    """Stores x (G, n, D) at tokens t0.. of planes (G, cap, n_bits, W), W = ceil(D / 8), as bit planes.

    The code is round((x - low) / step), halves to even, clipped to 0..2 ** n_bits - 1; 0 where step is 0. low and
    step broadcast to x. Bit e % 8 of byte e // 8 of plane j is bit j of element e's code; bits beyond D are 0.
    """
    n_bits = planes.shape[2]
    with np.errstate(divide="ignore", invalid="ignore"):
        position = np.where(step > 0, (x - low) / step, 0)
    codes = np.clip(np.rint(position), 0, 2**n_bits - 1).astype(np.uint8)
    bits = codes[:, :, None] >> np.arange(n_bits, dtype=np.uint8)[:, None] & 1  # (G, n, n_bits, D)
    planes[:, t0 : t0 + x.shape[1]] = np.packbits(bits, axis=3, bitorder="little")


def encode_span(packed: tuple[Codec, Codec], k: F32, v: F32, quantile: float, ranges: tuple[float, float]) -> None:
    """Packs a span's k and v (n_kv_heads, n, head_dim) in levels between the quantiles of each group.

    ranges: the share of the distance between the quantiles, around its middle, that levels of k and v cover.
    """
    for codec, x, share in zip(packed, (k, v), ranges, strict=True):
        assert isinstance(codec, LevelSpan)
        shared = np.stack([k, v]) if codec.group == "layer" else x
        lowest, highest = np.quantile(shared, (quantile, 1 - quantile), axis=AXES[codec.group]).astype(np.float32)
        if share < 1:
            middle, reach = (lowest + highest) / 2, np.float32(share / 2) * (highest - lowest)
            lowest, highest = middle - reach, middle + reach
        shape = codec.arrays["low"].shape
        codec.set_range(lowest.reshape(shape), highest.reshape(shape))
        codec.encode(x, 0)
