"""SnapKV (Li et al. 2024): the end of the text votes on which earlier tokens to keep.

Measured here (docs/papers.md): it serves the question that ends the prompt, but not a second one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from edgekv.codecs.codec import Layout
from edgekv.kernels.arrays import contiguous
from edgekv.kernels.interface import Segment
from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.config import Config, bad_option, number, one_of, share_of_context, tokens
from edgekv.papers import from_half, to_half
from edgekv.papers.evicting import EvictingCache, attention_received, highest_ranked
from edgekv.types import F32, I32, I64

POOLS: dict[str, Callable[..., Any]] = {"max": np.max, "avg": np.mean}


@dataclasses.dataclass(frozen=True)
class SnapKVConfig(Config):
    """Options of `snapkv`.

    budget: float, default 1024. Tokens kept: above 1 a number, up to 1 a fraction of the context.
    observe: int, default 32. Latest tokens, which stay and whose attention votes for the others; 1 or more.
    kernel: int, default 7. Neighbouring tokens over which the votes are pooled, odd.
    pool: str, default "max". How the votes are pooled: max or avg.
    interval: int, default 64. Tokens between two votes while text is generated, 1 or more.
    """

    scheme: ClassVar[str] = "snapkv"

    budget: float = share_of_context(1024.0)
    observe: int = tokens(32, 1)
    kernel: int = number(7, 1, 255, " tokens, an odd number")
    pool: str = one_of("max", POOLS)
    interval: int = tokens(64, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise bad_option("snapkv", "kernel", self.kernel, "an odd number of tokens")


class SnapKV(EvictingCache):
    """SnapKV, section 4: keeps the tokens of most pooled attention from the last ``observe`` queries.

    It takes slots * (4 * head_dim + 4) bytes per KV head, and observe * 2 * head_dim per query head for queries.

    The weights that the observation queries give to each earlier token are summed (here over the query heads of
    the group too) and pooled over ``kernel`` neighbours; the highest stay beside the observation window itself.
    Deviation: the paper compresses the prompt once and keeps every token decoded after it. Here a budget holds
    throughout: whenever the slots are full, the latest queries vote again and the lowest ``interval`` tokens are
    evicted at once (neighbours are then those in the cache).
    """

    name = "snapkv"
    paper = "SnapKV, FIER's baseline"
    summary = "the latest 32 tokens and those that they attend to most, in f16"
    needs_prompt_queries = True
    tradeoff = "tokens that the latest queries had no use for"
    Config = SnapKVConfig

    def __init__(self, geometry: Geometry, config: SnapKVConfig) -> None:
        super().__init__(geometry, config)
        if self.evicts and self.slots < config.observe + config.interval:
            least = config.observe + config.interval
            raise bad_option("snapkv", "budget", config.budget, f"observe + interval = {least} tokens or more")
        self.observe = min(config.observe, geometry.context or geometry.capacity)
        self.n_observed = 0  # latest tokens whose queries are stored

    def layout(self) -> Layout:
        queries = (self.geometry.n_heads, self.observe, self.geometry.head_dim)
        return {**super().layout(), "query.half": (queries, "uint16")}

    def prefill(self, queries: F32, keys: F32, values: F32) -> None:
        """Takes a prompt's queries (n_heads, n, head_dim), keys and values (n_kv_heads, n, head_dim)."""
        n = keys.shape[1]
        self.require_room(n)
        observed = min(n, self.observe)
        if n > self.slots:
            votes = attention_received(queries, keys, n - observed, self.geometry, self.kernels, self.workspace)
            self._keep_columns(
                self._choose_columns(votes, np.arange(n, dtype=np.int32), self.slots, n), keys, values
            )
        else:
            super().append_prefill(keys, values)
        for position in range(n - observed, n):
            self._store_query(queries[:, position], position)
        self.n_observed = observed

    def append_prefill(self, keys: F32, values: F32) -> None:
        """Appends a prompt's keys and values (n_kv_heads, n, head_dim); without queries the latest tokens stay."""
        self.n_observed = 0
        super().append_prefill(keys, values)

    def _choose_slots(self) -> None:
        if self.n_used == self.slots:
            self._compress()
        self._next_slots.fill(self.n_used)
        self.n_used += 1

    def _observe(self, queries: F32, weights: F32) -> None:
        if self.evicts:
            self._store_query(queries.reshape(self.geometry.n_heads, -1), self.n_seen - 1)
            self.n_observed = min(self.n_observed + 1, self.observe)

    def _store_query(self, query: F32, position: int) -> None:
        self.arrays["query.half"][:, position % self.observe] = to_half(query)

    def _compress(self) -> None:
        no_tokens = np.empty((self.geometry.n_kv_heads, 0, self.geometry.head_dim), np.float32)
        positions = self.arrays["position"][:, : self.n_used]
        columns = self._choose_columns(self._votes(), positions, self.slots - self.config.interval, self.n_seen)
        self._keep_columns(columns, no_tokens, no_tokens)

    def _votes(self) -> F32:
        """Returns the sum (n_kv_heads, n_used) of the stored queries' attention weights, in token order."""
        g, n, end = self.geometry.n_kv_heads, self.n_observed, self.n_used
        if not n:
            return np.zeros((g, end), np.float32)
        latest = np.arange(self.n_seen - n, self.n_seen)
        queries = from_half(self.arrays["query.half"][:, latest % self.observe])
        segment = Segment(self._keys, self._values, 0, end, 0, self.arrays["position"])
        s = self.workspace.array("snapkv.weights", (g, self.geometry.n_rep * n, end))
        out = self.workspace.array("attention.piece", queries.shape)
        cap = self.geometry.score_cap
        self.kernels.attend(contiguous(queries), [segment], self.visible(n), out, s, cap=cap)
        votes: F32 = s.sum(axis=1)
        return votes

    def _choose_columns(self, votes: F32, positions: I32, n: int, end: int) -> I64:
        """Returns the columns of the ``n`` tokens that stay; votes (n_kv_heads, columns), ``end`` tokens seen."""
        observe, kernel = self.observe, self.config.kernel
        padded = np.pad(votes[:, :-observe], ((0, 0), (kernel // 2, kernel // 2)))
        pooled = POOLS[self.config.pool](sliding_window_view(padded, kernel, axis=1), axis=2)
        mass = np.concatenate([pooled, votes[:, -observe:]], axis=1)
        positions = np.broadcast_to(positions, votes.shape)
        return highest_ranked(mass, positions, n, self._first_visible(end), end - observe)

    def counters_valid(self) -> bool:
        least, most = (min(n, self.n_seen) for n in (self.slots - self.config.interval, self.slots))
        is_used = (least if self.evicts else most) <= self.n_used <= most
        return 0 <= self.n_seen <= self.capacity and is_used and self.n_observed <= min(self.observe, self.n_seen)

    def truncate(self, n: int, n_same: int = 0) -> int:
        n_seen = super().truncate(n, n_same)
        self.n_observed = min(self.n_observed, n_seen)
        return n_seen
