"""Keep every key and value, read few: an index picks tokens for each query, and attention to those is exact."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import numpy as np

from edgekv.kernels import Kernels
from edgekv.kernels.contract.attention import bound_scores
from edgekv.kernels.contract.segment import Segment
from edgekv.kernels.memory import contiguous
from edgekv.kvcache.codecs import F16, Codec
from edgekv.kvcache.geometry import EXAMPLE, Geometry, Layout, Workspace
from edgekv.kvcache.keepall import KeepAll
from edgekv.types import F32, I64, Array


class Index(abc.ABC):
    """A summary of the keys, made ``block`` tokens at a time; ``kind`` names the loops that score its units.

    A unit is ``unit`` tokens.
    """

    kind: ClassVar[str]
    backend_state: Any = None  # as a `Codec`'s

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
        self.backend_state = None

    def covered(self, n_tokens: int) -> int:
        """How many of the first n tokens are in whole blocks."""
        return n_tokens // self.block * self.block

    @abc.abstractmethod
    def encode(self, keys: Array, b0: int, b1: int) -> None:
        """Summarises blocks b0..b1 of keys (n_kv_heads, capacity, head_dim), float16 bits."""


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
        context = geometry.context or geometry.capacity
        reach = min(context, geometry.sliding_window or context)
        self._index = None if skipped or reach < knobs.k + index.block else index

    @classmethod
    def kinds(cls, knobs: Any) -> set[str] | None:
        return (super().kinds(knobs) or set()) | {cls(EXAMPLE, knobs).index(EXAMPLE, knobs).kind}

    @abc.abstractmethod
    def index(self, geometry: Geometry, knobs: Any) -> Index:
        """The scheme: how keys are summarised."""

    def codecs(self, geometry: Geometry, knobs: Any) -> tuple[Codec, Codec]:
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
        block, window = self._index.block, self.geometry.sliding_window or self.n_seen
        n_blocks = self.n_seen // block - max(0, self.n_seen - window) // block
        n_tokens: int = self.knobs.k + self.n_seen % block
        token_bytes = self.key_codec.token_bytes + self.value_codec.token_bytes
        return n_blocks * self._index.block_bytes + n_tokens * token_bytes

    def is_steady(self) -> bool:
        """Not with an index: which tokens are read depends on how many there are."""
        return self._index is None and super().is_steady()

    def extend(self, keys: F32, values: F32) -> None:
        before = self.n_seen
        super().extend(keys, values)
        self._extend_index(before)

    def piece(self) -> int:
        """Tokens that see the same blocks of the index."""
        if self._index is None:
            return super().piece()
        return self._index.block - (self.n_seen + 1) % self._index.block

    def append(self, keys: F32, values: F32) -> None:
        before = self.n_seen
        super().append(keys, values)
        self._extend_index(before)

    def _extend_index(self, before: int) -> None:
        if self._index and before // self._index.block < self.n_seen // self._index.block:
            b0, b1 = before // self._index.block, self.n_seen // self._index.block
            self._index.encode(self.arrays["key.half"], b0, b1)

    def _read(self, queries: F32, out: F32, sinks: F32 | None) -> None:
        if self._index is None or self._index.covered(self.n_seen) <= self.knobs.k:
            super()._read(queries, out, sinks)
            return
        _, n, head_dim = queries.shape
        q = contiguous(queries)
        grouped = q.reshape(self.geometry.n_kv_heads, self.geometry.n_rep * n, head_dim)
        chosen = self._choose(self._index, grouped, self.n_seen - n, n)
        segment = Segment(self.key_codec, self.value_codec, 0, self.n_seen, chosen=chosen)
        target = self.workspace.array("attention.piece", out.shape)
        self.kernels.attend(q, [segment], self.visible(n), target, sinks=sinks, cap=self.geometry.score_cap)
        out[:] = target

    def _choose(self, index: Index, q: F32, start: int, n: int) -> tuple[Array, I64]:
        """Tokens to attend to (n_kv_heads, n, most of them), and how many of them each query token sees.

        The last ones are those that are not indexed, of which each query token sees those before the next.
        """
        n_kv_heads, end, indexed = self.geometry.n_kv_heads, start + n, index.covered(start + 1)
        n_chosen = min(self.knobs.k, indexed)
        tokens = self.workspace.array("retrieval.tokens", (n_kv_heads, n, n_chosen + end - indexed), np.int32)
        tokens[:, :, n_chosen:] = np.arange(indexed, end, dtype=np.int32, like=tokens)
        if n_chosen == indexed:
            tokens[:, :, :n_chosen] = np.arange(indexed, dtype=np.int32, like=tokens)
        else:
            units = self._best_units(index, q, start, n)
            each = tokens[:, :, :n_chosen].reshape(n_kv_heads, n, -1, index.unit)  # a view
            within = np.arange(index.unit, dtype=np.int32, like=tokens)
            np.add(units[..., None] * np.int32(index.unit), within, out=each)
        return tokens, n_chosen + np.arange(start + 1, end + 1) - indexed

    def _best_units(self, index: Index, q: F32, start: int, n: int) -> Array:
        """(n_kv_heads, n, k / unit): the units of most attention, among those wholly in the window."""
        n_kv_heads, n_rep, unit = self.geometry.n_kv_heads, self.geometry.n_rep, index.unit
        seen = np.arange(start + 1, start + n + 1)
        low = np.maximum(seen - (self.geometry.sliding_window or start + n), 0)
        b0, b1 = int(low[0]) // index.block, (start + 1) // index.block
        first = b0 * index.block
        s = self.workspace.array("scores", (n_kv_heads, n_rep * n, (b1 * index.block - first) // unit))
        self.kernels.scores(index, q, b0 * index.block // unit, b1 * index.block // unit, s)
        lo, hi = -(-(low - first) // unit), np.full(n, s.shape[2])
        if n_rep > 1:
            bound_scores(s, self.geometry.score_cap)
            self.kernels.softmax(s, np.tile(lo, n_rep), np.tile(hi, n_rep))
        units = self.workspace.array("retrieval.units", (n_kv_heads, n, self.knobs.k // unit), np.int32)
        self.kernels.select_top(s, lo, hi, units.shape[2], units)
        units += np.int32(first // unit)
        return units
