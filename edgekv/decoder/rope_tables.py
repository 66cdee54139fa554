"""cos and sin of the positions, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from edgekv.models.rope import RopeConfig, frequencies
from edgekv.types import F32


class RopeRotation(NamedTuple):
    """Of n positions: cos and sin (n, rotated channels / 2), and where queries grow their factors (n, 1)."""

    cos: F32
    sin: F32
    query_factors: F32 | None = None

    def rows(self, first: int, stop: int) -> RopeRotation:
        """Of the positions first..stop among these."""
        factors = self.query_factors
        return RopeRotation(
            self.cos[first:stop], self.sin[first:stop], None if factors is None else factors[first:stop]
        )


class RopeTable:
    """The rotation of positions; of those below ``capacity`` made once, unless it depends on the length.

    rope None rotates nothing. upload: brings an array to the memory where it is read.
    """

    def __init__(
        self, rope: RopeConfig | None, capacity: int, upload: Callable[[F32], Any] = lambda array: array
    ) -> None:
        self.rope, self._upload = rope, upload
        self.is_fixed = rope is None or capacity <= rope.fixed_up_to
        self._fixed = self._compute(0, capacity, capacity) if self.is_fixed else None

    def at(self, start: int, n: int) -> RopeRotation:
        """Of positions start..start+n, the last of the sequence so far."""
        if self._fixed and start + n <= len(self._fixed.cos):
            return self._fixed.rows(start, start + n)
        return self._compute(start, n, start + n)

    def _compute(self, start: int, n: int, seq_len: int) -> RopeRotation:
        if self.rope is None:
            empty = self._upload(np.empty((n, 0), np.float32))
            return RopeRotation(empty, empty)
        freq, factor = frequencies(self.rope, seq_len)
        positions = np.arange(start, start + n)[:, None]
        angles = positions * freq  # (n, dim/2)
        cos, sin = (self._upload((f(angles) * factor).astype(np.float32)) for f in (np.cos, np.sin))
        return RopeRotation(cos, sin, self._query_factors(positions, self.rope))

    def _query_factors(self, positions: np.ndarray, rope: RopeConfig) -> F32 | None:
        if not rope.query_growth:
            return None
        original = rope.params.original_max_position_embeddings or rope.trained_positions
        factors: F32 = self._upload((1 + rope.query_growth * np.log1p(positions // original)).astype(np.float32))
        return factors


class LayerRopes:
    """The tables of all layers; layers that rotate alike share one. upload: as of `RopeTable`."""

    def __init__(
        self,
        layer_ropes: Sequence[RopeConfig | None],
        capacity: int,
        upload: Callable[[F32], Any] = lambda array: array,
    ) -> None:
        distinct: list[RopeConfig | None] = []
        for rope in layer_ropes:
            if rope not in distinct:
                distinct.append(rope)
        self.tables = [RopeTable(rope, capacity, upload) for rope in distinct]
        self._table_of = [distinct.index(rope) for rope in layer_ropes]

    @property
    def is_fixed(self) -> bool:
        """Whether a position's rotation is the same however long the sequence becomes."""
        return all(table.is_fixed for table in self.tables)

    def at(self, start: int, n: int) -> list[RopeRotation]:
        """Each layer's rotation of the positions start..start+n, the last of the sequence so far."""
        rotations = [table.at(start, n) for table in self.tables]
        return [rotations[k] for k in self._table_of]
