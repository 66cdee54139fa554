"""The state of a recurrent layer: of one size whatever the length, and rewound by snapshots alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgekv.codecs.codec import Layout
from edgekv.kernels.arrays import to_host
from edgekv.kvcache.cache import KVCache, LayerState, layout_bytes
from edgekv.kvcache.registry import CacheSpec
from edgekv.models.config import ModelConfig, Recurrence
from edgekv.types import F32, Array

VERSION = 1  # of what the arrays mean
SNAPSHOT_TOKENS = 256  # between snapshots, beside those at turns
SNAPSHOT_BYTES = 128 << 20  # that all layers' snapshots may take, within
MIN_SNAPSHOTS, MAX_SNAPSHOTS = 4, 32


class RecurrentState(LayerState):
    """The state that a `Recurrence` carries from token to token, and snapshots of it.

    `run` appends tokens. A rewind goes back to the latest snapshot at or before its target, and the session, which
    has the tokens, computes those from there on again. Snapshots are made at multiples of SNAPSHOT_TOKENS and
    where `checkpoint_at` says. Where no slot is left, the snapshot is evicted whose loss adds least recomputation
    for its age, so that gaps grow with the distance from the latest token.

    slots: the number of snapshots, the same in all layers of a model, so that all are made at the same tokens.
    """

    def __init__(self, recurrence: Recurrence, capacity: int, slots: int) -> None:
        super().__init__()
        self.recurrence, self._capacity = recurrence, capacity
        self.snapshots = [0] * slots  # after how many tokens each was made; 0: it is free
        self._marks: set[int] = set()
        self._is_torn = False  # whether a run was interrupted, and the arrays are those of no token

    @property
    def capacity(self) -> int:
        return self._capacity

    def layout(self) -> Layout:
        """Returns the state's arrays, and ``snapshots.NAME`` (slots, ...) of each."""
        shapes, slots = self.recurrence.state(), len(self.snapshots)
        state: Layout = {name: (shape, "<f4") for name, shape in shapes.items()}
        return state | {f"snapshots.{name}": ((slots, *shape), "<f4") for name, shape in shapes.items()}

    @property
    def _state_arrays(self) -> dict[str, Array]:
        return {name: self.arrays[name] for name in self.recurrence.state()}

    def bytes_read(self) -> int:
        return sum(array.nbytes for array in self._state_arrays.values())

    def run(self, projected: F32, weights: Mapping[str, F32]) -> F32:
        """Appends n tokens and returns their output (n, mixed), valid until the next call.

        projected (n, projected): the tokens after the layer's input projection; `Recurrence` has both widths.
        """
        n = len(projected)
        self.require_room(n)
        kernel = getattr(self.kernels, self.recurrence.kernel)
        out = self.workspace.array("recurrence", (n, self.recurrence.mixed))
        constants, a = self.recurrence.constants(), 0
        while a < n:
            b = min(n, a + self._next_stop() - self.n_seen)
            self._is_torn = True
            kernel(projected[a:b], out[a:b], **self._state_arrays, **weights, **constants)
            self.n_seen += b - a
            self._is_torn = False
            if self.n_seen in self._marks or self.n_seen % SNAPSHOT_TOKENS == 0:
                self._take_snapshot()
            a = b
        return out

    def _next_stop(self) -> int:
        """Returns after how many tokens the next snapshot is due."""
        regular = (self.n_seen // SNAPSHOT_TOKENS + 1) * SNAPSHOT_TOKENS
        return min([regular, *(mark for mark in self._marks if mark > self.n_seen)])

    def checkpoint_at(self, n: int) -> None:
        if n == self.n_seen:
            self._take_snapshot()
        else:
            self._marks.add(n)

    def _take_snapshot(self) -> None:
        self._marks.discard(self.n_seen)
        if self.n_seen in (0, *self.snapshots):
            return
        slot = self.snapshots.index(0) if 0 in self.snapshots else self._cheapest_slot()
        self.snapshots[slot] = 0
        for name, array in self._state_arrays.items():
            self.arrays[f"snapshots.{name}"][slot] = array
        self.snapshots[slot] = self.n_seen

    def _cheapest_slot(self) -> int:
        """Returns the slot whose loss adds least recomputation, in tokens, for the age of its snapshot."""
        previous = {n: max(m for m in (0, *self.snapshots) if m < n) for n in self.snapshots}
        costs = [(n - previous[n]) / (self.n_seen - n) for n in self.snapshots]
        return costs.index(min(costs))

    def recompute_from(self, n: int) -> int:
        return max([0, *(at for at in self.snapshots if at <= n)])

    def truncate(self, n: int, n_same: int = 0) -> int:
        """Goes back to the latest snapshot within the first ``n`` tokens, and drops the later ones."""
        self._marks.clear()
        if n == self.n_seen and not self._is_torn:
            return n
        found = self.recompute_from(n)
        self._is_torn = True
        for name, array in self._state_arrays.items():
            array[...] = self.arrays[f"snapshots.{name}"][self.snapshots.index(found)] if found else 0
        self.n_seen, self._is_torn = found, False
        self.snapshots = [at if at <= found else 0 for at in self.snapshots]
        return found

    def extra_state(self) -> dict[str, Any]:
        return {"version": VERSION, "snapshots": list(self.snapshots)}

    def load_extra_state(self, extra: Mapping[str, Any]) -> None:
        """Takes the list of snapshots. Raises ValueError for one that no conversation of `n_seen` tokens has."""
        version, snapshots = extra["version"], extra["snapshots"]
        if version != VERSION:
            raise ValueError(f"version {version!r} of a recurrent state")
        valid = isinstance(snapshots, list) and all(type(n) is int and 0 <= n <= self.n_seen for n in snapshots)
        is_size = valid and len(snapshots) == len(self.snapshots)
        if not is_size or len({*snapshots} - {0}) != sum(n > 0 for n in snapshots):
            raise ValueError(f"snapshots {snapshots!r:.60}")
        self.snapshots = list(snapshots)

    def arrays_valid(self) -> bool:
        # What is not finite would never leave the state again.
        return all(bool(np.isfinite(to_host(array)).all()) for array in self.arrays.values())


def open_layers(spec: CacheSpec, shape: ModelConfig, capacity: int) -> list[LayerState]:
    """Returns a state of each layer for ``capacity`` tokens, not allocated yet: a KV cache where it attends.

    Raises CacheError as `CacheSpec.layers`.
    """
    caches, states = iter(spec.layers(shape, capacity)), iter(recurrent_states(shape, capacity))
    return [next(caches) if recurrence is None else next(states) for recurrence in shape.layer_recurrences]


def recurrent_states(shape: ModelConfig, capacity: int) -> list[RecurrentState]:
    """Returns the states of the recurrent layers, not allocated yet."""
    recurrences = [layer for layer in shape.layer_recurrences if layer is not None]
    state_bytes = sum(layout_bytes({k: (v, "<f4") for k, v in layer.state().items()}) for layer in recurrences)
    affordable = SNAPSHOT_BYTES // max(1, state_bytes)
    slots = min(max(MIN_SNAPSHOTS, affordable), MAX_SNAPSHOTS, MIN_SNAPSHOTS + capacity // SNAPSHOT_TOKENS)
    return [RecurrentState(recurrence, capacity, slots) for recurrence in recurrences]


def attending(layers: Sequence[LayerState]) -> list[KVCache]:
    """Returns the KV caches among a model's layers."""
    return [layer for layer in layers if isinstance(layer, KVCache)]
