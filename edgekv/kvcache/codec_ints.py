"""Plain integers of 8 or 4 bits, symmetric around 0, with a scale per token."""

from __future__ import annotations

from edgekv.kvcache.cache import Layout
from edgekv.kvcache.codecs import Codec, in_backends

KEY_BLOCK = 32  # tokens that lie next to each other, so that a score loop runs over tokens


class Symmetric(Codec):
    """Levels -top..top times a float16 scale per token, top = 2^(bits-1) - 1: head_dim * bits / 8 + 2 bytes."""

    block: int

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.n_bytes = head_dim * bits // 8

    def layout(self) -> Layout:
        blocks = -(-self.capacity // self.block)
        return {
            "codes": ((self.n_kv_heads, blocks, self.n_bytes, self.block), "uint8"),
            "scale": ((self.n_kv_heads, self.capacity), "uint16"),
        }

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.n_bytes + 2)


class SymmetricKeys(Symmetric):
    """Blocks of KEY_BLOCK tokens, channel by channel; the last block is allocated whole."""

    kind = "symmetric_keys"
    backends = in_backends("ints")

    block = KEY_BLOCK


class SymmetricValues(Symmetric):
    """Token by token."""

    kind = "symmetric_values"
    backends = in_backends("ints")

    block = 1
