"""What happens when a conversation outgrows its context: one entry per way; --overflow reads CONTEXT_SHIFTS."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

from edgekv.errors import ConfigError, unknown

SINK = 4  # first tokens, on which attention rests (StreamingLLM)


class ContextShift(abc.ABC):
    """Chooses which tokens stay; those are computed again from position 0, so that positions fit any scheme.

    summary: what it does, in a line. makes_room: whether a conversation can go on when the context is full.
    """

    summary: ClassVar[str]
    makes_room: ClassVar[bool]

    @abc.abstractmethod
    def kept(self, n: int, room: int, first: int = 0) -> list[int] | None:
        """Of n tokens, which are too many, the positions of at most ``room``; None: nothing can be done.

        first: so many at the beginning stay, where they leave a quarter of the room.
        """


class Stop(ContextShift):
    """Nothing goes: the text ends, and a longer prompt is refused."""

    summary = "end the text at the context's last token, and refuse a longer prompt"
    makes_room = False

    def kept(self, n: int, room: int, first: int = 0) -> None:
        return None


@dataclasses.dataclass
class Slide(ContextShift):
    """``sink`` first tokens and the latest ones stay, the oldest between them go."""

    summary = "keep the first tokens and the latest, drop the oldest between them"
    makes_room = True

    sink: int = SINK

    def kept(self, n: int, room: int, first: int = 0) -> list[int]:
        sink = max(min(self.sink, room // 2), first if first <= room * 3 // 4 else 0)
        return [*range(sink), *range(n - (room - sink), n)]


CONTEXT_SHIFTS: dict[str, type[ContextShift]] = {"stop": Stop, "slide": Slide}


def find_context_shift(name: str) -> ContextShift:
    """What ``overflow=name`` asks for. Raises ConfigError (field overflow)."""
    if name not in CONTEXT_SHIFTS:
        raise unknown(ConfigError, "overflow", name, CONTEXT_SHIFTS)
    return CONTEXT_SHIFTS[name]()
