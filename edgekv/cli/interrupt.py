"""Ctrl-C between two steps: it sets a flag that is asked for, instead of raising in the middle of one."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


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
