"""An example of a KV scheme in a package of its own: keys and values in bfloat16.

After `pip install ./examples/scheme_package`, whose pyproject.toml has the entry point, its name works everywhere:
`--kv bf16`, `Session.load(..., kv="bf16")`, sessions on disk and `edgekv eval`. The codec's methods define its
bytes in NumPy, which is enough to run; the loop in edgekv_bf16_loops.py makes it fast on a CPU.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from edgekv.plugin import Codec, Config, FullCache, Geometry, Layout, one_of

F32 = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class BFloat16Config(Config):
    """The options of bf16. rounding: nearest (ties to even), or down (towards zero)."""

    scheme: ClassVar[str] = "bf16"

    rounding: str = one_of("nearest", ["nearest", "down"])


class BFloat16Codec(Codec):
    """A codec of the upper halves of float32: 2 bytes per element, the range of float32, 8 bits of precision."""

    kind = "bf16"
    backends = {"cpu": "edgekv_bf16_loops"}  # noqa: RUF012

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, rounding: str) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.rounding = rounding

    def layout(self) -> Layout:
        """Returns the shape and type of each array: here of one, (n_kv_heads, capacity, head_dim)."""
        return {"upper": ((self.n_kv_heads, self.capacity, self.head_dim), "uint16")}

    @property
    def token_bytes(self) -> int:
        """The bytes of one token in all heads."""
        return 2 * self.n_kv_heads * self.head_dim

    def encode(self, x: F32, t0: int) -> None:
        """Stores x (n_kv_heads, n, head_dim) as tokens t0, t0 + 1, ..."""
        bits = np.ascontiguousarray(x).view(np.uint32)
        if self.rounding == "nearest":  # half of the last kept bit; a tie goes to an even one
            bits = bits + np.uint32(0x7FFF) + (bits >> 16 & 1)
        self.arrays["upper"][:, t0 : t0 + x.shape[1]] = bits >> 16

    def decode(self, t0: int, t1: int) -> F32:
        """Returns tokens t0..t1, (n_kv_heads, t1 - t0, head_dim) float32."""
        return (self.arrays["upper"][:, t0:t1].astype(np.uint32) << 16).view(np.float32)


class BFloat16(FullCache):
    """A cache of all keys and values in bfloat16: 4 * head_dim bytes per token and KV head."""

    name = "bf16"
    paper = "example"
    summary = "keys and values in bfloat16"
    tradeoff = "3 bits of f16's precision, for float32's range"
    Config = BFloat16Config

    def codecs(self, geometry: Geometry, config: BFloat16Config) -> tuple[Codec, Codec]:
        """Returns the codecs of a layer's keys and of its values."""
        size = geometry.n_kv_heads, geometry.capacity, geometry.head_dim
        return BFloat16Codec(*size, config.rounding), BFloat16Codec(*size, config.rounding)
