"""KIVI's codecs: integers with a low end and a step, of keys per channel, of values per token."""

from __future__ import annotations

from edgekv.kvcache.cache import Layout
from edgekv.kvcache.codecs import Codec, in_package


class KiviKeys(Codec):
    """low + step * code per channel of ``group`` tokens: head_dim * (bits / 8 + 4 / group) bytes.

    Whole groups only: they are encoded from a multiple of ``group`` on, and ``capacity`` is one.
    """

    kind = "kivi_keys"
    backends = in_package("edgekv.papers.kivi")

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, bits: int, group: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.n_bytes, self.group = head_dim * bits // 8, group

    def layout(self) -> Layout:
        ends = (self.n_kv_heads, self.capacity // self.group, self.head_dim)
        return {
            "codes": ((self.n_kv_heads, self.capacity, self.n_bytes), "uint8"),
            "step": (ends, "uint16"),
            "low": (ends, "uint16"),
        }

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.n_bytes + -(-4 * self.head_dim // self.group))


class KiviValues(Codec):
    """low + step * code per token and ``span`` of channels: head_dim * (bits / 8 + 4 / span) bytes."""

    kind = "kivi_values"
    backends = in_package("edgekv.papers.kivi")

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
