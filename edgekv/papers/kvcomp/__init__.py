"""KVComp: levels of a fixed relative step, K per channel and V per token, in Huffman codes built on the prompt.

Measured here (docs/papers.md): 4 to 13% fewer bits than KIVI at equal KL, where the paper claims 32 to 62%, and
attention takes four to five times as long as over f16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from edgekv.kernels import Kernels
from edgekv.kvcache.cache import Geometry, Workspace
from edgekv.kvcache.config import Config, number, one_of, tokens
from edgekv.kvcache.policies import SinkWindowCache, Sizes
from edgekv.papers.kvcomp.codec import HuffmanKeys, HuffmanValues
from edgekv.types import F32

MIN_STEP = 1 / 255  # codes are bytes


@dataclasses.dataclass(frozen=True)
class KVCompConfig(Config):
    """Options of `kvcomp`.

    krel: float, default 0.25. Distance of two levels of a key channel, as a share of its range in a block.
    vrel: float, default 0.25. The same of a value.
    block: int, default 64. Tokens that are packed together: 16, 32, 64, 128 or 256.
    residual_length: int, default 128. Latest tokens that stay in f16, at least.
    """

    scheme: ClassVar[str] = "kvcomp"

    krel: float = number(0.25, MIN_STEP, 1)
    vrel: float = number(0.25, MIN_STEP, 1)
    block: int = one_of(64, (16, 32, 64, 128, 256))
    residual_length: int = tokens(128)


class KVComp(SinkWindowCache):
    """KVComp, 3.1-3.3: Huffman codes of round((x - min) / step), step = rel * (max - min).

    min and step are per channel of a block (K) or per token (V). K and V have a codebook each in every layer,
    built from the histogram of the prompt, in which every level occurs; before any prompt, from that of Gaussian
    numbers. With D = head_dim and B = block, a token of a KV head takes

        D * (bits_k + bits_v) / 8 + 4 * D / B + 4 + 2 * (2 + 4 / B) bytes:

    codes, float16 min and step of K's channels and of V's token, and for K and V each the token's bit count
    (uint16) and its share of the block's offset (uint32), as in the paper. The average code lengths bits_k and
    bits_v depend on the data, but never exceed fixed-length codes of ceil(log2(levels)) bits, levels =
    round(1 / rel) + 1: a block that Huffman codes would not shorten is stored in fixed-length codes. That bound is
    `planned_bytes`; `nbytes` counts what the pools of bit strings have taken. Codebook and decode table (16 KiB)
    of K and V are counted in each layer, the shared table of the fixed-length codes is not. The latest
    residual_length + block tokens are in f16 on top.

    Deviations: the paper's decoder walks a tree bit by bit; this one looks up 11 bits at a time, so that no code
    word is longer. The paper has no blocks in fixed-length codes.
    """

    name = "kvcomp"
    paper = "KVComp, 3.1-3.3"
    summary = "error-bounded levels (K per channel and block, V per token) in Huffman codes built on the prompt"
    tradeoff = "speed: every code is decoded at every step; the bytes depend on the text (listed: the most)"
    Config = KVCompConfig
    flush_is_static = False  # the pools grow

    def exact_sizes(self, config: KVCompConfig) -> Sizes:
        return Sizes(sink=0, residual_length=config.residual_length, block=config.block)

    def codecs(self, geometry: Geometry, capacity: int, config: KVCompConfig) -> tuple[HuffmanKeys, HuffmanValues]:
        shape = geometry.n_kv_heads, capacity, geometry.head_dim
        self.keys = HuffmanKeys(*shape, config.block, config.krel)
        self.values = HuffmanValues(*shape, config.block, config.vrel)
        return self.keys, self.values

    def planned_bytes(self, n_tokens: int | None = None) -> int:
        """Returns the most that the tokens can take: every block in fixed-length codes."""
        cache = self if n_tokens is None else type(self)(self.geometry.cut(n_tokens), self.config)
        return super().planned_bytes(n_tokens) + cache.keys.pool_bound + cache.values.pool_bound

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        self.keys.on_growth = lambda pool: self.arrays.__setitem__("key.pool", pool)
        self.values.on_growth = lambda pool: self.arrays.__setitem__("value.pool", pool)
        super().allocate(kernels, workspace)

    def prefill(self, queries: F32, keys: F32, values: F32) -> None:
        """Takes a prompt's queries (n_heads, n, head_dim), keys and values (n_kv_heads, n, head_dim)."""
        self.keys.fit(keys)
        self.values.fit(values)
        self.append_prefill(keys, values)

    def truncate(self, n: int, n_same: int = 0) -> int:
        """Goes back to n tokens; at 0 the codebooks of the conversation are forgotten."""
        n_seen = super().truncate(n, n_same)
        if not n_seen:
            self.keys.forget()
            self.values.forget()
        return n_seen

    def arrays_valid(self) -> bool:
        return self.keys.arrays_valid(self.n_stored) and self.values.arrays_valid(self.n_stored)

    def extra_state(self) -> dict[str, Any]:
        return {"keys": self.keys.extra_state(), "values": self.values.extra_state()}

    def load_extra_state(self, extra: Mapping[str, Any]) -> None:
        self.keys.load_extra_state(extra["keys"])
        self.values.load_extra_state(extra["values"])

    def notes(self) -> list[str]:
        d = self.geometry.n_kv_heads * self.geometry.head_dim
        if not self.n_packed:
            return [f"kvcomp: nothing is packed before {self.sizes.residual_length + self.sizes.block} tokens"]
        k, v = (8 * codec.token_bytes / d for codec in (self.keys, self.values))
        return [f"kvcomp: {k:.2f} bits per key element and {v:.2f} per value element, metadata included"]
