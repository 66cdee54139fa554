"""Plain integers of 8 or 4 bits, symmetric around 0, with a scale per token."""

from __future__ import annotations

from edgekv.kvcache.cache import Layout
from edgekv.kvcache.codecs import Codec, in_backends


class Int8(Codec):
    """Levels -127..127 as signed bytes times a float16 scale per token: head_dim + 2 bytes."""

    kind = "int8"
    backends = in_backends("ints")

    def layout(self) -> Layout:
        return self._layout(self.head_dim, "int8")

    def _layout(self, n_bytes: int, dtype: str) -> Layout:
        tokens = self.n_kv_heads, self.capacity
        return {"codes": ((*tokens, n_bytes), dtype), "scale": (tokens, "uint16")}

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.head_dim + 2)


class Symmetric4(Int8):
    """Levels -7..7 plus 8, two to a byte, times a float16 scale per token: head_dim / 2 + 2 bytes."""

    kind = "symmetric4"

    def layout(self) -> Layout:
        return self._layout(self.head_dim // 2, "uint8")

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.head_dim // 2 + 2)
