"""What a cache is laid out for: the sizes of a layer's attention, the arrays that follow, and scratch memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from edgekv.kernels import aligned
from edgekv.kernels.memory import Memory
from edgekv.types import Array

Layout = dict[str, tuple[tuple[int, ...], str]]  # array name -> (shape, dtype)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """One layer's attention: heads, sizes, how many tokens it must hold, and its sliding window (None: all).

    score_cap: the soft bound of its scores (None: none), for schemes that can apply one. context: the tokens that
    budgets are fractions of, where ``capacity`` holds fewer of them; else 0.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    capacity: int
    layer: int = 0
    n_layers: int = 1
    sliding_window: int | None = None
    score_cap: float | None = None
    context: int = 0

    def cut(self, n_tokens: int) -> Geometry:
        """For the first ``n_tokens`` of such a layer."""
        return dataclasses.replace(self, capacity=n_tokens, context=self.context or self.capacity)

    @property
    def n_rep(self) -> int:
        """Query heads that share one key-value head."""
        return self.n_heads // self.n_kv_heads


EXAMPLE = Geometry(n_heads=1, n_kv_heads=1, head_dim=128, capacity=1 << 16)


def layout_bytes(layout: Layout) -> int:
    """Bytes of all its arrays."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout.values())


class Workspace:
    """Scratch buffers by name, grown when needed and shared by all layers of a session; in ``memory``."""

    def __init__(self, memory: Memory = aligned) -> None:
        self.memory = memory
        self._buffers: dict[str, Array] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """A C-contiguous array of the shape, contents undefined, valid until the name is asked for again."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = self.memory.empty((size,), dtype)
        return buffer[:size].reshape(shape)

    def buffers(self) -> list[Array]:
        """All of them."""
        return list(self._buffers.values())
