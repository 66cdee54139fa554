"""Quest: pages of tokens are scored by a bound on their keys, and the best pages are attended to exactly.

Measured here (docs/papers.md): perplexity x1.003 and x1.65 on two small models; much of what it finds is recency.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from edgekv.codecs.codec import Layout, in_package
from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.config import Config, bad_option, number, one_of, tokens
from edgekv.papers import from_half, to_half
from edgekv.papers.retrieval import Index, Retrieval
from edgekv.types import F32, Array


@dataclasses.dataclass(frozen=True)
class QuestConfig(Config):
    """Options of `quest`.

    k: int, default 512. Tokens that a query attends to, in whole pages; a multiple of ``page``.
    page: int, default 16. Tokens of a page: 8, 16 or 32.
    skip: int, default 2. First layers whose attention reads every token.
    """

    scheme: ClassVar[str] = "quest"

    k: int = tokens(512, 1)
    page: int = one_of(16, (8, 16, 32))
    skip: int = number(2, 0, 1000, " layers")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k % self.page:
            raise bad_option("quest", "k", self.k, f"multiples of page={self.page}, in tokens")


class PageIndex(Index):
    """Quest's index: the largest and the smallest key element of each channel of a page."""

    kind = "page_index"
    backends = in_package("edgekv.papers.quest")

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, page: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim, block=page, unit=page)

    def layout(self) -> Layout:
        return {"bounds": ((self.n_kv_heads, self.n_blocks, 2 * self.head_dim), "uint16")}

    @property
    def block_bytes(self) -> int:
        return self.n_kv_heads * self.head_dim * 4

    def encode(self, keys: Array, b0: int, b1: int) -> None:
        """Stores the bounds of pages b0..b1 of keys (n_kv_heads, capacity, head_dim): largest, then smallest."""
        pages = from_half(keys[:, b0 * self.block : b1 * self.block])
        pages = pages.reshape(self.n_kv_heads, b1 - b0, self.block, self.head_dim)
        bounds = self.arrays["bounds"][:, b0:b1]  # a view
        bounds[:, :, : self.head_dim] = to_half(pages.max(axis=2))
        bounds[:, :, self.head_dim :] = to_half(pages.min(axis=2))

    def scores(self, q: F32, t0: int, t1: int) -> F32:
        """Returns the scores (n_kv_heads, rows, t1 - t0) of pages t0..t1.

        A score is the sum over channels of the larger of q (n_kv_heads, rows, head_dim) times either bound.
        """
        parts = np.concatenate([np.maximum(q, 0), np.minimum(q, 0)], axis=2)
        scores: F32 = parts @ from_half(self.arrays["bounds"][:, t0:t1]).swapaxes(1, 2)
        return scores


class Quest(Retrieval):
    """Quest (arXiv 2406.10774): exact attention to the k tokens of the best pages of p tokens.

    A page's score is the sum over channels of max(q * largest, q * smallest). Beside f16 keys and values there are
    two f16 per channel and page: 4 * head_dim + 4 * head_dim / p bytes per token and KV head in all. A step reads
    these bounds and 4 * head_dim bytes of k tokens. The page that is being filled is always attended to, on top of
    k. FIER's equation 3 misquotes the score as the largest of the products. Grouped queries: see `Retrieval`.
    """

    name = "quest"
    paper = "Quest (arXiv 2406.10774), FIER's baseline"
    summary = "f16 keys and values, bounds per page: exact attention on the best pages, k tokens"
    tradeoff = "memory (more than dense), and all but k tokens of each step's attention"
    Config = QuestConfig

    def index(self, geometry: Geometry, config: QuestConfig) -> Index:
        shape = geometry.n_kv_heads, geometry.capacity, geometry.head_dim
        return PageIndex(*shape, config.page)
