"""What happens when a conversation outgrows its context: one entry per way; --overflow reads OVERFLOWS."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

from edgekv.errors import ConfigError

SINK = 4  # first tokens, on which attention rests (StreamingLLM)


class Overflow(abc.ABC):
    """Chooses which tokens stay; those are computed again from position 0, so that positions fit any scheme."""

    summary: ClassVar[str]
    makes_room: ClassVar[bool]

    @abc.abstractmethod
    def kept(self, n: int, room: int) -> list[int] | None:
        """Of n tokens, which are too many, the positions of at most ``room``; None: nothing can be done."""


class Stop(Overflow):
    summary = "end the text at the context's last token, and refuse a longer prompt"
    makes_room = False

    def kept(self, n: int, room: int) -> None:
        return None


@dataclasses.dataclass
class Slide(Overflow):
    """``sink`` first tokens and the latest ones stay, the oldest between them go."""

    summary = "keep the first tokens and the latest, drop the oldest between them"
    makes_room = True

    sink: int = SINK

    def kept(self, n: int, room: int) -> list[int]:
        sink = min(self.sink, room // 2)
        return [*range(sink), *range(n - (room - sink), n)]


OVERFLOWS: dict[str, type[Overflow]] = {"stop": Stop, "slide": Slide}


def find_overflow(name: str) -> Overflow:
    if name not in OVERFLOWS:
        raise ConfigError(f"--overflow {name!r} is unknown; accepted: {', '.join(OVERFLOWS)}")
    return OVERFLOWS[name]()
