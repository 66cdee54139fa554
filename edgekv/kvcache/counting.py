"""How many bytes and tokens a cache has: planned, allocated, read at each step."""

from __future__ import annotations

import abc

from edgekv.kvcache.geometry import Layout, layout_bytes
from edgekv.types import Array


class Counting(abc.ABC):
    """The part of `LayerState` that the plan and the report read. A scheme must say `layout` and `bytes_read`."""

    n_seen: int
    arrays: dict[str, Array]

    @abc.abstractmethod
    def layout(self) -> Layout:
        """Every array that is kept; nothing else grows with the context."""

    @abc.abstractmethod
    def bytes_read(self) -> int:
        """Bytes that one more token must touch at the present length."""

    def cut(self, n_tokens: int) -> Counting:
        """As large as the first ``n_tokens``, 1 or more, need, and not allocated: to count bytes.

        Budgets that are fractions of the context, and images, are as they are here. What has one size stays.
        """
        return self

    def planned_bytes(self, n_tokens: int | None = None) -> int:
        """Bytes that ``n_tokens`` take, no room for more of them set aside; None: those that `allocate` takes."""
        return layout_bytes((self if n_tokens is None else self.cut(n_tokens)).layout())

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def visual_bytes(self) -> int | None:
        """Bytes that hold the spans that `mark_images` named; None: the scheme does not keep these apart."""
        return None

    @property
    def n_kept(self) -> int:
        """Tokens that a query can still reach."""
        return self.n_seen
