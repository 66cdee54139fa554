"""Meters the phases of a run: idle before it, then each named phase, apart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType

from edgekv.errors import PowerError
from edgekv.power import conditions
from edgekv.power.base import Clock, Root, Throttle
from edgekv.power.report import EnergyReport, Idle, PhaseEnergy
from edgekv.power.source import PowerSource

IDLE_S = 5.0


class Phase:
    """One phase: when it ran (it may run several times), and how many tokens it made."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []
        self.tokens = 0

    @property
    def seconds(self) -> float:
        """How long it ran in all."""
        return sum(end - start for start, end in self.spans)


class NoMeter:
    """Stands where an EnergyMeter would, when nobody asked for one."""

    def __enter__(self) -> NoMeter:
        return self

    def __exit__(self, *error: object) -> None:
        return

    @contextlib.contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[Phase]:
        """Counts nothing."""
        yield Phase()

    def report(self) -> None:
        """None: nothing was measured."""
        return


class EnergyMeter:
    """Energy by phase from any source:

        with EnergyMeter(PowerSampler(find_meter()[0])) as meter:
            with meter.phase("prefill", tokens=512):
                ...
            with meter.phase("decode") as phase:
                phase.tokens += 1
        report = meter.report()

    Entering it starts the source and waits ``idle_s`` to see what the machine draws at rest (0: not).
    """

    def __init__(
        self, source: PowerSource, *, idle_s: float = IDLE_S, root: Root = "/", clock: Clock = time.perf_counter
    ) -> None:
        if not 0 <= idle_s <= 3600:
            raise PowerError(f"idle time {idle_s} s: accepted: 0 (none) to 3600")
        self._source, self._idle_s, self._root, self._clock = source, idle_s, root, clock
        self._idle_span: tuple[float, float] | None = None
        self._phases: dict[str, Phase] = {}
        self._before: Throttle | None = None
        self._after: Throttle | None = None

    def __enter__(self) -> EnergyMeter:
        self._before = self._throttle()
        self._source.start()
        if self._source.has_idle and self._idle_s:
            begun_s = self._clock()
            time.sleep(self._idle_s)
            self._idle_span = begun_s, self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._source.stop()
        self._after = self._throttle()

    @contextlib.contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[Phase]:
        """What runs inside is the phase ``name``; under a name that was used before it is added to it."""
        phase = self._phases.setdefault(name, Phase())
        phase.tokens += tokens
        self._source.mark()
        begun_s = self._clock()
        try:
            yield phase
        finally:
            phase.spans.append((begun_s, self._clock()))
            self._source.mark()

    def report(self) -> EnergyReport:
        """After the block."""
        idle = self._idle()
        return EnergyReport(
            about=self._source.about(),
            idle=idle,
            phases={name: self._measured(phase, idle) for name, phase in self._phases.items()},
            throttling=conditions.throttled_between(self._before, self._after),
        )

    def _measured(self, phase: Phase, idle: Idle | None) -> PhaseEnergy:
        tokens = phase.tokens or None
        try:
            windows = [self._source.window(*span) for span in phase.spans]
        except PowerError as error:
            return PhaseEnergy(tokens, phase.seconds, len(phase.spans), reason=str(error))
        return PhaseEnergy.of(windows, tokens, idle, self._source.about().correction)

    def _idle(self) -> Idle | None:
        if self._idle_span is None:
            return None
        try:
            window = self._source.window(*self._idle_span)
        except PowerError:
            return None
        return Idle(window.average_w, window.spread_w or 0.0, window.seconds)

    def _throttle(self) -> Throttle | None:
        system, own = conditions.throttle(self._root), self._source.throttle()
        if system is None or own is None:
            return system if own is None else own
        return system | own
