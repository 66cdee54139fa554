"""What one layer keeps of the tokens so far: keys and values (`KVCache`), or a `RecurrentState`."""

from __future__ import annotations

from collections.abc import Sequence

from edgekv.errors import CacheError
from edgekv.kernels import Kernels
from edgekv.kvcache.counting import Counting
from edgekv.kvcache.geometry import Workspace
from edgekv.kvcache.rewinding import Rewinding
from edgekv.kvcache.saving import Saving
from edgekv.types import Array


class LayerState(Counting, Rewinding, Saving):
    """What a session needs of every layer, whether it attends or not.

    Its bytes (counting.py), going back (rewinding.py), saving (saving.py), and its memory, which is taken once.
    """

    def __init__(self) -> None:
        self.n_seen = 0  # tokens appended so far
        self.arrays: dict[str, Array] = {}

    def notes(self) -> list[str]:
        """What the user must know about this run's cache, one line each."""
        return []

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        """Takes the memory; the pages are touched as tokens arrive."""
        self.kernels, self.workspace = kernels, workspace
        zeros = workspace.memory.zeros
        self.arrays = {name: zeros(shape, dtype) for name, (shape, dtype) in self.layout().items()}

    def mark_images(self, spans: Sequence[tuple[int, int]]) -> None:
        """Says which tokens of the coming prompt stand for images: ranges (first, last + 1) from its start on.

        Called on every layer before a prompt. Most treat all tokens alike.
        """
        return

    def require_room(self, n: int) -> None:
        """Raises CacheError (field ctx) where n more tokens do not fit."""
        if self.n_seen + n > self.capacity:
            raise CacheError(
                f"the cache holds {self.n_seen} of {self.capacity} tokens, {n} more do not fit; raise `ctx`",
                field="ctx",
                value=self.capacity,
                accepted=[f"{self.n_seen + n} or more"],
            )
