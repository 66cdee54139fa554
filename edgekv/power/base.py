"""What a power meter is: rails read together, and which of them add up to the total without counting twice."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

from edgekv.errors import PowerError

Root = str | os.PathLike[str]
Clock = Callable[[], float]

LEAST_RAIL_W, MOST_RAIL_W = -10.0, 10_000.0  # an idle shunt may read a little below 0; beyond these it is garbage
READ_ATTEMPTS = 3  # a sensor that answers EIO now and then is still a sensor


class MeterAbsent(PowerError):
    """This kind of sensor is not on this machine."""


class MeterRefused(PowerError):
    """The sensor is here and can't be read; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """One look at a sensor: watts, or joules since some fixed moment, or both, of each rail that answered.

    Raises ValueError for watts that no rail can carry.
    """

    power_w: Mapping[str, float] = dataclasses.field(default_factory=dict)
    energy_j: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for rail, watts in self.power_w.items():
            if not LEAST_RAIL_W <= watts <= MOST_RAIL_W:  # NaN too
                raise ValueError(f"{rail} reads {watts} W")


@dataclasses.dataclass(frozen=True)
class Correction:
    """watts = slope * total + offset_w: what the rails leave out, fitted by somebody with a wall meter."""

    name: str
    slope: float
    offset_w: float
    source: str

    def __str__(self) -> str:
        return f"{self.name} = {self.slope} x sum + {self.offset_w} W ({self.source})"

    def joules(self, joules: float, seconds: float) -> float:
        """Corrected joules of a sum over so many seconds."""
        return self.slope * joules + self.offset_w * seconds


@dataclasses.dataclass(frozen=True)
class Throttle:
    """Limits on the clocks: those in force, and how often each was met so far (since boot, or a sticky 0 or 1)."""

    now: frozenset[str] = frozenset()
    ever: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __or__(self, other: Throttle) -> Throttle:
        return Throttle(self.now | other.now, {**self.ever, **other.ever})


class PowerMeter(abc.ABC):
    """One kind of sensor, found by `probe`, read by `read`.

    rails: every rail it reads; total: those whose sum is the total, none of them part of another. covers: what the
    total includes and leaves out. sees: the devices ("cpu", "gpu") whose work shows in it. max_hz: how often
    reading it makes sense. tick_s: how old an energy counter's value can be.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    covers: ClassVar[str]
    sees: ClassVar[frozenset[str]] = frozenset({"cpu", "gpu"})
    max_hz: ClassVar[float] = 100.0
    tick_s: ClassVar[float] = 0.0
    correction: ClassVar[Correction | None] = None

    rails: tuple[str, ...]
    total: tuple[str, ...]

    @classmethod
    @abc.abstractmethod
    def probe(cls, root: Root = "/") -> PowerMeter:
        """The machine's sensor, after one reading of it. ``root`` is the folder that holds `sys`.

        Raises MeterAbsent, or MeterRefused where it is there and does not answer.
        """

    @abc.abstractmethod
    def read(self) -> Reading:
        """The rails now; all of `total` are in it. Raises OSError or ValueError: this sample is lost."""

    def read_edge(self) -> Reading:
        """`read` where a phase begins or ends: everything, even what is too expensive to be read each time."""
        return self.read()

    def throttle(self) -> Throttle | None:
        """The clock limits that this sensor itself reports; None: it reports none."""
        return None


def read_rails(sources: Mapping[str, Callable[[], float]], total: Iterable[str]) -> dict[str, float]:
    """Reads every rail. One outside ``total`` may fail and is left out; one of ``total`` raises its error."""
    values = {rail: sources[rail]() for rail in total}
    for rail in sources.keys() - values.keys():
        with contextlib.suppress(OSError, ValueError):
            values[rail] = sources[rail]()
    return values


def try_reading(meter: PowerMeter, remedy: str) -> None:
    """Raises MeterRefused if none of a few readings of the meter succeeds."""
    problems: list[Exception] = []
    while len(problems) < READ_ATTEMPTS:
        problem = _reading_problem(meter)
        if problem is None:
            return
        problems.append(problem)
    raise MeterRefused(f"{meter.name} is here but can't be read ({reason(problems[-1])}): {remedy}")


def _reading_problem(meter: PowerMeter) -> Exception | None:
    try:
        meter.read()
    except (OSError, ValueError) as error:
        return error
    return None


def reason(error: Exception) -> str:
    """An error in a few words, without the path that an OSError repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


class EnergyCounter:
    """Joules since the first reading, from an energy counter that wraps around at ``range_j``.

    A step that would need more than ``most_w`` is garbage and raises ValueError: the next good value continues
    from the last. After several in a row the counter was restarted and nothing more is known.
    """

    def __init__(
        self, range_j: float = math.inf, most_w: float = 5000.0, clock: Clock = time.perf_counter
    ) -> None:
        self._range_j, self._most_w, self._clock = range_j, most_w, clock
        self._last: tuple[float, float] | None = None  # time, raw joules
        self._joules = 0.0
        self._rejected = 0

    def advance(self, raw_j: float) -> float:
        """Joules so far, given what the counter shows now."""
        now = self._clock()
        if self._last is None:
            self._last = now, raw_j
            return 0.0
        step = raw_j - self._last[1]
        if step < 0:
            step += self._range_j
        # A counter ticks about once a millisecond, so the last value may be older than its reading.
        if self._rejected > 10 or not 0 <= step <= self._most_w * (now - self._last[0] + 0.1):
            self._rejected += 1
            raise ValueError(f"the energy counter jumped from {self._last[1]} to {raw_j} J")
        self._last, self._rejected = (now, raw_j), 0
        self._joules += step
        return self._joules
