"""Codecs of plain integers: symmetric with a scale per token, and KIVI's asymmetric groups."""

from __future__ import annotations

from edgekv.kvcache.base import Layout
from edgekv.kvcache.codecs import Codec
from edgekv.types import F32

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

    def encode(self, x: F32, t0: int) -> None:
        self.kernels.encode_sym(x, self.arrays["codes"], self.arrays["scale"], t0)


class SymmetricKeys(Symmetric):
    """Blocks of KEY_BLOCK tokens, channel by channel; the last block is allocated whole."""

    kind = "symmetric_keys"

    block = KEY_BLOCK


class SymmetricValues(Symmetric):
    """Token by token."""

    kind = "symmetric_values"

    block = 1


class KiviKeys(Codec):
    """low + step * code per channel of ``group`` tokens: head_dim * (bits / 8 + 4 / group) bytes.

    Whole groups only: they are encoded from a multiple of ``group`` on, and ``capacity`` is one.
    """

    kind = "kivi_keys"

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int, group: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.n_bytes, self.group = head_dim * bits // 8, group

    def layout(self) -> Layout:
        groups = (self.n_kv_heads, self.capacity // self.group)
        return {
            "codes": ((*groups, self.n_bytes, self.group), "uint8"),
            "step": ((*groups, self.head_dim), "uint16"),
            "low": ((*groups, self.head_dim), "uint16"),
        }

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.n_bytes + -(-4 * self.head_dim // self.group))

    def encode(self, x: F32, t0: int) -> None:
        a = self.arrays
        self.kernels.encode_kivi_keys(x, a["codes"], a["step"], a["low"], t0)


class KiviValues(Codec):
    """low + step * code per token and ``span`` of channels: head_dim * (bits / 8 + 4 / span) bytes."""

    kind = "kivi_values"

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int, span: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.n_bytes, self.spans = head_dim * bits // 8, head_dim // span

    def layout(self) -> Layout:
        ends = (self.n_kv_heads, self.spans, self.capacity)
        return {
            "codes": ((self.n_kv_heads, self.capacity, self.n_bytes), "uint8"),
            "step": (ends, "uint16"),
            "low": (ends, "uint16"),
        }

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.n_bytes + 4 * self.spans)

    def encode(self, x: F32, t0: int) -> None:
        a = self.arrays
        self.kernels.encode_kivi_values(x, a["codes"], a["step"], a["low"], t0)
