"""A LoRA beside the weights: y = W x + B (A x), two small products for each linear layer that it changes.

So one weight store serves many of them, and the weights stay as they were rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from edgekv.checkpoint.merged import Delta
from edgekv.errors import CheckpointError
from edgekv.models.architecture import Architecture, WeightPart
from edgekv.types import F32


class LowRank(NamedTuple):
    """What is added to one part of a linear layer: ``up`` (rows, rank) times ``down`` (rank, columns)."""

    down: F32
    up: F32


Product = Callable[[F32, F32], F32]
"""(x (n, columns), weights (rows, columns)) -> x times the transpose of the weights (n, rows), float32."""

Changes = Mapping[str, tuple[LowRank, ...]]
"""By linear layer: what is added to each of its parts; of rank 0 where that is nothing."""


def add_changes(x: F32, y: F32, parts: tuple[LowRank, ...], multiply: Product) -> None:
    """Adds to y (n, rows), which is the linear layer of x (n, columns), what its parts' changes of x are."""
    row = 0
    for down, up in parts:
        end = row + len(up)
        if len(down):
            y[:, row:end] += multiply(multiply(x, down), up)
        row = end


def low_rank(arch: Architecture, deltas: Mapping[str, Delta]) -> dict[str, tuple[LowRank, ...]]:
    """A LoRA's changes, read. Raises CheckpointError where they are not finite, or are of experts."""
    for name, linear in arch.linears().items():
        if linear.n_experts and any(part.tensor in deltas for part in linear.parts):
            raise CheckpointError(
                f"the LoRA changes experts ({name}), which is not done beside the weights: make a store of both "
                "with `edgekv quantize` and it",
                field="lora",
            )
    return {
        name: tuple(_read(deltas[part.tensor]) if part.tensor in deltas else _none(part) for part in linear.parts)
        for name, linear in arch.linears().items()
        if any(part.tensor in deltas for part in linear.parts)
    }


def low_rank_bytes(arch: Architecture, deltas: Mapping[str, Delta]) -> int:
    """Of `low_rank`."""
    parts = (part for linear in arch.linears().values() for part in linear.parts if part.tensor in deltas)
    return 4 * sum(deltas[part.tensor].rank * (part.rows + part.columns) for part in parts)


def nbytes(changes: Changes) -> int:
    """Bytes of the matrices."""
    return sum(matrix.nbytes for parts in changes.values() for change in parts for matrix in change)


def _none(part: WeightPart) -> LowRank:
    return LowRank(np.zeros((0, part.columns), np.float32), np.zeros((part.rows, 0), np.float32))


def _read(delta: Delta) -> LowRank:
    a, b = delta.matrices()
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise CheckpointError(
            f"{delta.file.path}: {delta.b} is not finite with its factor; give a smaller scale, or another `lora`",
            field="lora",
        )
    return LowRank(np.ascontiguousarray(a), np.ascontiguousarray(b))
