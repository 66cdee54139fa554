"""The baseline: keys and values as the model made them, rounded to half precision (or kept in float32)."""

from __future__ import annotations

import dataclasses

from edgekv.errors import CacheError
from edgekv.kvcache.base import Geometry
from edgekv.kvcache.codecs import F16, Float32, KeyCodec, ValueCodec
from edgekv.kvcache.keepall import KeepAll

DTYPES: dict[str, type[F16] | type[Float32]] = {"f16": F16, "f32": Float32}


@dataclasses.dataclass(frozen=True)
class DenseKnobs:
    """``dtype``: f16 or f32."""

    dtype: str = "f16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise CacheError(f"--kv dense:dtype={self.dtype}: accepted: {', '.join(DTYPES)}")


class Dense(KeepAll):
    """Every key and value in half precision: 4 * head_dim bytes per token and KV head (f32: 8 * head_dim)."""

    name = "dense"
    paper = "baseline"
    summary = "keys and values in f16 (or dtype=f32)"
    gives_up = "nothing but memory"
    exact_when_short = True
    Knobs = DenseKnobs

    def codecs(self, geometry: Geometry, knobs: DenseKnobs) -> tuple[KeyCodec, ValueCodec]:
        codec = DTYPES[knobs.dtype]
        shape = geometry.n_kv_heads, geometry.capacity, geometry.head_dim
        return codec(*shape), codec(*shape)
