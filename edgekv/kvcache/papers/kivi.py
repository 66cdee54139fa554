"""KIVI: 2-bit keys per channel over a group of tokens, 2-bit values per token, the latest tokens exact."""

from __future__ import annotations

import dataclasses

from edgekv.errors import CacheError
from edgekv.kvcache.base import Geometry
from edgekv.kvcache.codecs import Codec
from edgekv.kvcache.papers.codec_ints import KiviKeys, KiviValues
from edgekv.kvcache.windowed import Sizes, Windowed

BITS = (2, 4)
GROUPS = (32, 64, 128)


@dataclasses.dataclass(frozen=True)
class KiviKnobs:
    """``bits`` of a code; exact ``window``; tokens of a key ``group``; channels of a value group (0: all)."""

    bits: int = 2
    window: int = 128
    group: int = 32
    vgroup: int = 0

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise CacheError(f"--kv kivi2:bits={self.bits}: accepted: {', '.join(map(str, BITS))}")
        if self.window < 0:
            raise CacheError(f"--kv kivi2:window={self.window}: accepted: 0 or more tokens")
        if self.group not in GROUPS:
            raise CacheError(f"--kv kivi2:group={self.group}: accepted: {', '.join(map(str, GROUPS))} tokens")
        if self.vgroup < 0:
            raise CacheError(f"--kv kivi2:vgroup={self.vgroup}: accepted: 0 (all channels) or their number")


class Kivi(Windowed):
    """x ~ low + step * code, ends per channel of a group of keys and per value: what leaves the window is packed.

    head_dim * (bits/8 + 4/group) + head_dim * (bits/8 + 4/vgroup) bytes per packed token and KV head, with
    vgroup = head_dim for 0, and 4 * head_dim for each of window + group exact tokens. KIVI (arXiv 2402.02750),
    equations 1-4, as H1B-KV and KVComp use it. Deviations: one range per value instead of one per 32 channels
    (``vgroup=32`` has KIVI's), and the last window..window + group - 1 tokens are exact, keys and values alike,
    where KIVI packs its values token by token.
    """

    name = "kivi2"
    paper = "KIVI; baseline of H1B-KV and KVComp"
    summary = "2-bit keys per channel and 32 tokens, 2-bit values per token, the last 128 tokens exact"
    gives_up = "a bit per key element for the ranges; the values' outlier channels"
    Knobs = KiviKnobs

    def window_sizes(self, knobs: KiviKnobs) -> Sizes:
        return Sizes(sink=0, window=knobs.window, block=knobs.group)

    def codecs(self, geometry: Geometry, capacity: int, knobs: KiviKnobs) -> tuple[Codec, Codec]:
        head_dim, per_byte = geometry.head_dim, 8 // knobs.bits
        if head_dim % per_byte:
            raise CacheError(
                f"--kv kivi2:bits={knobs.bits} packs {per_byte} elements to a byte: head_dim {head_dim} must be "
                f"a multiple of {per_byte}"
            )
        if knobs.vgroup and head_dim % knobs.vgroup:
            raise CacheError(f"--kv kivi2:vgroup={knobs.vgroup}: it must divide head_dim {head_dim}")
        shape = geometry.n_kv_heads, capacity, head_dim
        return KiviKeys(*shape, knobs.bits, knobs.group), KiviValues(*shape, knobs.bits, knobs.vgroup or head_dim)
