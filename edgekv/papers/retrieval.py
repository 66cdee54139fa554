"""The policy of FIER and Quest: an index chooses tokens for each query, and attention to these is exact."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from edgekv.codecs.codec import Codec, Layout
from edgekv.codecs.f16 import F16
from edgekv.kernels import Kernels
from edgekv.kernels.arrays import contiguous
from edgekv.kernels.interface import Segment, bound_scores
from edgekv.kvcache.cache import EXAMPLE, Geometry, Workspace
from edgekv.kvcache.policies import FullCache
from edgekv.types import F32, I64, Array


class Index(abc.ABC):
    """Base class of summaries of keys: of ``block`` tokens each, with a score for each ``unit`` of tokens.

    kind, backends: as a `Codec`'s.
    """

    kind: ClassVar[str]
    backends: ClassVar[Mapping[str, str]]
    backend_state: Any = None

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, block: int, unit: int) -> None:
        self.n_kv_heads, self.n_blocks, self.head_dim = n_kv_heads, capacity // block, head_dim
        self.block, self.unit = block, unit

    @abc.abstractmethod
    def layout(self) -> Layout:
        """Returns every array of the index: name -> (shape, dtype)."""

    @property
    @abc.abstractmethod
    def block_bytes(self) -> int:
        """Returns the bytes that a block takes, all heads together."""

    def bind(self, arrays: dict[str, Array], kernels: Kernels) -> None:
        """Takes the arrays of `layout`, (n_kv_heads, ...) each, and the kernels to use on them."""
        self.arrays, self.kernels = arrays, kernels
        self.backend_state = None

    def covered(self, n_tokens: int) -> int:
        """Returns how many of the first n tokens are in whole blocks."""
        return n_tokens // self.block * self.block

    @abc.abstractmethod
    def encode(self, keys: Array, b0: int, b1: int) -> None:
        """Summarises blocks b0..b1 of keys (n_kv_heads, capacity, head_dim), float16 bits."""

    @abc.abstractmethod
    def scores(self, q: F32, t0: int, t1: int) -> F32:
        """Returns the scores (n_kv_heads, n, t1 - t0) of queries q (n_kv_heads, n, head_dim) with units t0..t1."""


class Retrieval(FullCache):
    """A cache in f16 with an index: a query reads the index, k tokens, and tokens that are not indexed yet.

    The query heads that share a KV head read the same k tokens: those with the largest sum of attention
    probabilities by the index. While the index covers k tokens or fewer, in a sliding window that is hardly
    wider, and in the first ``skip`` layers (never the last one) attention is `dense`'s.
    """

    def __init__(self, geometry: Geometry, config: Any) -> None:
        super().__init__(geometry, config)
        index = self.index(geometry, config)
        skipped = geometry.layer < min(config.skip, geometry.n_layers - 1)
        context = geometry.context or geometry.capacity
        reach = min(context, geometry.sliding_window or context)
        self._index = None if skipped or reach < config.k + index.block else index

    @classmethod
    def codecs_used(cls, config: Any) -> set[type[Any]] | None:
        return (super().codecs_used(config) or set()) | {type(cls(EXAMPLE, config).index(EXAMPLE, config))}

    @abc.abstractmethod
    def index(self, geometry: Geometry, config: Any) -> Index:
        """Returns the scheme's index of a layer."""

    def codecs(self, geometry: Geometry, config: Any) -> tuple[Codec, Codec]:
        shape = geometry.n_kv_heads, geometry.capacity, geometry.head_dim
        return F16(*shape), F16(*shape)

    def layout(self) -> Layout:
        index = self._index.layout() if self._index else {}
        return super().layout() | {f"index.{name}": spec for name, spec in index.items()}

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        super().allocate(kernels, workspace)
        if self._index:
            self._index.bind({name: self.arrays[f"index.{name}"] for name in self._index.layout()}, kernels)
            shape = self.geometry.n_kv_heads, self.config.k + self._index.block, self.geometry.head_dim
            self._read_codecs = F16(*shape), F16(*shape)  # copies of the tokens that a query reads
            for name, codec in zip(("keys", "values"), self._read_codecs, strict=True):
                codec.bind({"half": workspace.array(f"retrieval.{name}", shape, np.uint16)}, kernels)

    def bytes_read(self) -> int:
        """Returns the bytes of the visible blocks of the index, of k tokens, and of those not yet indexed."""
        if self._index is None or self._index.covered(self.n_seen) <= self.config.k:
            return super().bytes_read()
        block, window = self._index.block, self.geometry.sliding_window or self.n_seen
        n_blocks = self.n_seen // block - max(0, self.n_seen - window) // block
        n_tokens: int = self.config.k + self.n_seen % block
        token_bytes = self.key_codec.token_bytes + self.value_codec.token_bytes
        return n_blocks * self._index.block_bytes + n_tokens * token_bytes

    def is_static(self) -> bool:
        """Returns False with an index: which tokens are read depends on how many there are."""
        return self._index is None and super().is_static()

    def append_prefill(self, keys: F32, values: F32) -> None:
        """Appends a prompt's keys and values (n_kv_heads, n, head_dim)."""
        before = self.n_seen
        super().append_prefill(keys, values)
        self._extend_index(before)

    def max_append_tokens(self) -> int:
        """Returns the number of tokens that see the same blocks of the index."""
        if self._index is None:
            return super().max_append_tokens()
        return self._index.block - (self.n_seen + 1) % self._index.block

    def append(self, keys: F32, values: F32) -> None:
        """Stores keys and values (n_kv_heads, n, head_dim) of new tokens."""
        before = self.n_seen
        super().append(keys, values)
        self._extend_index(before)

    def _extend_index(self, before: int) -> None:
        if self._index and before // self._index.block < self.n_seen // self._index.block:
            b0, b1 = before // self._index.block, self.n_seen // self._index.block
            self._index.encode(self.arrays["key.half"], b0, b1)

    def read(self, queries: F32, out: F32, sinks: F32 | None) -> None:
        """Attends for each token of queries (n_heads, n, head_dim) by itself, once the index has more than k."""
        if self._index is None or self._index.covered(self.n_seen) <= self.config.k:
            super().read(queries, out, sinks)
            return
        n = queries.shape[1]
        for j in range(n):
            self._read_token(self._index, queries[:, j : j + 1], out[:, j : j + 1], self.n_seen - n + j + 1, sinks)

    def _read_token(self, index: Index, q: F32, out: F32, n_seen: int, sinks: F32 | None) -> None:
        """Attends exactly, for the last of ``n_seen`` tokens, to the k best tokens and to those not yet indexed.

        q, out (n_heads, 1, head_dim).
        """
        q, target = contiguous(q), self.workspace.array("attention.piece", out.shape)
        units, indexed = self._best_units(index, q, n_seen), index.covered(n_seen)
        best = (units[..., None] * index.unit + np.arange(index.unit, like=units)).reshape(len(units), -1)
        latest = np.arange(indexed, n_seen, like=units)
        tokens = np.concatenate([best, np.broadcast_to(latest, (len(units), len(latest)))], axis=1)
        for name, codec in zip(("key", "value"), self._read_codecs, strict=True):
            store, heads = self.arrays[f"{name}.half"], np.arange(len(tokens), like=tokens)[:, None]
            codec.arrays["half"][:, : tokens.shape[1]] = store[heads, tokens]
        segment = Segment(*self._read_codecs, 0, tokens.shape[1])
        visible = np.zeros(1, np.int64), np.array([tokens.shape[1]])
        self.kernels.attend(q, [segment], visible, target, sinks=sinks, cap=self.geometry.score_cap)
        out[:] = target

    def _best_units(self, index: Index, q: F32, n_seen: int) -> Array:
        """Returns the units (n_kv_heads, k / unit), ascending, of most attention, wholly in the window."""
        n_kv_heads, n_rep, unit = self.geometry.n_kv_heads, self.geometry.n_rep, index.unit
        low = max(0, n_seen - (self.geometry.sliding_window or n_seen))
        first, last = low // index.block * index.block // unit, index.covered(n_seen) // unit
        s = self.workspace.array("scores", (n_kv_heads, n_rep, last - first))
        self.kernels.scores(index, q.reshape(n_kv_heads, n_rep, -1), first, last, s)
        start = -(-low // unit) - first
        if n_rep > 1:  # of one query alone the largest scores are those of most attention
            bound_scores(s, self.geometry.score_cap)
            self.kernels.softmax(s, np.full(n_rep, start), np.full(n_rep, last - first))
        total = s[:, 0] if n_rep == 1 else s.sum(axis=1)
        return top_k(total[:, start:], self.config.k // unit) + (first + start)


def top_k(s: F32, k: int) -> I64:
    """Returns the columns (G, k), ascending, of the k largest of s (G, n): of equals the lower; NaN is least."""
    x = -s
    is_taken = x <= np.partition(x, k - 1, axis=1)[:, k - 1 : k]
    if (is_taken.sum(axis=1) != k).any():  # more that equal the k-th, or NaN among the k
        columns: I64 = np.sort(np.argsort(x, axis=1, kind="stable")[:, :k], axis=1)
    else:
        columns = np.flatnonzero(is_taken).reshape(len(s), k) % s.shape[1]
    return columns
