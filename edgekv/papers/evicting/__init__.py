"""Schemes that keep a fixed number of tokens per KV head, in f16: H2O, TOVA, StreamingLLM, and their base."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from edgekv.codecs.codec import Layout
from edgekv.codecs.f16 import F16
from edgekv.kernels import Kernels
from edgekv.kernels.arrays import contiguous
from edgekv.kernels.interface import Segment, bound_scores
from edgekv.kvcache.cache import Geometry, KVCache, Workspace
from edgekv.kvcache.config import Config, bad_option, flag, number, share_of_context, tokens
from edgekv.types import F32, I32, I64, Array

BLOCK_ROWS = 512  # query rows whose scores over the prompt are alive at once


def budget_tokens(budget: float, capacity: int) -> int:
    """Slots per KV head for a budget in tokens, or up to 1 as a fraction of the context, rounded up."""
    return min(capacity, math.ceil(budget * capacity) if budget <= 1 else int(budget))


class Evicting(KVCache):
    """``budget`` tokens per KV head, each head its own: slots * (4 * head_dim + 4) bytes with their positions.

    Room is made before a token comes in, so that a query sees at most ``budget`` tokens, its own included.
    Tokens keep the rotation of their original position; the order of the slots means nothing to attention.
    Those that a sliding window hides are masked.
    """

    is_lossless_when_short = True

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
        self._target = np.zeros(self.geometry.n_kv_heads, np.int64)  # each head's slot for the next token
        shape = self.geometry.n_kv_heads, self.slots, self.geometry.head_dim
        self._keys, self._values = F16(*shape), F16(*shape)
        self._keys.bind({"half": self.arrays["key.half"]}, kernels)
        self._values.bind({"half": self.arrays["value.half"]}, kernels)

    @property
    def n_kept(self) -> int:
        return self.n_used

    @property
    def evicts(self) -> bool:
        """Whether the budget is smaller than the context."""
        return self.slots < self.geometry.capacity

    def _first_visible(self, end: int) -> int:
        """The earliest position that the query of the last of ``end`` tokens may see."""
        return 0 if self.geometry.sliding_window is None else max(0, end - self.geometry.sliding_window)

    def bytes_read(self) -> int:
        return self.n_used * self.geometry.n_kv_heads * 4 * self.geometry.head_dim

    def notes(self) -> list[str]:
        if not self.evicts:
            return []
        return [f"{self.name}: holds {self.slots} of {self.geometry.capacity} tokens per KV head in f16"]

    @abc.abstractmethod
    def _make_room(self) -> None:
        """Puts the slots for the next token into `_target`, one used slot more than before or one evicted."""

    def _observe(self, q: F32, p: F32) -> None:
        """What a scheme learns from a token's queries (n_kv_heads, n_rep, head_dim) and attention weights."""

    def append_prompt(self, keys: F32, values: F32) -> None:
        """Where all heads drop the same tokens: whole runs, up to the last slot.

        Keys and values (n_kv_heads, n, head_dim): a prompt's.
        """
        n = keys.shape[1]
        self.require_room(n)
        a = 0
        while a < n:
            self._make_room()
            slot = int(self._target[0])
            b = min(n, a + self.slots - slot)
            self.kernels.encode(self._keys, keys[:, a:b], slot)
            self.kernels.encode(self._values, values[:, a:b], slot)
            self.arrays["position"][:, slot : slot + b - a] = np.arange(self.n_seen, self.n_seen + b - a)
            self.n_used = max(self.n_used, slot + b - a)
            self.n_seen += b - a
            a = b

    def rollback_tokens(self) -> int:
        """None within a budget: attention weights that were counted, and tokens that left, do not come back."""
        return 0 if self.evicts else self.geometry.capacity - self.n_seen

    def advance(self, n: int) -> None:
        super().advance(n)
        self.n_used += n

    def max_append_tokens(self) -> int:
        """Whatever is evicted for a token, the one before must have read."""
        return 1

    def append(self, keys: F32, values: F32) -> None:
        """Stores keys and values (n_kv_heads, n, head_dim) of new tokens."""
        self._make_room()
        heads = np.arange(len(self._target))
        self.arrays["key.half"][heads, self._target] = half_bits(keys[:, 0])
        self.arrays["value.half"][heads, self._target] = half_bits(values[:, 0])
        self.arrays["position"][heads, self._target] = self.n_seen
        self.n_seen += 1

    def segments(self) -> list[Segment]:
        return [Segment(self._keys, self._values, 0, self.n_used, 0, self._positions("position"))]

    def _positions(self, name: str) -> I32 | None:
        """Where each token stands, for a sliding window; without one all that is held is seen."""
        return None if self.geometry.sliding_window is None else self.arrays[name]

    def _read(self, queries: F32, out: F32, sinks: F32 | None) -> None:
        g, n_rep, head_dim = self.geometry.n_kv_heads, self.geometry.n_rep, self.geometry.head_dim
        queries = contiguous(queries)
        weights = self.workspace.array("weights", (g, n_rep, self.n_kept)) if self.evicts else None
        target = self.workspace.array("attention.token", out.shape)
        cap = self.geometry.score_cap
        self.kernels.attend(queries, self.segments(), self.visible(1), target, weights, sinks, cap)
        if weights is not None:
            self._observe(queries.reshape(g, n_rep, head_dim), weights)
        out[:] = target

    def _rebuild(self, kept: I64, keys: F32, values: F32) -> None:
        """Of the tokens held, followed by new ones, only the columns ``kept`` (n_kv_heads, k), ascending, stay."""
        k = kept.shape[1]
        for name, new in self._new_tokens(keys, values).items():
            for slots, of_head, columns in zip(self.arrays[name], new, kept, strict=True):
                slots[:k] = pick(slots, self.n_used, of_head, columns)
        self.n_used = k
        self.n_seen += keys.shape[1]

    def _new_tokens(self, keys: F32, values: F32) -> dict[str, Array]:
        """What new tokens add to each array of slots, not rounded yet."""
        positions = np.arange(self.n_seen, self.n_seen + keys.shape[1], dtype=np.int32)
        return {
            "key.half": keys,
            "value.half": values,
            "position": np.broadcast_to(positions, keys.shape[:2]),
        }

    def counters_valid(self) -> bool:
        return super().counters_valid() and self.n_used == min(self.slots, self.n_seen)

    def arrays_valid(self) -> bool:
        """Whether the slots hold tokens that have come."""
        return are_places(self.arrays["position"][:, : self.n_used], self.n_seen)

    def truncate(self, n: int, n_same: int = 0) -> int:
        """Back to the start if the budget is below the context: later tokens had a say in what is held."""
        if n < self.n_seen:
            self.n_used = self.n_seen = 0 if self.evicts else n
        return self.n_seen


class LowestFirst(Evicting):
    """Evicts the token of least mass, 4 more bytes per slot: attention weights summed over queries and group.

    Each query's weights are added to `decay` times the mass so far. The `recent` latest tokens, the new one
    among them, are not up for eviction; of equals the older one leaves.
    """

    needs_prompt_queries = True
    decay: ClassVar[float]
    recent = 1

    def layout(self) -> Layout:
        return {**super().layout(), "mass": ((self.geometry.n_kv_heads, self.slots), "float32")}

    def bytes_read(self) -> int:
        return super().bytes_read() + self.n_used * self.geometry.n_kv_heads * 8

    def _make_room(self) -> None:
        if self.n_used < self.slots:
            self._target.fill(self.n_used)
            self.n_used += 1
            return
        a, end = self.arrays, self.n_seen + 1
        visible, protected = self._first_visible(end), end - self.recent
        self._target[:] = lowest(a["mass"], a["position"], visible, protected)
        a["mass"][np.arange(len(self._target)), self._target] = 0

    def _observe(self, q: F32, p: F32) -> None:
        if self.evicts:
            mass = self.arrays["mass"][:, : self.n_used]
            mass *= np.float32(self.decay)
            mass += p[:, :, : self.n_used].sum(axis=1)

    def prefill(self, queries: F32, keys: F32, values: F32) -> None:
        """The mass is that of the whole prompt before anything is evicted, as in the papers.

        Queries are (n_heads, n, head_dim).
        """
        if not self.evicts:
            self.append_prompt(keys, values)
            return
        first = 0 if self.decay else keys.shape[1] - 1
        received = attention_received(queries, keys, first, self.geometry, self.kernels, self.workspace)
        self._admit(keys, values, received)

    def append_prompt(self, keys: F32, values: F32) -> None:
        """Without queries the new tokens have no mass. Keys and values (n_kv_heads, n, head_dim): a prompt's."""
        self._admit(keys, values, np.zeros(keys.shape[:2], np.float32))

    def _admit(self, keys: F32, values: F32, mass: F32) -> None:
        """Appends tokens of known mass (n_kv_heads, n) and keeps the best of old and new."""
        self.require_room(mass.shape[1])
        a, end = self.arrays, self.n_seen + mass.shape[1]
        new = np.broadcast_to(np.arange(self.n_seen, end, dtype=np.int32), mass.shape)
        positions = np.concatenate([a["position"][:, : self.n_used], new], axis=1)
        mass = np.concatenate([a["mass"][:, : self.n_used], mass], axis=1)
        kept = highest(mass, positions, self.slots, self._first_visible(end), end - self.recent)
        self._rebuild(kept, keys, values)
        a["mass"][:, : self.n_used] = np.take_along_axis(mass, kept, axis=1)

    def arrays_valid(self) -> bool:
        mass = self.arrays["mass"]
        return super().arrays_valid() and bool((np.isfinite(mass) & (mass >= 0)).all())

    def truncate(self, n: int, n_same: int = 0) -> int:
        kept = super().truncate(n, n_same)
        self.arrays["mass"][:, self.n_used :] = 0
        return kept


def are_places(positions: I32, n_seen: int) -> bool:
    """Whether each head's positions (n_kv_heads, n) are those of different tokens of n_seen."""
    each = np.sort(positions, axis=1)
    return bool(((positions >= 0) & (positions < n_seen)).all() and (each[:, 1:] > each[:, :-1]).all())


def pick(slots: Array, n_used: int, new: Array, columns: I64) -> Array:
    """One head's first ``n_used`` slots and then new tokens, at ascending columns, as the slots store them.

    Returns (k, head_dim), or (k,) of numbers per slot.
    """
    m = int(np.searchsorted(columns, n_used))
    fresh = new[columns[m:] - n_used]
    return np.concatenate([slots[columns[:m]], half_bits(fresh) if slots.dtype == np.uint16 else fresh])


def ranks(mass: F32, positions: I32, visible: int, protected: int) -> F32:
    """Numbers (n_kv_heads, n) in whose order tokens leave, the least first: their mass, where above 0 and finite.

    NaN and what is negative count as 0, infinity as the largest float32. Positions below ``visible`` have -1,
    those from ``protected`` on infinity.
    """
    rank: F32 = np.where(mass > 0, np.minimum(mass, np.finfo(np.float32).max), np.float32(0))
    rank[positions < visible], rank[positions >= protected] = -1, np.inf
    return rank


def lowest(mass: F32, positions: I32, visible: int, protected: int) -> I64:
    """Per KV head the column of the token that leaves next: the least of `ranks`, of equals the earliest.

    ranks (G, n); returns (G,).
    """
    rank = ranks(mass, positions, visible, protected)
    least = rank == rank.min(axis=1, keepdims=True)
    column: I64 = np.where(least, positions, np.iinfo(np.int32).max).argmin(axis=1)
    return column


def highest(mass: F32, positions: I32, n: int, visible: int, protected: int) -> I64:
    """Per KV head the columns, ascending, of the at most ``n`` tokens that evicting one by one would leave.

    They leave in the order of `ranks`, of equals the earlier first.
    Returns (G, k).
    """
    order = np.lexsort((positions, ranks(mass, positions, visible, protected)), axis=1)
    return np.sort(order[:, max(0, order.shape[1] - n) :], axis=1)


def attention_received(
    queries: F32, keys: F32, first: int, geometry: Geometry, kernels: Kernels, workspace: Workspace
) -> F32:
    """(n_kv_heads, n): the causal attention weights of queries ``first``.. to each key of a prompt, summed.

    queries (n_heads, n, head_dim), scaled; keys (n_kv_heads, n, head_dim). The sum goes over the queries and
    over the heads that share the key. Scratch: one block of BLOCK_ROWS x n float32, as the prompt's attention.
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


def half_bits(x: F32) -> npt.NDArray[np.uint16]:
    """x rounded to float16, as bits."""
    return x.astype(np.float16).view(np.uint16)


@dataclasses.dataclass(frozen=True)
class H2OConfig(Config):
    """What `h2o` can be set to.

    budget: float, default 1024. Tokens kept: above 1 a number, up to 1 a fraction of the context.
    recent: float, default 0.5. Share of the budget that the latest tokens have, 0 to 1.
    """

    scheme: ClassVar[str] = "h2o"

    budget: float = share_of_context(1024.0)
    recent: float = number(0.5, 0, 1)


class H2O(LowestFirst):
    """Accumulated attention decides, per KV head: slots * (4 * head_dim + 8) bytes.

    H2O (Zhang et al. 2023), algorithm 1. A token's mass is the sum of the softmax weights it has received from
    all queries since it arrived, those of the prompt included, over the query heads of the group (the paper has
    no groups). The latest ``recent`` share of the budget stays. What H1B-KV's tables call SparseLLM is this at
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
    """What `tova` can be set to.

    budget: float, default 1024. Tokens kept: above 1 a number, up to 1 a fraction of the context.
    per_head: bool, default False. Whether each KV head chooses its own tokens instead of the layer.
    """

    scheme: ClassVar[str] = "tova"

    budget: float = share_of_context(1024.0)
    per_head: bool = flag(False)


class Tova(LowestFirst):
    """The weights of the latest query alone decide: slots * (4 * head_dim + 8) bytes per KV head.

    TOVA (Oren et al. 2024, "Transformers are multi-state RNNs"). As in the paper the weights are averaged over
    all heads of the layer, so that all keep the same tokens; ``per_head`` averages over a KV head's own group
    (measured on llama-40m at 256 tokens: perplexity x1.073 in place of x1.052).
    """

    name = "tova"
    paper = "TOVA, FIER's baseline"
    summary = "the 1,024 tokens that outlived each query's choice of the least attended one, in f16"
    tradeoff = "tokens that a single query has no use for"
    Config = TovaConfig
    decay = 0.0

    def _observe(self, q: F32, p: F32) -> None:
        super()._observe(q, p)
        if self.evicts:
            self._share(self.arrays["mass"][:, : self.n_used])

    def _admit(self, keys: F32, values: F32, mass: F32) -> None:
        self._share(mass)
        super()._admit(keys, values, mass)

    def _share(self, mass: F32) -> None:
        if not self.config.per_head:
            mass[:] = mass.sum(axis=0)


@dataclasses.dataclass(frozen=True)
class StreamingConfig(Config):
    """What `streaming` can be set to.

    budget: float, default 1024. Tokens kept: above 1 a number, up to 1 a fraction of the context.
    sink: int, default 4. First tokens of the context that stay, part of the budget.
    """

    scheme: ClassVar[str] = "streaming"

    budget: float = share_of_context(1024.0)
    sink: int = tokens(4)


class Streaming(Evicting):
    """Keeps the first ``sink`` tokens and a ring of the latest budget - sink: slots * (4 * head_dim + 4) bytes.

    StreamingLLM (Xiao et al. 2023). Deviation: keys keep the rotation of their original position; the paper
    rotates them anew by their place in the cache, so that positions never exceed the training length.
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

    def _make_room(self) -> None:
        sink, slot = self.config.sink, self.n_seen
        if slot >= self.slots:
            slot = sink + (slot - sink) % (self.slots - sink)
        self._target.fill(slot)
        self.n_used = max(self.n_used, slot + 1)

    def rollback_tokens(self) -> int:
        """Until the ring is full."""
        return max(0, self.slots - self.n_seen)

    def truncate(self, n: int, n_same: int = 0) -> int:
        """In place as long as nothing has been dropped; else back to the start."""
        if n < self.n_seen:
            self.n_used = self.n_seen = n if self.n_seen <= self.slots else 0
        return self.n_seen
