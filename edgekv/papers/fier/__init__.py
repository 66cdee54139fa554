"""FIER: every token scored from one bit per key element, the best k attended to exactly."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from edgekv.kernels.registry import package_function
from edgekv.kvcache.cache import Geometry, Layout
from edgekv.kvcache.codecs import in_package
from edgekv.kvcache.knobs import Knobs, number, one_of, tokens
from edgekv.papers.retrieval import Index, Retrieval
from edgekv.types import Array

WORD = 32  # tokens per word of the index


@dataclasses.dataclass(frozen=True)
class FierKnobs(Knobs):
    """What `fier` can be set to.

    k: int, default 256. Tokens that a query attends to, by their estimated scores; 1 or more.
    group: int, default 32. Tokens whose keys share two levels per channel in the index: 32, 64, 128 or 256.
    levels: str, default "mad". The two levels: mad (mean -+ mean absolute deviation) or minmax (the range, as
        printed in the paper).
    skip: int, default 2. First layers whose attention reads every token.
    """

    scheme: ClassVar[str] = "fier"

    k: int = tokens(256, 1)
    group: int = one_of(32, (32, 64, 128, 256))
    levels: str = one_of("mad", ("mad", "minmax"))
    skip: int = number(2, 0, 1000, " layers")


class SignIndex(Index):
    """A bit per key element, and two levels per channel and group of tokens (FIER eq. 5, algorithm 1)."""

    kind = "sign_index"
    backends = in_package("edgekv.papers.fier")

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, group: int, levels: str) -> None:
        super().__init__(n_kv_heads, capacity, head_dim, block=group, unit=1)
        self.minmax = levels == "minmax"

    def layout(self) -> Layout:
        words = self.n_blocks * self.block // WORD
        return {
            "signs": ((self.n_kv_heads, words, self.head_dim), "uint32"),
            "levels": ((self.n_kv_heads, self.n_blocks, 2, self.head_dim), "uint16"),
        }

    @property
    def block_bytes(self) -> int:
        return self.n_kv_heads * self.head_dim * (self.block // 8 + 4)

    def encode(self, keys: Array, b0: int, b1: int) -> None:
        a = self.arrays
        encode = package_function(self.kernels, __name__, "encode_fier")
        encode(keys, self.block, self.minmax, a["signs"], a["levels"], b0, b1)


class Fier(Retrieval):
    """Top-k tokens by q . K~, K~ = centre +- step per channel and group of g tokens; exact attention on them.

    Beside f16 keys and values an index of a bit per key element and two f16 per channel and group (eq. 8):
    4 * head_dim + head_dim / 8 + 4 * head_dim / g bytes per token and KV head. A step reads the index and
    4 * head_dim bytes of k tokens.

    The paper leaves open three things. Levels: mean +- mean absolute deviation, which ranks tokens better than
    the range on most models (``levels``). Grouped queries: see `Retrieval`. The newest tokens, up to g - 1, that
    fill no group: always attended to, on top of k.
    """

    name = "fier"
    paper = "FIER, eq. 5 and algorithm 1"
    summary = "f16 keys and values, 1-bit index: exact attention on the k best tokens"
    gives_up = "memory (more than dense), and all but k tokens of each step's attention"
    Knobs = FierKnobs

    def index(self, geometry: Geometry, knobs: FierKnobs) -> Index:
        shape = geometry.n_kv_heads, geometry.capacity, geometry.head_dim
        return SignIndex(*shape, knobs.group, knobs.levels)
