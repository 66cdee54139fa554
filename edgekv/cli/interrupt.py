"""Ctrl-C between two steps: it sets a flag that is asked for, instead of raising in the middle of one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is to end a command as Ctrl-C does."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Inside the block SIGTERM raises Terminated."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Interrupt:
    """Inside the block the first Ctrl-C sets `requested`; a second one raises KeyboardInterrupt as usual.

    A step that is torn in two leaves some layers a token ahead, which costs some schemes their whole cache.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        self.requested = False
        self._before: Any = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def check(self, *progress: object) -> None:
        """Raises KeyboardInterrupt if it was requested: between the layers of a prompt."""
        if self.requested:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.check()
        self.requested = True
