"""Keep every key and value, read few: an index picks tokens for each query, and attention to those is exact."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from edgekv.kernels import Kernels
from edgekv.kernels.memory import contiguous
from edgekv.kvcache.base import F32, I64, Array, Geometry, Layout, Workspace
from edgekv.kvcache.codecs import F16, KeyCodec, ValueCodec
from edgekv.kvcache.keepall import KeepAll


class Index(abc.ABC):
    """A summary of the keys, made ``block`` tokens at a time, that scores units of ``unit`` tokens."""

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, block: int, unit: int) -> None:
        self.n_kv_heads, self.n_blocks, self.head_dim = n_kv_heads, capacity // block, head_dim
        self.block, self.unit = block, unit

    @abc.abstractmethod
    def layout(self) -> Layout: ...

    @property
    @abc.abstractmethod
    def block_bytes(self) -> int:
        """Bytes that a block takes, all heads together."""

    def bind(self, arrays: dict[str, Array], kernels: Kernels) -> None:
        """The allocated arrays of `layout`, and the kernels to use on them."""
        self.arrays, self.kernels = arrays, kernels

    def covered(self, n_tokens: int) -> int:
        """How many of the first n tokens are in whole blocks."""
        return n_tokens // self.block * self.block

    @abc.abstractmethod
    def encode(self, keys: Array, b0: int, b1: int) -> None:
        """Summarises blocks b0..b1 of keys (n_kv_heads, capacity, head_dim), float16 bits."""

    @abc.abstractmethod
    def scores(self, queries: F32, b0: int, b1: int, s: F32) -> None:
        """s <- scores of queries (n_kv_heads, rows, head_dim) with the units of blocks b0..b1."""


class Retrieval(KeepAll):
    """Keys and values in f16, and an index. A query reads the index, then k tokens and those not yet indexed.

    One choice serves the query heads that share a KV head: the k tokens with the largest sum of attention
    probabilities by the index. While the index covers k tokens or fewer, in a sliding window that is hardly
    wider, and in the first ``skip`` layers (never the last one) attention is `dense`'s.
    """

    exact_when_short = True

    def __init__(self, geometry: Geometry, knobs: Any) -> None:
        super().__init__(geometry, knobs)
        index = self.index(geometry, knobs)
        skipped = geometry.layer < min(knobs.skip, geometry.n_layers - 1)
        reach = min(geometry.capacity, geometry.window or geometry.capacity)
        self._index = None if skipped or reach < knobs.k + index.block else index

    @abc.abstractmethod
    def index(self, geometry: Geometry, knobs: Any) -> Index:
        """The scheme: how keys are summarised."""

    def codecs(self, geometry: Geometry, knobs: Any) -> tuple[KeyCodec, ValueCodec]:
        shape = geometry.n_kv_heads, geometry.capacity, geometry.head_dim
        return F16(*shape), F16(*shape)

    def layout(self) -> Layout:
        index = self._index.layout() if self._index else {}
        return super().layout() | {f"index.{name}": spec for name, spec in index.items()}

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        super().allocate(kernels, workspace)
        if self._index:
            self._index.bind({name: self.arrays[f"index.{name}"] for name in self._index.layout()}, kernels)

    def bytes_read(self) -> int:
        """The index of what is visible, and keys and values of k tokens and of those not yet indexed."""
        if self._index is None or self._index.covered(self.n_seen) <= self.knobs.k:
            return super().bytes_read()
        block, window = self._index.block, self.geometry.window or self.n_seen
        n_blocks = self.n_seen // block - max(0, self.n_seen - window) // block
        n_tokens: int = self.knobs.k + self.n_seen % block
        token_bytes = self.key_codec.token_bytes + self.value_codec.token_bytes
        return n_blocks * self._index.block_bytes + n_tokens * token_bytes

    def steady_tokens(self) -> int:
        """None with an index: which tokens are read depends on how many there are."""
        return 0 if self._index else super().steady_tokens()

    def extend(self, keys: F32, values: F32) -> None:
        before = self.n_seen
        super().extend(keys, values)
        if self._index and before // self._index.block < self.n_seen // self._index.block:
            b0, b1 = before // self._index.block, self.n_seen // self._index.block
            self._index.encode(self.arrays["key.half"], b0, b1)

    def attend(self, queries: F32, keys: F32, values: F32) -> F32:
        n_heads, n, head_dim = queries.shape
        begin, end = self.n_seen, self.n_seen + n
        if self._index is None or self._index.covered(end) <= self.knobs.k:
            return super().attend(queries, keys, values)
        self.extend(keys, values)
        out = self.workspace.array("attention", (n_heads, n, head_dim))
        while begin < end:  # in pieces of tokens that see the same blocks
            stop = min(end, self._index.covered(begin + 1) + self._index.block - 1)
            part = slice(begin + n - end, stop + n - end)
            out[:, part] = self._attend_piece(self._index, contiguous(queries[:, part]), begin)
            begin = stop
        return out

    def _attend_piece(self, index: Index, queries: F32, start: int) -> F32:
        """Attention of the tokens from `start` on; all are appended, and see the same blocks."""
        n_heads, n, head_dim = queries.shape
        groups, rows = self.geometry.n_kv_heads, self.geometry.group * n
        q = queries.reshape(groups, rows, head_dim)
        tokens, counts = self._choose(index, q, start, n)
        s = self.workspace.array("scores", (groups, rows, tokens.shape[2]))
        self.kernels.scores_f16_at(q, self.arrays["key.half"], tokens, counts, s)
        self.kernels.softmax(s, np.zeros(rows, np.int64), np.tile(counts, self.geometry.group))
        out = self.workspace.array("attention.piece", (groups, rows, head_dim))
        out.fill(0)
        self.kernels.values_f16_at(s, self.arrays["value.half"], tokens, counts, out)
        return out.reshape(n_heads, n, head_dim)

    def _choose(self, index: Index, q: F32, start: int, n: int) -> tuple[Array, I64]:
        """Tokens to attend to (n_kv_heads, n, most of them), and how many of them each query token sees.

        The last ones are those that are not indexed, of which each query token sees those before the next.
        """
        groups, end, indexed = self.geometry.n_kv_heads, start + n, index.covered(start + 1)
        n_chosen = min(self.knobs.k, indexed)
        tokens = self.workspace.array("retrieval.tokens", (groups, n, n_chosen + end - indexed), np.int32)
        tokens[:, :, n_chosen:] = np.arange(indexed, end, dtype=np.int32, like=tokens)
        if n_chosen == indexed:
            tokens[:, :, :n_chosen] = np.arange(indexed, dtype=np.int32, like=tokens)
        else:
            units = self._best_units(index, q, start, n)
            each = tokens[:, :, :n_chosen].reshape(groups, n, -1, index.unit)  # a view
            within = np.arange(index.unit, dtype=np.int32, like=tokens)
            np.add(units[..., None] * np.int32(index.unit), within, out=each)
        return tokens, n_chosen + np.arange(start + 1, end + 1) - indexed

    def _best_units(self, index: Index, q: F32, start: int, n: int) -> Array:
        """(n_kv_heads, n, k / unit): the units of most attention, among those wholly in the window."""
        groups, group, unit = self.geometry.n_kv_heads, self.geometry.group, index.unit
        seen = np.arange(start + 1, start + n + 1)
        low = np.maximum(seen - (self.geometry.window or start + n), 0)
        b0, b1 = int(low[0]) // index.block, (start + 1) // index.block
        first = b0 * index.block
        s = self.workspace.array("scores", (groups, group * n, (b1 * index.block - first) // unit))
        index.scores(q, b0, b1, s)
        lo, hi = -(-(low - first) // unit), np.full(n, s.shape[2])
        if group > 1:
            self.kernels.softmax(s, np.tile(lo, group), np.tile(hi, group))
        units = self.workspace.array("retrieval.units", (groups, n, self.knobs.k // unit), np.int32)
        self.kernels.select_top(s, lo, hi, units.shape[2], units)
        units += np.int32(first // unit)
        return units
