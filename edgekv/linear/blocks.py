"""What a backend of the linear layers computes: the three blocks of an `Architecture`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from edgekv.kernels.cpu.products import FEW_ROWS
from edgekv.linear.low_rank import Changes
from edgekv.types import F32, Threads

ALIKE_ROWS = FEW_ROWS
"""Rows of a call, at most, of which the CPU's backend makes what it makes of each alone, to the bit."""


class LinearBlocks(Protocol):
    """Activations are float32 (n, channels), on the host or on the backend's device.

    weights_bytes: of all weights that it reads. changes_bytes: the part of low-rank changes. threads: those of its
    products, where it has own ones.
    """

    weights_bytes: int
    changes_bytes: int = 0
    threads: Threads | None = None

    def with_changes(self, changes: Changes) -> LinearBlocks:
        """The same weights with low-rank changes beside them. ConfigError where the backend knows none."""

    def attention_in(self, i: int, x: F32) -> F32:
        """x (n, hidden) before layer i -> `Architecture.attention_in`: queries, keys and values, as a rule."""

    def attention_out(self, i: int, x: F32, attention: F32) -> F32:
        """Residual x and attention (n, n_heads * head_dim) of layer i -> the next layer's x (n, hidden).

        In place of attention what the layer has instead.

        x may be changed.
        """

    def warm_up(self) -> list[Callable[[], object]]:
        """What is to be called so that all kernels are compiled."""
        return []

    def head(self, x: F32) -> F32:
        """x (n, hidden) of the last layer -> logits (n, vocab)."""
