"""Whether a session's text is still being generated."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator

from edgekv.errors import SessionError
from edgekv.session.generation import Step

StepIterator = Generator[Step, None, None]


class Running:
    """The iterator that was given out last, which its caller may exhaust, close or drop."""

    def __init__(self) -> None:
        self._steps: weakref.ref[StepIterator] | None = None

    def begin(self, steps: StepIterator) -> StepIterator:
        """Remembers an iterator; returns it."""
        self._steps = weakref.ref(steps)
        return steps

    def require_none(self) -> None:
        """Raises SessionError while the iterator can still be asked for a token."""
        if self._current() is not None:
            raise SessionError("this session is generating a text: exhaust or close its iterator first")

    def close(self) -> None:
        """Ends the text."""
        steps = self._current()
        if steps is not None:
            steps.close()

    def _current(self) -> StepIterator | None:
        steps = self._steps and self._steps()
        return steps if steps and inspect.getgeneratorstate(steps) != inspect.GEN_CLOSED else None
