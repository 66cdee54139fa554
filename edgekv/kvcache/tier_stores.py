"""Packed tokens in two stores of different precision within a fixed number of bytes; the older ones step down.

As tokens arrive, the oldest blocks of the finer store are packed more coarsely, and once all are, the next coarser
of TIERS begins. Everything lies in one array, the arena, which is laid out anew at each step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from edgekv.errors import CacheError
from edgekv.kernels import Kernels
from edgekv.kernels.aligned import CACHE_LINE_BYTES
from edgekv.kernels.memory import contiguous
from edgekv.kvcache.codecs import WORD, Codec
from edgekv.kvcache.geometry import Layout, Workspace, layout_bytes
from edgekv.kvcache.repack import repack
from edgekv.kvcache.tiers import ALIGNMENT_BYTES, TIERS, Shape, Split, Tier, choose_split, usable_tiers
from edgekv.types import F32, Array

GROWTH, LEAST_GROWTH = 16, 256  # a step makes room for 1/16 more tokens, at least 256


class Store(NamedTuple):
    """The tokens first..first + capacity in one tier."""

    tier: Tier
    keys: Codec
    values: Codec
    first: int
    capacity: int

    @property
    def block_bytes(self) -> int:
        return sum(layout_bytes(codec.layout()) for codec in (self.keys, self.values)) * WORD // self.capacity


class Tiers:
    """The two stores, coarse and fine, and the steps so far: (tokens held, tier that began)."""

    workspace: Workspace

    def __init__(self, shape: Shape, most_tokens: int, n_bytes: int) -> None:
        self._shape, self.most_tokens = shape, most_tokens
        self.n_bytes = min(n_bytes, most_tokens // WORD * TIERS[0].block_bytes(shape) + ALIGNMENT_BYTES)
        self.log: list[tuple[int, str]] = []

    def bind(self, arena: Array, kernels: Kernels) -> None:
        """Takes the arena, laid out for no tokens."""
        self._arena, self._kernels = arena, kernels
        self.log = []
        self._use(self._split_for(0))

    @property
    def capacity(self) -> int:
        """Tokens that fit as things are; more make it step."""
        return self._split.capacity

    def _split_for(self, n_tokens: int) -> Split:
        split = choose_split(self._shape, n_tokens, self.most_tokens, self.n_bytes)
        if split is None:
            raise CacheError(
                f"{n_tokens} tokens do not fit {self.n_bytes} bytes of a layer; raise `kv_budget`",
                field="kv_budget",
            )
        return split

    def _use(self, split: Split) -> None:
        self._split = split
        self._stores = self._carve(split, self._arena)

    def _carve(self, split: Split, buffer: Array) -> list[Store]:
        """The stores of a split, with their arrays one behind the other in a buffer of bytes."""
        position, stores, tiers = 0, [], usable_tiers(self._shape)
        for tier, first, n in (
            (tiers[split.level + 1], 0, split.coarse),
            (tiers[split.level], split.coarse, split.fine),
        ):
            if not n:
                continue
            store = Store(tier, *tier.codecs(self._shape, n), first, n)
            for codec in (store.keys, store.values):
                arrays, position = _views(codec.layout(), buffer, position)
                codec.bind(arrays, self._kernels)
            stores.append(store)
        return stores

    def parts(self, t0: int, t1: int) -> Iterator[tuple[Store, int, int]]:
        """The stores that hold tokens t0..t1, and which of these each holds."""
        for store in self._stores:
            a, b = max(t0, store.first), min(t1, store.first + store.capacity)
            if a < b:
                yield store, a, b

    def reserve(self, n_held: int, n_tokens: int) -> None:
        """Makes room for n_tokens, of which n_held are there; the oldest may become coarser."""
        if n_tokens <= self.capacity:
            return
        wanted = n_tokens + max(LEAST_GROWTH, n_tokens // GROWTH)
        split = self._split_for(min(self.most_tokens, -(-wanted // WORD) * WORD))
        before = self.workspace.array("tiers.before", self._arena.shape, np.uint8)
        before[:] = self._arena
        old = self._carve(self._split, before)
        self._arena[:] = 0
        began = {store.tier.name for store in old}
        self._use(split)
        self.log += [(n_tokens, store.tier.name) for store in self._stores if store.tier.name not in began]
        for source in old:
            for target, a, b in self.parts(source.first, min(source.first + source.capacity, n_held)):
                span, to = (a - source.first, b - source.first), a - target.first
                repack(source.keys, target.keys, *span, to)
                repack(source.values, target.values, *span, to)

    def state(self) -> dict[str, Any]:
        """The split and the steps so far, ready for JSON."""
        return {"split": dataclasses.astuple(self._split), "log": self.log}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave. Raises ValueError for a split that can't be."""
        split, names = Split(*map(int, state["split"])), {tier.name for tier in TIERS}
        log = [(int(n), str(name)) for n, name in state["log"]]
        if not self._fits(split) or not names.issuperset(name for _, name in log):
            raise ValueError(f"{split}, {log}")
        self.log = log
        self._use(split)

    def _fits(self, split: Split) -> bool:
        """Whether its stores are whole blocks, of two tiers that there are, in the arena."""
        tiers = usable_tiers(self._shape)
        if not 0 <= split.level < len(tiers) - 1 or min(split.coarse, split.fine) < 0:
            return False
        if split.coarse % WORD or split.fine % WORD or split.capacity > self.most_tokens:
            return False
        sizes = [tiers[split.level + i].block_bytes(self._shape) for i in (0, 1)]
        n_bytes = (split.fine * sizes[0] + split.coarse * sizes[1]) // WORD
        return n_bytes + ALIGNMENT_BYTES <= max(self.n_bytes, ALIGNMENT_BYTES)


def _views(layout: Layout, buffer: Array, position: int) -> tuple[dict[str, Array], int]:
    arrays = {}
    for name, (shape, dtype) in layout.items():
        position = -(-position // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        n_bytes = layout_bytes({name: (shape, dtype)})
        arrays[name] = buffer[position : position + n_bytes].view(dtype).reshape(shape)
        position += n_bytes
    return arrays, position


class TieredKeys(Codec):
    """The keys of both stores: encodes what is packed, and owns the arena."""

    kind = "tiers"  # no kernel reads it: `Steps` has a segment for each store

    def __init__(self, tiers: Tiers, n_kv_heads: int, capacity: int, head_dim: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.tiers = tiers

    def layout(self) -> Layout:
        return {"arena": ((self.tiers.n_bytes,), "uint8")}

    @property
    def token_bytes(self) -> int:
        """At most, keys and values."""
        parts = self.tiers.parts(0, self.tiers.capacity)
        return max((-(-store.block_bytes // WORD) for store, _, _ in parts), default=0)

    def bind(self, arrays: dict[str, Array], kernels: Kernels) -> None:
        super().bind(arrays, kernels)
        self.tiers.bind(arrays["arena"], kernels)

    def encode(self, x: F32, t0: int) -> None:
        self.tiers.reserve(t0, t0 + x.shape[1])
        for store, a, b in self.tiers.parts(t0, t0 + x.shape[1]):
            store.keys.encode(contiguous(x[:, a - t0 : b - t0]), a - store.first)


class TieredValues(Codec):
    """The values of both stores. Encoded after the keys, which have made room for them."""

    kind = "tiers"

    def __init__(self, tiers: Tiers, n_kv_heads: int, capacity: int, head_dim: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.tiers = tiers

    def layout(self) -> Layout:
        return {}

    @property
    def token_bytes(self) -> int:
        """Counted with the keys."""
        return 0

    def encode(self, x: F32, t0: int) -> None:
        for store, a, b in self.tiers.parts(t0, t0 + x.shape[1]):
            store.values.encode(contiguous(x[:, a - t0 : b - t0]), a - store.first)


def described(log: Sequence[tuple[int, str]]) -> str:
    """The steps so far, for the report."""
    return ", ".join(f"{name} from {n} tokens on" for n, name in log)
