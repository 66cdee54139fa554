"""Watts and joules of the answers, where this machine has a meter."""

from __future__ import annotations

import time
from collections.abc import Callable

from edgekv.errors import PowerError
from edgekv.power.sampler import PowerSampler
from edgekv.power.source import PowerSource


class ServerEnergy:
    """Meters one answer at a time with a source of its own: samples of a day would not stay in memory."""

    def __init__(self, source: PowerSource | None) -> None:
        self.estimated = source is not None and source.about().estimate
        self._open: Callable[[], PowerSource | None] = lambda: source
        if isinstance(source, PowerSampler):
            self._open = lambda: PowerSampler(source.meter, notes=source.notes)

    def begin(self) -> AnswerMeter:
        """Starts to meter an answer."""
        return AnswerMeter(self._open())


class AnswerMeter:
    """From its making to `end`."""

    def __init__(self, source: PowerSource | None) -> None:
        self._source = source
        if source:
            source.start()
        self._begun_s = time.perf_counter()

    def end(self) -> tuple[float | None, float | None]:
        """Joules and average watts since the beginning; None: not measured."""
        if self._source is None:
            return None, None
        ended_s = time.perf_counter()
        self._source.mark()
        self._source.stop()
        try:
            window = self._source.window(self._begun_s, ended_s)
        except PowerError:
            return None, None
        return window.joules, window.average_w
