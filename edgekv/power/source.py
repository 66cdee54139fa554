"""Where a run's energy comes from: a sensor that is sampled, a meter's log, an estimate, or nowhere."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from edgekv.errors import PowerError
from edgekv.power.base import Correction, Throttle
from edgekv.power.trace import Window


@dataclasses.dataclass(frozen=True)
class MeterInfo:
    """What a reader of the figures must know of their source.

    meter: None where nothing can be measured. total: the rails that were added up. cpu_share: processor time of
    readings between the edges of phases, as a share of one core. losses: lost samples by reason.
    """

    meter: str | None
    covers: str = ""
    estimate: bool = False
    rails: tuple[str, ...] = ()
    total: tuple[str, ...] = ()
    correction: Correction | None = None
    cpu_share: float | None = None
    losses: dict[str, int] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


class PowerSource(Protocol):
    """Started before what it meters and stopped after it; times are those of `time.perf_counter`."""

    has_idle: bool  # whether waiting before the run shows what the machine draws at rest

    def start(self) -> None:
        """What is metered begins."""

    def stop(self) -> None:
        """It has ended."""

    def mark(self) -> None:
        """Called where a phase begins or ends: a sensor is read here."""

    def window(self, start_s: float, end_s: float) -> Window:
        """After `stop`. Raises PowerError saying why nothing is known."""

    def about(self) -> MeterInfo:
        """What it measures with."""

    def throttle(self) -> Throttle | None:
        """Limits on the clocks that are in force; None: not known."""


class Unmetered(PowerSource):
    """No meter: everything is n/a, for a reason."""

    has_idle = False

    def __init__(self, why: str) -> None:
        self._why = why

    def start(self) -> None:
        return

    def stop(self) -> None:
        return

    def mark(self) -> None:
        return

    def window(self, start_s: float, end_s: float) -> Window:
        raise PowerError(self._why)

    def about(self) -> MeterInfo:
        return MeterInfo(meter=None)

    def throttle(self) -> Throttle | None:
        return None


class Estimate(Unmetered):
    """A power that the user states: energy is it times the seconds, and is called an estimate everywhere."""

    def __init__(self, watts: float) -> None:
        if not 0 < watts < 1e5:
            raise PowerError(f"--power-estimate {watts}: accepted: the watts that the machine draws, more than 0")
        self._watts = watts

    def window(self, start_s: float, end_s: float) -> Window:
        seconds = end_s - start_s
        return Window(seconds=seconds, joules=self._watts * seconds, error_j=None, average_w=self._watts)

    def about(self) -> MeterInfo:
        return MeterInfo(meter="estimate", covers=f"a stated {self._watts:g} W, not measured", estimate=True)
