"""Schemes that hold a bounded number of tokens per KV head, in f16: their base, H2O, TOVA and StreamingLLM.

SnapKV and MiKV, which share the base, are in `snapkv` and `mikv`. What came of each here (docs/papers.md): with an
eighth of the tokens H2O finds 2 of 20 hidden needles, TOVA 10, StreamingLLM 2.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from edgekv.codecs.codec import Layout
from edgekv.codecs.f16 import F16
from edgekv.kernels import Kernels
from edgekv.kernels.arrays import contiguous
from edgekv.kernels.interface import Segment, bound_scores
from edgekv.kvcache.cache import Geometry, KVCache, Workspace
from edgekv.kvcache.config import Config, bad_option, flag, number, share_of_context, tokens
from edgekv.papers import to_half
from edgekv.types import F32, I32, I64, Array

BLOCK_ROWS = 512  # query rows whose scores over the prompt are in memory at once


def budget_tokens(budget: float, capacity: int) -> int:
    """Returns the slots per KV head for a budget in tokens, or, up to 1, as a fraction of the context."""
    return min(capacity, math.ceil(budget * capacity) if budget <= 1 else int(budget))


class EvictingCache(KVCache):
    """Base class of caches of ``budget`` tokens per KV head: slots * (4 * head_dim + 4) bytes with positions.

    Each head may hold other tokens. A token is evicted before the next one is stored, so that a query sees at most
    ``budget`` tokens, its own included. Tokens keep the rotation of their original position; the order of the
    slots means nothing to attention. Tokens that a sliding window hides are masked.
    """

    def __init__(self, geometry: Geometry, config: Any) -> None:
        super().__init__(geometry, config)
        self.slots = min(geometry.capacity, budget_tokens(config.budget, geometry.context or geometry.capacity))
        self.n_used = 0

    def layout(self) -> Layout:
        tokens = (self.geometry.n_kv_heads, self.slots)
        half = ((*tokens, self.geometry.head_dim), "uint16")
        return {"key.half": half, "value.half": half, "position": (tokens, "int32")}

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        super().allocate(kernels, workspace)
        self._next_slots = np.zeros(self.geometry.n_kv_heads, np.int64)  # of the next token, per head
        shape = self.geometry.n_kv_heads, self.slots, self.geometry.head_dim
        self._keys, self._values = F16(*shape), F16(*shape)
        self._keys.bind({"half": self.arrays["key.half"]}, kernels)
        self._values.bind({"half": self.arrays["value.half"]}, kernels)

    @property
    def n_kept(self) -> int:
        return self.n_used

    @property
    def evicts(self) -> bool:
        """Returns whether the budget is smaller than the context."""
        return self.slots < self.geometry.capacity

    def _first_visible(self, end: int) -> int:
        """Returns the earliest position that the query of the last of ``end`` tokens may see."""
        return 0 if self.geometry.sliding_window is None else max(0, end - self.geometry.sliding_window)

    def bytes_read(self) -> int:
        return self.n_used * self.geometry.n_kv_heads * 4 * self.geometry.head_dim

    def notes(self) -> list[str]:
        if not self.evicts:
            return []
        return [f"{self.name}: holds {self.slots} of {self.geometry.capacity} tokens per KV head in f16"]

    @abc.abstractmethod
    def _choose_slots(self) -> None:
        """Fills `_next_slots`: with an unused slot, or with the slot of the token that is evicted."""

    def _observe(self, queries: F32, weights: F32) -> None:
        """Takes a token's queries (n_kv_heads, n_rep, head_dim) and their weights (n_kv_heads, n_rep, n_used)."""

    def append_prefill(self, keys: F32, values: F32) -> None:
        """Appends a prompt's keys and values (n_kv_heads, n, head_dim), all heads to the same slots.

        Runs of tokens up to the last slot are stored at once.
        """
        n = keys.shape[1]
        self.require_room(n)
        a = 0
        while a < n:
            self._choose_slots()
            slot = int(self._next_slots[0])
            b = min(n, a + self.slots - slot)
            self.kernels.encode(self._keys, keys[:, a:b], slot)
            self.kernels.encode(self._values, values[:, a:b], slot)
            self.arrays["position"][:, slot : slot + b - a] = np.arange(self.n_seen, self.n_seen + b - a)
            self.n_used = max(self.n_used, slot + b - a)
            self.n_seen += b - a
            a = b

    def rollback_tokens(self) -> int:
        """Returns 0 where tokens are evicted: neither they nor the attention weights so far come back."""
        return 0 if self.evicts else self.geometry.capacity - self.n_seen

    def advance(self, n: int) -> None:
        super().advance(n)
        self.n_used += n

    def max_append_tokens(self) -> int:
        """Returns 1: a token must have been attended to before the next one evicts another."""
        return 1

    def append(self, keys: F32, values: F32) -> None:
        """Stores keys and values (n_kv_heads, n, head_dim) of new tokens."""
        self._choose_slots()
        heads = np.arange(len(self._next_slots))
        self.arrays["key.half"][heads, self._next_slots] = to_half(keys[:, 0])
        self.arrays["value.half"][heads, self._next_slots] = to_half(values[:, 0])
        self.arrays["position"][heads, self._next_slots] = self.n_seen
        self.n_seen += 1

    def segments(self) -> list[Segment]:
        return [Segment(self._keys, self._values, 0, self.n_used, 0, self._positions("position"))]

    def _positions(self, name: str) -> I32 | None:
        """Returns the tokens' positions, for a sliding window; None where every token is seen."""
        return None if self.geometry.sliding_window is None else self.arrays[name]

    def read(self, queries: F32, out: F32, sinks: F32 | None) -> None:
        """Attends for one token's queries (n_heads, 1, head_dim), and observes the weights if it evicts."""
        g, n_rep, head_dim = self.geometry.n_kv_heads, self.geometry.n_rep, self.geometry.head_dim
        queries = contiguous(queries)
        weights = self.workspace.array("weights", (g, n_rep, self.n_kept)) if self.evicts else None
        target = self.workspace.array("attention.token", out.shape)
        cap = self.geometry.score_cap
        self.kernels.attend(queries, self.segments(), self.visible(1), target, weights, sinks, cap)
        if weights is not None:
            self._observe(queries.reshape(g, n_rep, head_dim), weights)
        out[:] = target

    def _keep_columns(self, columns: I64, keys: F32, values: F32) -> None:
        """Keeps, of the tokens in the slots and new ones behind them, columns (n_kv_heads, k), ascending."""
        k = columns.shape[1]
        for name, new in self._new_tokens(keys, values).items():
            for head_slots, head_new, head_columns in zip(self.arrays[name], new, columns, strict=True):
                head_slots[:k] = gather_tokens(head_slots, self.n_used, head_new, head_columns)
        self.n_used = k
        self.n_seen += keys.shape[1]

    def _new_tokens(self, keys: F32, values: F32) -> dict[str, Array]:
        """Returns the new tokens' entries of each array of slots, not rounded yet."""
        positions = np.arange(self.n_seen, self.n_seen + keys.shape[1], dtype=np.int32)
        return {
            "key.half": keys,
            "value.half": values,
            "position": np.broadcast_to(positions, keys.shape[:2]),
        }

    def counters_valid(self) -> bool:
        return super().counters_valid() and self.n_used == min(self.slots, self.n_seen)

    def arrays_valid(self) -> bool:
        """Returns whether the positions in the slots are those of tokens that have come."""
        return are_distinct_positions(self.arrays["position"][:, : self.n_used], self.n_seen)

    def truncate(self, n: int, n_same: int = 0) -> int:
        """Goes back to the start if tokens are evicted: later tokens had a say in which."""
        if n < self.n_seen:
            self.n_used = self.n_seen = 0 if self.evicts else n
        return self.n_seen


class LowestMassCache(EvictingCache):
    """Base class of caches that evict the token of least attention mass: 4 more bytes per slot.

    Each query's attention weights, summed over the heads of a group, are added to ``decay`` times the mass so far.
    The ``recent`` latest tokens, the new one among them, are never evicted; of equals the older one is.
    """

    needs_prompt_queries = True
    decay: ClassVar[float]
    recent = 1

    def layout(self) -> Layout:
        return {**super().layout(), "mass": ((self.geometry.n_kv_heads, self.slots), "float32")}

    def bytes_read(self) -> int:
        return super().bytes_read() + self.n_used * self.geometry.n_kv_heads * 8

    def _choose_slots(self) -> None:
        if self.n_used < self.slots:
            self._next_slots.fill(self.n_used)
            self.n_used += 1
            return
        a, end = self.arrays, self.n_seen + 1
        visible, protected = self._first_visible(end), end - self.recent
        self._next_slots[:] = lowest_ranked(a["mass"], a["position"], visible, protected)
        a["mass"][np.arange(len(self._next_slots)), self._next_slots] = 0

    def _observe(self, queries: F32, weights: F32) -> None:
        if self.evicts:
            mass = self.arrays["mass"][:, : self.n_used]
            mass *= np.float32(self.decay)
            mass += weights[:, :, : self.n_used].sum(axis=1)

    def prefill(self, queries: F32, keys: F32, values: F32) -> None:
        """Appends a prompt; its mass is that of the whole prompt before any eviction, as in the papers.

        queries (n_heads, n, head_dim), keys and values (n_kv_heads, n, head_dim).
        """
        if not self.evicts:
            self.append_prefill(keys, values)
            return
        first = 0 if self.decay else keys.shape[1] - 1
        received = attention_received(queries, keys, first, self.geometry, self.kernels, self.workspace)
        self._append_with_mass(keys, values, received)

    def append_prefill(self, keys: F32, values: F32) -> None:
        """Appends a prompt's keys and values (n_kv_heads, n, head_dim) without mass, as no queries are known."""
        self._append_with_mass(keys, values, np.zeros(keys.shape[:2], np.float32))

    def _append_with_mass(self, keys: F32, values: F32, mass: F32) -> None:
        """Appends tokens of mass (n_kv_heads, n), and keeps as many of old and new as there are slots."""
        self.require_room(mass.shape[1])
        a, end = self.arrays, self.n_seen + mass.shape[1]
        new = np.broadcast_to(np.arange(self.n_seen, end, dtype=np.int32), mass.shape)
        positions = np.concatenate([a["position"][:, : self.n_used], new], axis=1)
        mass = np.concatenate([a["mass"][:, : self.n_used], mass], axis=1)
        columns = highest_ranked(mass, positions, self.slots, self._first_visible(end), end - self.recent)
        self._keep_columns(columns, keys, values)
        a["mass"][:, : self.n_used] = np.take_along_axis(mass, columns, axis=1)

    def arrays_valid(self) -> bool:
        mass = self.arrays["mass"]
        return super().arrays_valid() and bool((np.isfinite(mass) & (mass >= 0)).all())

    def truncate(self, n: int, n_same: int = 0) -> int:
        n_seen = super().truncate(n, n_same)
        self.arrays["mass"][:, self.n_used :] = 0
        return n_seen


def are_distinct_positions(positions: I32, n_seen: int) -> bool:
    """Returns whether each head's positions (n_kv_heads, n) are those of different tokens of n_seen."""
    ordered = np.sort(positions, axis=1)
    return bool(((positions >= 0) & (positions < n_seen)).all() and (ordered[:, 1:] > ordered[:, :-1]).all())


def gather_tokens(slots: Array, n_used: int, new: Array, columns: I64) -> Array:
    """Returns, as the slots store them, tokens of a head's first ``n_used`` slots and of new ones behind them.

    columns (k,), ascending: which. Returns (k, head_dim), or (k,) of numbers per slot.
    """
    n_old = int(np.searchsorted(columns, n_used))
    added = new[columns[n_old:] - n_used]
    return np.concatenate([slots[columns[:n_old]], to_half(added) if slots.dtype == np.uint16 else added])


def eviction_ranks(mass: F32, positions: I32, visible: int, protected: int) -> F32:
    """Returns the rank (n_kv_heads, n) of each token: the least is evicted first. It is the mass.

    NaN and negative masses count as 0, infinity as the largest float32. Positions below ``visible`` have rank -1,
    positions from ``protected`` on infinity.
    """
    rank: F32 = np.where(mass > 0, np.minimum(mass, np.finfo(np.float32).max), np.float32(0))
    rank[positions < visible], rank[positions >= protected] = -1, np.inf
    return rank


def lowest_ranked(mass: F32, positions: I32, visible: int, protected: int) -> I64:
    """Returns per KV head (n_kv_heads,) the column of the token that is evicted next: of equals the earliest.

    mass and positions (n_kv_heads, n).
    """
    rank = eviction_ranks(mass, positions, visible, protected)
    least = rank == rank.min(axis=1, keepdims=True)
    column: I64 = np.where(least, positions, np.iinfo(np.int32).max).argmin(axis=1)
    return column


def highest_ranked(mass: F32, positions: I32, n: int, visible: int, protected: int) -> I64:
    """Returns per KV head the columns (n_kv_heads, k), ascending, of the k <= n tokens that eviction leaves.

    Tokens are evicted in the order of `eviction_ranks`, of equals the earlier first.
    """
    order = np.lexsort((positions, eviction_ranks(mass, positions, visible, protected)), axis=1)
    return np.sort(order[:, max(0, order.shape[1] - n) :], axis=1)


def attention_received(
    queries: F32, keys: F32, first: int, geometry: Geometry, kernels: Kernels, workspace: Workspace
) -> F32:
    """Returns the causal attention weights (n_kv_heads, n) that each key of a prompt receives.

    queries (n_heads, n, head_dim), scaled; keys (n_kv_heads, n, head_dim). The weights are summed over the queries
    from ``first`` on and over the heads that share the key. Scratch: BLOCK_ROWS x n float32.
    """
    n_heads, n, head_dim = queries.shape
    n_kv_heads, window = len(keys), geometry.sliding_window
    n_rep = n_heads // n_kv_heads
    received = np.zeros((n_kv_heads, n), np.float32)
    block = max(1, BLOCK_ROWS // n_rep)
    for g in range(n_kv_heads):
        for a in range(first, n, block):
            b = min(a + block, n)
            begin = 0 if window is None else max(0, a + 1 - window)
            q = workspace.array("prefill.rows", (n_rep * (b - a), head_dim))
            q.reshape(n_rep, b - a, head_dim)[:] = queries[g * n_rep : (g + 1) * n_rep, a:b]
            s = workspace.array("prefill.scores", (n_rep * (b - a), b - begin))
            np.matmul(q, keys[g, begin:b].T, out=s)
            bound_scores(s, geometry.score_cap)
            hi = np.tile(np.arange(a + 1, b + 1, dtype=np.int64) - begin, n_rep)
            lo = np.zeros_like(hi) if window is None else np.maximum(hi - window, 0)
            kernels.softmax(s[None], lo, hi)
            received[g, begin:b] += s.sum(axis=0)
    return received


@dataclasses.dataclass(frozen=True)
class H2OConfig(Config):
    """Options of `h2o`.

    budget: float, default 1024. Tokens kept: above 1 a number, up to 1 a fraction of the context.
    recent: float, default 0.5. Share of the budget that the latest tokens have, 0 to 1.
    """

    scheme: ClassVar[str] = "h2o"

    budget: float = share_of_context(1024.0)
    recent: float = number(0.5, 0, 1)


class H2O(LowestMassCache):
    """H2O (Zhang et al. 2023), algorithm 1: evicts the token of least accumulated attention.

    It takes slots * (4 * head_dim + 8) bytes per KV head. A token's mass is the sum of the softmax weights that it
    has received from all queries since it arrived, the prompt's included, over the query heads of the group (the
    paper has no groups). The latest ``recent`` share of the budget stays. H1B-KV's tables call this SparseLLM, at
    an eighth of dense's bytes: budget=0.125.
    """

    name = "h2o"
    paper = "H2O, FIER's baseline; H1B-KV's SparseLLM"
    summary = "the 512 tokens of most accumulated attention and the latest 512 in f16"
    tradeoff = "tokens that no query has needed yet; favours early tokens"
    Config = H2OConfig
    decay = 1.0

    def __init__(self, geometry: Geometry, config: H2OConfig) -> None:
        super().__init__(geometry, config)
        self.recent = max(1, round(config.recent * self.slots))


@dataclasses.dataclass(frozen=True)
class TovaConfig(Config):
    """Options of `tova`.

    budget: float, default 1024. Tokens kept: above 1 a number, up to 1 a fraction of the context.
    per_head: bool, default False. Whether each KV head chooses its own tokens instead of the layer.
    """

    scheme: ClassVar[str] = "tova"

    budget: float = share_of_context(1024.0)
    per_head: bool = flag(False)


class Tova(LowestMassCache):
    """TOVA (Oren et al. 2024, "Transformers are multi-state RNNs"): evicts what the latest query attends to least.

    It takes slots * (4 * head_dim + 8) bytes per KV head. As in the paper the weights are averaged over all heads
    of the layer, so that all keep the same tokens; ``per_head`` averages over the group of a KV head (measured on
    llama-40m at 256 tokens: perplexity x1.073 in place of x1.052).
    """

    name = "tova"
    paper = "TOVA, FIER's baseline"
    summary = "the 1,024 tokens that outlived each query's choice of the least attended one, in f16"
    tradeoff = "tokens that a single query has no use for"
    Config = TovaConfig
    decay = 0.0

    def _observe(self, queries: F32, weights: F32) -> None:
        super()._observe(queries, weights)
        if self.evicts:
            self._sum_over_heads(self.arrays["mass"][:, : self.n_used])

    def _append_with_mass(self, keys: F32, values: F32, mass: F32) -> None:
        self._sum_over_heads(mass)
        super()._append_with_mass(keys, values, mass)

    def _sum_over_heads(self, mass: F32) -> None:
        if not self.config.per_head:
            mass[:] = mass.sum(axis=0)


@dataclasses.dataclass(frozen=True)
class StreamingConfig(Config):
    """Options of `streaming`.

    budget: float, default 1024. Tokens kept: above 1 a number, up to 1 a fraction of the context.
    sink: int, default 4. First tokens of the context that stay, part of the budget.
    """

    scheme: ClassVar[str] = "streaming"

    budget: float = share_of_context(1024.0)
    sink: int = tokens(4)


class Streaming(EvictingCache):
    """StreamingLLM (Xiao et al. 2023): keeps the first ``sink`` tokens and a ring of the latest budget - sink.

    It takes slots * (4 * head_dim + 4) bytes per KV head. Deviation: keys keep the rotation of their original
    position; the paper rotates them anew by their place in the cache, so that positions never exceed the training
    length.
    """

    name = "streaming"
    paper = "StreamingLLM, FIER's baseline"
    summary = "the first 4 and the latest 1,020 tokens in f16"
    tradeoff = "everything said between the first tokens and the latest"
    Config = StreamingConfig

    def __init__(self, geometry: Geometry, config: StreamingConfig) -> None:
        super().__init__(geometry, config)
        if self.evicts and self.slots <= config.sink:
            raise bad_option(
                "streaming", "budget", config.budget, f"more than sink={config.sink} of {geometry.capacity} tokens"
            )

    def _choose_slots(self) -> None:
        sink, slot = self.config.sink, self.n_seen
        if slot >= self.slots:
            slot = sink + (slot - sink) % (self.slots - sink)
        self._next_slots.fill(slot)
        self.n_used = max(self.n_used, slot + 1)

    def rollback_tokens(self) -> int:
        """Returns the tokens that fit before the ring is full."""
        return max(0, self.slots - self.n_seen)

    def truncate(self, n: int, n_same: int = 0) -> int:
        """Goes back in place as long as no token has been evicted; else to the start."""
        if n < self.n_seen:
            self.n_used = self.n_seen = n if self.n_seen <= self.slots else 0
        return self.n_seen
