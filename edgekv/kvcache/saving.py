"""What a session keeps of a cache, and what a cache takes from a file, which may lie."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from edgekv.types import Array


@dataclasses.dataclass(frozen=True)
class CacheState:
    """All that one layer's next token depends on; ``counters`` and ``fitted`` are ready for JSON."""

    counters: dict[str, int]
    fitted: dict[str, Any]
    arrays: dict[str, Array]


class Saving(abc.ABC):
    """The part of `LayerState` that saves and restores. Callers use `state` and `prepare`, then `readable`.

    A scheme says with `consistent` which counters can be; what it decides beside counters and arrays it gives in
    `fitted` and takes in `load_fitted`; where arrays hold places, lengths or the like, `readable` checks them.
    """

    n_seen: int
    arrays: dict[str, Array]
    former_counters: ClassVar[dict[str, str]] = {}
    """Present names of counters by those in files of before."""

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """Tokens that it has room for."""

    def state(self) -> CacheState:
        """What a cache of the same scheme, knobs and geometry needs to go on from here; arrays are not copied."""
        counters = {name: int(value) for name, value in vars(self).items() if name.startswith("n_")}
        return CacheState(counters, self.fitted(), self.arrays)

    def renamed(self, counters: Mapping[str, Any]) -> dict[str, Any]:
        """A file's counters by their present names."""
        if counters.keys() == self.state().counters.keys():
            return dict(counters)
        return {self.former_counters.get(name, name): n for name, n in counters.items()}

    def prepare(self, counters: Mapping[str, int], fitted: Mapping[str, Any]) -> dict[str, Array]:
        """Takes a state's counters and fitted values into the just allocated cache.

        Returns the arrays, zero where nothing is written yet, to be filled with the state's. Raises ValueError for
        counters that contradict each other, and for fitted values that no conversation has.
        """
        vars(self).update(counters)
        if not self.consistent():
            raise ValueError(f"counters {dict(counters)}")
        self.load_fitted(fitted)
        return self.arrays

    def consistent(self) -> bool:
        """Whether the counters agree with each other and with the geometry: those of a file may lie."""
        return 0 <= self.n_seen <= self.capacity

    def readable(self) -> bool:
        """Whether arrays that were filled from a file hold nothing that would lead a kernel out of bounds."""
        return True

    def fitted(self) -> dict[str, Any]:
        """What the conversation decided beside counters and arrays, ready for JSON. Most schemes fit nothing."""
        return {}

    def load_fitted(self, fitted: Mapping[str, Any]) -> None:
        """Takes what `fitted` gave; afterwards `arrays` have the shapes that they had then."""
        return
