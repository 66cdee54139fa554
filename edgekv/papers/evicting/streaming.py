"""StreamingLLM: the first few tokens, which soak up attention, and the latest ones."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from edgekv.errors import CacheError
from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.knobs import Knobs, share_of_context, tokens
from edgekv.papers.evicting import Evicting


@dataclasses.dataclass(frozen=True)
class StreamingKnobs(Knobs):
    """What `streaming` can be set to.

    budget: float, default 1024. Tokens kept: above 1 a number, up to 1 a fraction of the context.
    sink: int, default 4. First tokens of the context that stay, part of the budget.
    """

    scheme: ClassVar[str] = "streaming"

    budget: float = share_of_context(1024.0)
    sink: int = tokens(4)


class Streaming(Evicting):
    """Keeps the first ``sink`` tokens and a ring of the latest budget - sink: slots * (4 * head_dim + 4) bytes.

    StreamingLLM (Xiao et al. 2023). Deviation: keys keep the rotation of their original position; the paper
    rotates them anew by their place in the cache, so that positions never exceed the training length.
    """

    name = "streaming"
    paper = "StreamingLLM, FIER's baseline"
    summary = "the first 4 and the latest 1,020 tokens in f16"
    tradeoff = "everything said between the first tokens and the latest"
    Knobs = StreamingKnobs

    def __init__(self, geometry: Geometry, knobs: StreamingKnobs) -> None:
        super().__init__(geometry, knobs)
        if self.evicts and self.slots <= knobs.sink:
            raise CacheError(
                f"kv='streaming:budget={knobs.budget:g}' is {self.slots} of {geometry.capacity} tokens, all taken "
                f"by sink={knobs.sink}: raise the budget above it",
                field="kv",
                value=f"streaming:budget={knobs.budget:g}",
            )

    def _make_room(self) -> None:
        sink, slot = self.knobs.sink, self.n_seen
        if slot >= self.slots:
            slot = sink + (slot - sink) % (self.slots - sink)
        self._target.fill(slot)
        self.n_used = max(self.n_used, slot + 1)

    def rollback_tokens(self) -> int:
        """Until the ring is full."""
        return max(0, self.slots - self.n_seen)

    def truncate(self, n: int, again: int = 0) -> int:
        """In place as long as nothing has been dropped; else back to the start."""
        if n < self.n_seen:
            self.n_used = self.n_seen = n if self.n_seen <= self.slots else 0
        return self.n_seen
