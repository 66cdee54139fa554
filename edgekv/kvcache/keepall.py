"""The simplest policy: every token stays, keys in one codec and values in another."""

from __future__ import annotations

import abc
from typing import Any

from edgekv.kernels import Kernels
from edgekv.kvcache.base import F32, Geometry, KVCache, Layout, Workspace
from edgekv.kvcache.codecs import KeyCodec, ValueCodec


class KeepAll(KVCache):
    """Scores, softmax and value sum over all tokens (or those in the sliding window)."""

    def __init__(self, geometry: Geometry, knobs: Any) -> None:
        super().__init__(geometry, knobs)
        self.key_codec, self.value_codec = self.codecs(geometry, knobs)

    @abc.abstractmethod
    def codecs(self, geometry: Geometry, knobs: Any) -> tuple[KeyCodec, ValueCodec]:
        """The scheme: how keys and how values are stored."""

    def layout(self) -> Layout:
        return {f"{end}.{name}": spec for end, codec in self._codecs() for name, spec in codec.layout().items()}

    def _codecs(self) -> tuple[tuple[str, KeyCodec], tuple[str, ValueCodec]]:
        return ("key", self.key_codec), ("value", self.value_codec)

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        super().allocate(kernels, workspace)
        for end, codec in self._codecs():
            codec.bind({name: self.arrays[f"{end}.{name}"] for name in codec.layout()}, kernels)

    def bytes_read(self) -> int:
        reach = min(self.n_seen, self.geometry.window or self.n_seen)
        return reach * (self.key_codec.token_bytes + self.value_codec.token_bytes)

    def steady_tokens(self) -> int:
        return min(self.geometry.capacity, self.geometry.window or self.geometry.capacity) - self.n_seen

    def extend(self, keys: F32, values: F32) -> None:
        self.require_room(keys.shape[1])
        self.key_codec.encode(keys, self.n_seen)
        self.value_codec.encode(values, self.n_seen)
        self.n_seen += keys.shape[1]

    def attend(self, queries: F32, keys: F32, values: F32) -> F32:
        self.extend(keys, values)
        n_heads, n, head_dim = queries.shape
        groups, rows = self.geometry.n_kv_heads, self.geometry.group * n
        lo, hi = self.visible(n)
        first, end = int(lo.min()), self.n_seen
        s = self.workspace.scores((groups, rows, end - first))
        out = self.workspace.array("attention", (groups, rows, head_dim))
        self.key_codec.scores(queries.reshape(groups, rows, head_dim), first, end, s, 0)
        self.kernels.softmax(s, lo - first, hi - first)
        out.fill(0)
        self.value_codec.accumulate(s, 0, first, end, out)
        return out.reshape(n_heads, n, head_dim)
