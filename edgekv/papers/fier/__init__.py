"""FIER: every token is scored from one bit per key element, and the best k are attended to exactly.

Measured here (docs/papers.md): the index ranks tokens clearly better than Quest's; perplexity x1.001 on one small
model and x2.0 on another, whose attention is spread. It saves time and no memory.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from edgekv.codecs.codec import Layout, in_package
from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.config import Config, number, one_of, tokens
from edgekv.papers import from_half, to_half
from edgekv.papers.retrieval import Index, Retrieval
from edgekv.types import F32, Array

WORD = 32  # tokens per word of the index


@dataclasses.dataclass(frozen=True)
class FierConfig(Config):
    """Options of `fier`.

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
    """FIER's index: a bit per key element, and two levels per channel and group of tokens (eq. 5, algorithm 1)."""

    kind = "sign_index"
    backends = in_package("edgekv.papers.fier", "cpu", "cuda")

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
        """Writes levels (G, groups, 2, D), float16 bits: a centre and a step; and signs (G, words, D), uint32.

        Centre and step are the mean and the mean absolute deviation from it, each added up in the order of the
        tokens, or with minmax the middle and half the range. Bit i of word w of channel d says whether token
        32 * w + i is at or above the (rounded) centre: it is taken as centre + step, else as centre - step.
        """
        n_kv_heads, _, head_dim = keys.shape
        x = from_half(keys[:, b0 * self.block : b1 * self.block])
        x = x.reshape(n_kv_heads, b1 - b0, self.block, head_dim)
        if self.minmax:
            low, high, half = x.min(axis=2), x.max(axis=2), np.float32(0.5)
            centre, step = (low + high) * half, (high - low) * half
        else:
            centre = _sum_in_order(x) / np.float32(self.block)
            step = _sum_in_order(np.abs(x - centre[:, :, None])) / np.float32(self.block)
        levels = self.arrays["levels"][:, b0:b1]  # a view
        levels[:, :, 0], levels[:, :, 1] = to_half(centre), to_half(step)
        upper = (x >= from_half(levels[:, :, None, 0])).reshape(n_kv_heads, -1, WORD, head_dim)
        words = np.zeros_like(upper, np.uint32, shape=(n_kv_heads, upper.shape[1], head_dim))
        for i in range(WORD):
            words |= upper[:, :, i].astype(np.uint32) << np.uint32(i)
        first = b0 * self.block // WORD
        self.arrays["signs"][:, first : first + words.shape[1]] = words

    def decode(self, t0: int, t1: int) -> F32:
        """Returns the index's approximation of the keys (n_kv_heads, t1 - t0, head_dim) of whole groups."""
        b0, b1 = t0 // self.block, t1 // self.block
        signs, levels = self.arrays["signs"][:, t0 // WORD : t1 // WORD], self.arrays["levels"][:, b0:b1]
        upper = signs[:, :, None] >> np.arange(WORD, dtype=np.uint32)[:, None] & 1  # (G, words, 32, D)
        upper = upper.reshape(self.n_kv_heads, b1 - b0, self.block, self.head_dim)
        centre, step = (from_half(levels[:, :, None, i]) for i in (0, 1))
        keys: F32 = np.where(upper, centre + step, centre - step).reshape(self.n_kv_heads, -1, self.head_dim)
        return keys

    def scores(self, q: F32, t0: int, t1: int) -> F32:
        """Returns approximate scores (n_kv_heads, M, t1 - t0), also of parts of groups, which `decode` lacks."""
        first = t0 // self.block * self.block
        keys = self.decode(first, -(-t1 // self.block) * self.block)[:, t0 - first : t1 - first]
        scores: F32 = q @ keys.swapaxes(1, 2)
        return scores


def _sum_in_order(x: F32) -> F32:
    """Sums x (n_kv_heads, groups, tokens, head_dim) over the tokens, in their order."""
    total: F32 = x[:, :, 0].copy()
    for t in range(1, x.shape[2]):
        total += x[:, :, t]
    return total


class Fier(Retrieval):
    """FIER, algorithm 1: exact attention to the k tokens of largest q . K~, where K~ = centre +- step.

    centre and step are per channel and group of g tokens. Beside f16 keys and values the index takes a bit per key
    element and two f16 per channel and group (eq. 8): 4 * head_dim + head_dim / 8 + 4 * head_dim / g bytes per
    token and KV head in all. A step reads the index and 4 * head_dim bytes of k tokens.

    The paper leaves three things open. The levels are mean +- mean absolute deviation, which ranks tokens better
    than the range on most models (``levels``). Grouped queries: see `Retrieval`. The newest tokens, up to g - 1,
    that fill no group are always attended to, on top of k.
    """

    name = "fier"
    paper = "FIER, eq. 5 and algorithm 1"
    summary = "f16 keys and values, 1-bit index: exact attention on the k best tokens"
    tradeoff = "memory (more than dense), and all but k tokens of each step's attention"
    Config = FierConfig

    def index(self, geometry: Geometry, config: FierConfig) -> Index:
        shape = geometry.n_kv_heads, geometry.capacity, geometry.head_dim
        return SignIndex(*shape, config.group, config.levels)
