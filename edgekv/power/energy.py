"""Joules of a run's phases from samples of power and energy counters, each with a bound on what they leave open.

Between two samples power is taken as a straight line (the trapezoid rule). The bound: a power that moves from one
sample's value to the next in any way, without leaving the range between them, can't differ by more. Across a gap,
and beyond the first or last sample, the range is that of all samples. The sensor's own error comes on top.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import datetime
import math
import os
import pathlib
import re
import resource
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from edgekv.checks import short_repr
from edgekv.errors import PowerError
from edgekv.files import read_regular, user_path
from edgekv.power import meters
from edgekv.power.meters import Clock, Correction, PowerMeter, Reading, Root, Throttle, all_limits, reason
from edgekv.types import F64

MIN_SAMPLES = 2  # of power within a window; with fewer nothing in it was seen
GOOD_ERROR = 0.1  # of a counter's joules: up to this it is preferred to the samples of power
MOST_ERROR = 0.5  # of a counter's joules, where there are fewer; beyond that it did not see the window either
GAP_PERIODS = 3.0  # an interval longer than this many typical ones is a gap
IDLE_S = 5.0  # at rest before a run


@dataclasses.dataclass(frozen=True)
class Integral:
    """``joules`` within plus or minus ``error_j``."""

    joules: float
    error_j: float


def integrate_power(times_s: F64, watts: F64, start_s: float, end_s: float, gap_s: float) -> Integral:
    """Apply the trapezoid rule over start..end; times (n,) ascending, watts (n,), n >= 1.

    Intervals longer than ``gap_s`` are gaps.
    """
    t = np.concatenate([[min(start_s, times_s[0])], times_s, [max(end_s, times_s[-1])]])
    p = np.concatenate([watts[:1], watts, watts[-1:]])
    left, right = np.clip(t[:-1], start_s, end_s), np.clip(t[1:], start_s, end_s)
    width, length = right - left, np.diff(t)
    slope = np.divide(np.diff(p), length, out=np.zeros_like(length), where=length > 0)
    mean = p[:-1] + slope * ((left + right) / 2 - t[:-1])
    low, high = np.minimum(p[:-1], p[1:]), np.maximum(p[:-1], p[1:])
    unseen = length > gap_s
    unseen[[0, -1]] = True
    low, high = np.where(unseen, watts.min(), low), np.where(unseen, watts.max(), high)
    error = width * np.maximum(high - mean, mean - low)
    return Integral(float(width @ mean), float(error.sum()))


def integrate_counter(
    times_s: F64, joules: F64, start_s: float, end_s: float, most_w: float = 0.0, stale_j: float = 0.0
) -> Integral:
    """Return an energy counter's rise over start..end; times (n,) ascending, joules (n,) never falling, n >= 2.

    Only the two ends are open: the counter does not say when, between two readings, energy was spent. It was never
    at more than ``most_w``, the largest power sampled, or the largest mean between readings. ``stale_j``: what the
    counter's values at the two ends may not contain yet. Readings that equal the one before show a counter that
    had not ticked yet, and are left out. Raises PowerError if none ever rises.
    """
    ticked = np.concatenate([[True], np.diff(joules) > 0])
    t, e = times_s[ticked], joules[ticked]
    if len(t) < 2:
        raise PowerError("the energy counter did not move")
    rise, length = np.diff(e), np.diff(t)
    power = rise / length
    most_w = max(most_w, float(power.max()))
    width = np.clip(t[1:], start_s, end_s) - np.clip(t[:-1], start_s, end_s)
    inner = rise * width / length
    least, most = np.maximum(0.0, rise - most_w * (length - width)), np.minimum(rise, most_w * width)
    total, error = float(inner.sum()), float(np.maximum(most - inner, inner - least).sum()) + stale_j
    for seconds, nearest_w in ((max(0.0, t[0] - start_s), power[0]), (max(0.0, end_s - t[-1]), power[-1])):
        total += seconds * float(nearest_w)  # no reading covers it: any power that occurred
        error += seconds * float(max(power.max() - nearest_w, nearest_w - power.min()))
    return Integral(total, error)


def _better(counter: Integral | None, trapezoid: Integral | None) -> Integral | None:
    """Prefer the counter's wherever it is good: it misses nothing between samples, and has no sensor's delay."""
    if counter is not None and counter.error_j <= GOOD_ERROR * counter.joules:
        return counter
    known = [integral for integral in (counter, trapezoid) if integral is not None]
    return min(known, key=lambda integral: integral.error_j, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Energy between two moments; None is "not measured".

    joules: the energy counter's, or the trapezoid rule's where that is known better; counter_j and integrated_j:
    both, where the meter gives both. error_j bounds what the samples leave open. spread_w: standard deviation of
    the samples' watts. gap_s, the total, and longest_gap_s are of intervals without samples; rails_j has the rails
    that were read throughout.
    """

    seconds: float
    joules: float
    average_w: float
    error_j: float | None = None
    peak_w: float | None = None
    spread_w: float | None = None
    n_samples: int | None = None
    rate_hz: float | None = None
    gap_s: float | None = None
    longest_gap_s: float | None = None
    counter_j: float | None = None
    integrated_j: float | None = None
    rails_j: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Trace:
    """Samples of a meter: times (n,) in seconds, power and energy (n, n_rails), NaN where a rail did not answer.

    total: the rails that add up to the total; tick_s: how old an energy counter's value can be; losses: lost
    samples by reason; cpu_share: processor time of the samples between marks, as a share of one core.
    """

    times_s: F64
    power_w: F64
    energy_j: F64
    rails: tuple[str, ...]
    total: tuple[str, ...]
    tick_s: float = 0.0
    losses: Mapping[str, int] = dataclasses.field(default_factory=dict)
    cpu_share: float | None = None

    @property
    def gap_s(self) -> float:
        """From this length on an interval is a gap."""
        return GAP_PERIODS * float(np.median(np.diff(self.times_s))) if len(self.times_s) > 1 else 0.0

    def watts(self, rails: tuple[str, ...] | None = None) -> F64:
        """Return the power (n,) of the rails (default: the total's) at each sample.

        From counters: the mean since the sample before (the first: until the next).
        """
        power = self._sum(self.power_w, rails or self.total)
        if np.isfinite(power).any() or len(self.times_s) < 2:
            return power
        mean = np.diff(self._sum(self.energy_j, rails or self.total)) / np.diff(self.times_s)
        return np.concatenate([mean[:1], mean])

    def window(self, start_s: float, end_s: float) -> Window:
        """Return the energy of start..end, on ``times_s``'s clock. Raises PowerError where too little was seen."""
        inside = (self.times_s >= start_s) & (self.times_s <= end_s)
        n, seconds, watts = int(inside.sum()), end_s - start_s, self.watts()[inside]
        counter, trapezoid = self._integrals(self.total, start_s, end_s)
        if n < MIN_SAMPLES:
            trapezoid = None
            counter = counter if counter and counter.error_j <= MOST_ERROR * counter.joules else None
        best = _better(counter, trapezoid)
        if best is None:
            lost = ", ".join(f"{count} x {why}" for why, count in self.losses.items())
            why = f"; lost: {lost}" if lost else ": too short for this meter"
            raise PowerError(f"{n} samples in {seconds:.3g} s{why}")
        gaps = np.diff(np.concatenate([[start_s], self.times_s[inside], [end_s]]))
        gaps = gaps[gaps > self.gap_s]
        return Window(
            seconds=seconds,
            joules=best.joules,
            error_j=best.error_j,
            average_w=best.joules / seconds,
            peak_w=float(np.nanmax(watts)) if n else None,
            spread_w=float(np.nanstd(watts)) if n else None,
            n_samples=n,
            rate_hz=n / seconds,
            gap_s=float(gaps.sum()),
            longest_gap_s=float(gaps.max(initial=0.0)),
            counter_j=None if counter is None else counter.joules,
            integrated_j=None if trapezoid is None else trapezoid.joules,
            rails_j=self._rails(start_s, end_s, inside),
        )

    def _integrals(
        self, rails: tuple[str, ...], start_s: float, end_s: float
    ) -> tuple[Integral | None, Integral | None]:
        """Integrate by the energy counter, and by the trapezoid rule."""
        power, energy = self._sum(self.power_w, rails), self._sum(self.energy_j, rails)
        seen, counted = np.isfinite(power), np.isfinite(energy)
        counter = trapezoid = None
        if seen.any():
            trapezoid = integrate_power(self.times_s[seen], power[seen], start_s, end_s, self.gap_s)
        if counted.sum() > 1:
            most_w = float(power[seen].max(initial=0.0))
            stale_j = self.tick_s * sum(self._most_before(rails, edge_s) for edge_s in (start_s, end_s))
            counter = integrate_counter(self.times_s[counted], energy[counted], start_s, end_s, most_w, stale_j)
        return counter, trapezoid

    def _most_before(self, rails: tuple[str, ...], edge_s: float) -> float:
        """Return the largest power seen about one tick of the counter before a moment."""
        watts, around = self.watts(rails), self.tick_s + self.gap_s
        near = np.isfinite(watts) & (self.times_s >= edge_s - around) & (self.times_s <= edge_s + self.gap_s)
        return float(watts[near].max()) if near.any() else float(np.nanmax(watts))

    def _rails(self, start_s: float, end_s: float, inside: npt.NDArray[np.bool_]) -> dict[str, float]:
        """Return the joules of each rail with a value in every sample; ``inside`` (n,)."""
        always = np.all(np.isfinite(self.power_w[inside]) | np.isfinite(self.energy_j[inside]), axis=0)
        known = [rail for rail, is_known in zip(self.rails, always, strict=True) if is_known]
        found = {rail: _better(*self._integrals((rail,), start_s, end_s)) for rail in known}
        return {rail: best.joules for rail, best in found.items() if best is not None}

    def _sum(self, values: F64, rails: tuple[str, ...]) -> F64:
        """Add up values (n, n_rails) to (n,); NaN where one of the rails did not answer."""
        total: F64 = values[:, [self.rails.index(rail) for rail in rails]].sum(axis=1)
        return total


@dataclasses.dataclass(frozen=True)
class MeterInfo:
    """What a reader of the figures must know of their source.

    meter: None where nothing can be measured, and ``covers`` says why. total: the rails that were added up.
    cpu_share: processor time of readings between the edges of phases, as a share of one core. losses: lost samples
    by reason.
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


class PowerSource:
    """A sensor that is sampled, a meter's log, an estimate; or, as it is here, nothing, for a reason.

    Times are those of `time.perf_counter`. It is started before what it meters and stopped after it. has_idle:
    waiting before the run shows what the machine draws at rest.
    """

    has_idle = False

    def __init__(self, why: str) -> None:
        self._why = why

    def start(self) -> None:
        """Begin to meter."""

    def stop(self) -> None:
        """End it."""

    def mark(self) -> None:
        """Read the sensor here, where a phase begins or ends."""

    def window(self, start_s: float, end_s: float) -> Window:
        """Return the energy between two moments, after `stop`. Raises PowerError saying why nothing is known."""
        raise PowerError(self._why)

    def about(self) -> MeterInfo:
        """Say what it measures with."""
        return MeterInfo(None, self._why)

    def throttle(self) -> Throttle | None:
        """Return the limits on the clocks that the sensor itself knows; None: not known."""
        return None


@dataclasses.dataclass(frozen=True)
class Idle:
    """What the machine drew at rest just before the run: mean and standard deviation of its samples."""

    watts: float
    spread_w: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseEnergy(Window):
    """Energy of one phase (prefill, decode); None is "not measured", ``reason`` why.

    joules within error_j: gross, the sum of the meter's total. net: above idle; its error contains the idle
    power's spread. corrected: with the meter's correction. The sensor's own error comes on top.
    """

    tokens: int | None
    joules: float | None = None  # type: ignore[assignment]
    average_w: float | None = None  # type: ignore[assignment]
    net_j: float | None = None
    net_error_j: float | None = None
    corrected_j: float | None = None
    mj_per_token: float | None = None
    net_mj_per_token: float | None = None
    corrected_mj_per_token: float | None = None
    reason: str | None = None

    @classmethod
    def of(
        cls, window: Window, tokens: int | None, idle: Idle | None, correction: Correction | None
    ) -> PhaseEnergy:
        """Return a window's, of so many tokens."""
        joules, seconds, error = window.joules, window.seconds, window.error_j
        net = None if idle is None else joules - idle.watts * seconds
        corrected = None if correction is None else correction.joules(joules, seconds)

        def per_token(joules: float | None) -> float | None:
            return 1e3 * joules / tokens if joules is not None and tokens else None

        return cls(
            **vars(window),
            tokens=tokens,
            net_j=net,
            net_error_j=None if idle is None or error is None else error + idle.spread_w * seconds,
            corrected_j=corrected,
            mj_per_token=per_token(joules),
            net_mj_per_token=per_token(net),
            corrected_mj_per_token=per_token(corrected),
        )

    def to_text(self, name: str, correction: Correction | None) -> str:
        """Write it for people, in a line."""
        if self.joules is None:
            return f"{name} n/a: {self.reason}"
        parts, tokens = [name], ""
        if self.tokens:
            parts, tokens = [f"{name} {self.mj_per_token:.4g} mJ/token gross"], f"{self.tokens} tokens, "
            if self.net_mj_per_token is not None:
                parts.append(f"{self.net_mj_per_token:.4g} above idle")
            if correction and self.corrected_mj_per_token is not None:
                parts.append(f"{self.corrected_mj_per_token:.4g} {correction.name}")
        within = f" ± {self.error_j:.2g}" if self.error_j is not None else ""
        parts[-1] += f" ({tokens}{self.seconds:.2f} s, {self.joules:.4g}{within} J)"
        parts.append(f"{self.average_w:.3g} W average")
        if self.peak_w is not None:
            parts.append(f"{self.peak_w:.3g} W peak")
        if self.counter_j and self.integrated_j:
            parts.append(f"integrated power {100 * (self.integrated_j / self.counter_j - 1):+.2g}% to the counter")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class EnergyReport:
    """Energy of a run by phase, and everything a reader needs to judge it."""

    about: MeterInfo
    idle: Idle | None
    phases: Mapping[str, PhaseEnergy]
    throttling: tuple[str, ...] | None

    def rows(self) -> list[tuple[str, str]]:
        """List (topic, text) for a terminal: what the figures rest on, then the phases; or why there are none."""
        about, idle = self.about, self.idle
        if about.meter is None:
            reasons = {phase.reason for phase in self.phases.values()}
            return [("energy", f"n/a: {reason}") for reason in sorted(filter(None, reasons))]
        rows = [("power", self._meter_text())]
        if idle is not None:
            spread = f"{idle.watts:.3g} W ± {idle.spread_w:.2g}"
            rows.append(("idle", f"{spread} over {idle.seconds:.1f} s before the run"))
        if any(phase.n_samples for phase in self.phases.values()):
            rows.append(("sampling", self._sampling_text()))
        if not about.estimate:
            rows.append(("clocks", meters.throttle_text(self.throttling)))
        rows += [("note", note) for note in about.notes]
        label = "ESTIMATE" if about.estimate else "energy"
        return rows + [(label, phase.to_text(name, about.correction)) for name, phase in self.phases.items()]

    def _meter_text(self) -> str:
        about = self.about
        total = " + ".join(about.total) if len(about.total) <= 4 else f"the sum of {len(about.total)} rails"
        parts = [f"{about.meter}: {total}" if total else f"{about.meter}", about.covers]
        if about.correction:
            parts.append(f"not corrected; {about.correction}")
        return "; ".join(part for part in parts if part)

    def _sampling_text(self) -> str:
        sampled = [phase for phase in self.phases.values() if phase.n_samples]
        n, seconds = sum(phase.n_samples or 0 for phase in sampled), sum(phase.seconds for phase in sampled)
        parts = [f"{n} samples, {n / seconds:.1f} Hz"]
        if self.about.cpu_share is not None:
            parts.append(f"{100 * self.about.cpu_share:.2f}% of one core")
        gaps = sum(phase.gap_s or 0.0 for phase in self.phases.values())
        longest = max(phase.longest_gap_s or 0.0 for phase in self.phases.values())
        parts.append(f"gaps {gaps:.2f} s in all, the longest {longest:.2f} s" if gaps else "no gaps")
        parts += [f"lost {count} x {why}" for why, count in self.about.losses.items()]
        return ", ".join(parts)


@dataclasses.dataclass
class Phase:
    """One phase: when it ran, and how many tokens it made."""

    tokens: int
    start_s: float = 0.0
    end_s: float = 0.0


class EnergyMeter:
    """Energy by phase from any source (None: nothing is measured, and nothing reported):

        with EnergyMeter(PowerSampler(find_meter()[0])) as meter:
            with meter.phase("prefill", tokens=512):
                ...
            with meter.phase("decode") as phase:
                phase.tokens += 1
        report = meter.report()

    Entering it starts the source and waits ``idle_s`` to see what the machine draws at rest (0: not).
    """

    def __init__(
        self,
        source: PowerSource | None,
        *,
        idle_s: float = IDLE_S,
        root: Root = "/",
        clock: Clock = time.perf_counter,
    ) -> None:
        if not 0 <= idle_s <= 3600:
            raise PowerError(f"idle time {idle_s} s: accepted: 0 (none) to 3600")
        self._source, self._idle_s, self._root, self._clock = source, idle_s, root, clock
        self._idle_span: tuple[float, float] | None = None
        self._phases: dict[str, Phase] = {}
        self._before: Throttle | None = None
        self._after: Throttle | None = None

    def __enter__(self) -> EnergyMeter:
        if self._source:
            self._before = all_limits(meters.throttle(self._root), self._source.throttle())
            self._source.start()
            if self._source.has_idle and self._idle_s:
                begun_s = self._clock()
                time.sleep(self._idle_s)
                self._idle_span = begun_s, self._clock()
        return self

    def __exit__(self, *error: object) -> None:
        if self._source:
            self._source.stop()
            self._after = all_limits(meters.throttle(self._root), self._source.throttle())

    @contextlib.contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[Phase]:
        """Meter what runs inside as the phase ``name``. Raises PowerError for one that has run already."""
        if name in self._phases:
            raise PowerError(f"the phase {name!r} has run already; give another name")
        phase = self._phases[name] = Phase(tokens)
        if self._source:
            self._source.mark()
        phase.start_s = self._clock()
        try:
            yield phase
        finally:
            phase.end_s = self._clock()
            if self._source:
                self._source.mark()

    def report(self) -> EnergyReport | None:
        """Report on all phases, after the block."""
        source = self._source
        if source is None:
            return None
        idle, about, phases = None, source.about(), {}
        if self._idle_span is not None:
            with contextlib.suppress(PowerError):
                window = source.window(*self._idle_span)
                idle = Idle(window.average_w, window.spread_w or 0.0, window.seconds)
        for name, phase in self._phases.items():
            tokens, seconds = phase.tokens or None, phase.end_s - phase.start_s
            try:
                window = source.window(phase.start_s, phase.end_s)
                phases[name] = PhaseEnergy.of(window, tokens, idle, about.correction)
            except PowerError as error:
                phases[name] = PhaseEnergy(tokens=tokens, seconds=seconds, reason=str(error))
        return EnergyReport(about, idle, phases, meters.throttled_between(self._before, self._after))


# Sources: an estimate, a sensor, a log. A sensor is read by a thread rather than a process: reading releases the
# interpreter lock, and both were measured beside decoding (docs/energy.md). It is a daemon: a sensor that never
# answers costs its samples and nothing else.

CPU_SHARE = 0.006  # of one core: readings that cost more are made less often
CPU_AHEAD_S = 0.002  # what the first readings may cost beyond that
MAX_HZ = 100.0
LATE_S = 0.5  # a reading that took longer belongs to no moment
FIRST_SAMPLE_S = 3.0  # how long `start` waits for the sensor
STOP_S = 3.0
MARK_S = 0.2  # how long the edge of a phase waits for its sample


class Estimate(PowerSource):
    """A power that the user states: energy is it times the seconds, and is called an estimate everywhere."""

    def __init__(self, watts: float) -> None:
        if not 0 < watts < 1e5:
            raise PowerError(f"--power-estimate {watts}: accepted: the watts that the machine draws, more than 0")
        self._watts = watts

    def window(self, start_s: float, end_s: float) -> Window:
        seconds = end_s - start_s
        return Window(seconds=seconds, joules=self._watts * seconds, average_w=self._watts)

    def about(self) -> MeterInfo:
        return MeterInfo("estimate", f"a stated {self._watts:g} W, not measured", estimate=True)


class PowerSampler(PowerSource):
    """Samples of ``meter`` between `start` and `stop`; lost ones are counted by reason.

    hz: readings per second (default: the meter's most). ``clock``: monotonic seconds. Raises PowerError for a rate
    that the meter can't have.
    """

    has_idle = True

    def __init__(
        self,
        meter: PowerMeter,
        *,
        hz: float | None = None,
        notes: Sequence[str] = (),
        clock: Clock = time.perf_counter,
    ) -> None:
        most = min(meter.max_hz, MAX_HZ)
        if hz is not None and not 0 < hz <= most:
            raise PowerError(f"--hz {hz:g}: {meter.name} is read at most {most:g} times per second; give less")
        self.meter, self.notes = meter, tuple(notes)
        self._hz, self._clock = hz or most, clock
        self._rows = array("d")  # per sample: time, each rail's watts, each rail's joules
        self._losses: Counter[str] = Counter()
        self._begun_s = self._ended_s = 0.0
        self._cpu_s = self._children_s = self._edges_s = 0.0  # processor time
        self._stopping, self._marks_asked, self._marks_taken = False, 0, 0
        self._wake, self._first, self._marked = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="edgekv-power", daemon=True)

    def start(self) -> None:
        """Return once the sensor was read for the first time, or does not answer."""
        self._begun_s = self._clock()
        self._thread.start()
        self._first.wait(FIRST_SAMPLE_S)

    def stop(self) -> None:
        """Take a last sample; does not wait for a sensor that does not answer."""
        self._stopping = True
        self._wake.set()
        self._thread.join(STOP_S)
        self._ended_s = self._clock()

    def mark(self) -> None:
        """Take a sample now, with the counters that are too expensive to be read each time."""
        self._marked.clear()
        self._marks_asked += 1
        self._wake.set()
        self._marked.wait(MARK_S)

    def window(self, start_s: float, end_s: float) -> Window:
        return self.trace().window(start_s, end_s)

    def about(self) -> MeterInfo:
        meter = self.meter
        return MeterInfo(
            meter=meter.name,
            covers=meter.covers,
            rails=meter.rails,
            total=meter.total,
            correction=meter.correction,
            cpu_share=self.trace().cpu_share,
            losses=dict(self._losses),
            notes=self.notes,
        )

    def throttle(self) -> Throttle | None:
        return self.meter.throttle()

    def trace(self) -> Trace:
        """Return the samples so far."""
        width = 1 + 2 * len(self.meter.rails)
        flat = np.array(self._rows[: len(self._rows) // width * width])
        rows = flat.reshape(-1, width)
        power, energy = np.split(rows[:, 1:], 2, axis=1)
        seconds = (self._ended_s or self._clock()) - self._begun_s
        return Trace(
            times_s=rows[:, 0],
            power_w=power,
            energy_j=energy,
            rails=self.meter.rails,
            total=self.meter.total,
            tick_s=self.meter.tick_s,
            losses=dict(self._losses),
            cpu_share=self._cpu_s / seconds if seconds > 0 else None,
        )

    def _run(self) -> None:
        due = self._clock()
        while not self._stopping:
            asked = self._marks_asked
            due = max(due + self._sample(edge=asked > self._marks_taken), self._clock())
            self._first.set()
            if asked > self._marks_taken:
                self._marks_taken = asked
                self._marked.set()
            self._wake.wait(due - self._clock())
            self._wake.clear()
        self._sample(edge=True)

    def _sample(self, edge: bool) -> float:
        """Read once; returns the seconds from this reading to the next."""
        begun_s, children_s, cpu_s = self._clock(), _children_s(), time.thread_time()
        try:
            reading = self.meter.read_edge() if edge else self.meter.read()
        except Exception as error:  # whatever a driver's library raises must not end the run
            self._losses[reason(error)] += 1
        else:
            self._keep(reading, begun_s, self._clock())
        took_s = self._clock() - begun_s
        # A child of somebody else may have ended meanwhile: ours can't have worked for longer than it lived.
        children_s = min(_children_s() - children_s, took_s)
        self._children_s += children_s
        if edge:  # these lie outside the phases
            self._edges_s += time.thread_time() - cpu_s + children_s
        self._cpu_s = time.thread_time() + self._children_s - self._edges_s
        return max(1 / self._hz, 2 * took_s, pause_s(self._cpu_s, self._clock() - self._begun_s))

    def _keep(self, reading: Reading, begun_s: float, ended_s: float) -> None:
        if ended_s - begun_s > LATE_S:
            self._losses[f"took longer than {LATE_S} s"] += 1
            return
        rails, missing = self.meter.rails, float("nan")
        power = [reading.power_w.get(rail, missing) for rail in rails]
        energy = [reading.energy_j.get(rail, missing) for rail in rails]
        self._rows.extend([(begun_s + ended_s) / 2, *power, *energy])


def pause_s(cpu_s: float, elapsed_s: float) -> float:
    """Return the seconds until ``cpu_s`` of processor time are no more than CPU_SHARE of all time."""
    return max(0.0, (cpu_s - CPU_AHEAD_S) / CPU_SHARE - elapsed_s)


def _children_s() -> float:
    """Return the processor time of child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# An external meter's log

TIME_NAMES = ("time", "timestamp", "datetime", "date", "unix", "timeunixs", "times", "epoch")
WATT_NAMES = ("watts", "watt", "w", "power", "powerw", "totalw", "p")
ACCEPTED = "accepted: a header with time and watts (or two columns without one), Unix seconds or ISO 8601 times"
UNIX_UNITS = {1e17: 1e-9, 1e14: 1e-6, 1e11: 1e-3, 1e8: 1.0}  # least number -> seconds: ns, us, ms, s since 1970
SET_BY_S = 0.05  # the wall clock was set during the run if it moved by more against the monotonic one


class CsvLog(PowerSource):
    """A log that another program writes during the run; it is read when the run has ended.

    Raises PowerError if the file can't be used as it is now.
    """

    has_idle = True

    def __init__(
        self, path: str | os.PathLike[str], wall_clock: Clock = time.time, clock: Clock = time.perf_counter
    ) -> None:
        self._path, self._wall_clock, self._clock = user_path(path), wall_clock, clock
        self._notes: tuple[str, ...] = ()
        self._offset_s = wall_clock() - clock()
        self._trace = self._read()

    def start(self) -> None:
        self._offset_s = self._wall_clock() - self._clock()

    def stop(self) -> None:
        moved_s = self._wall_clock() - self._clock() - self._offset_s
        if abs(moved_s) > SET_BY_S:
            self._notes = (
                f"the system clock was set by {moved_s:+.2f} s during the run: the log may be misaligned",
            )
        self._trace = self._read()

    def _read(self) -> Trace:
        times, watts, n_bad = read_log(self._path)
        return Trace(
            times_s=times - self._offset_s,
            power_w=watts[:, None],
            energy_j=np.full((len(times), 1), np.nan),
            rails=("log",),
            total=("log",),
            losses={"lines that are not a time and watts": n_bad} if n_bad else {},
        )

    def window(self, start_s: float, end_s: float) -> Window:
        try:
            return self._trace.window(start_s, end_s)
        except PowerError as error:
            times = self._trace.times_s
            if not len(times) or (start_s <= times[-1] and end_s >= times[0]):
                raise
            covered, ran = self._span_text(times[0], times[-1]), self._span_text(start_s, end_s)
            raise PowerError(f"{self._path} covers {covered}, this ran {ran} (UTC)") from error

    def _span_text(self, *moments_s: float) -> str:
        times = (datetime.datetime.fromtimestamp(t + self._offset_s, datetime.timezone.utc) for t in moments_s)
        return " to ".join(time.strftime("%H:%M:%S") for time in times)

    def about(self) -> MeterInfo:
        trace, covers = self._trace, f"what the external meter measures ({self._path.name})"
        return MeterInfo(
            "csv", covers, rails=trace.rails, total=trace.total, losses=dict(trace.losses), notes=self._notes
        )


def read_log(path: pathlib.Path) -> tuple[F64, F64, int]:
    """Return Unix times (n,), watts (n,) in order of time, and how many lines were neither.

    The last line may be half-written. Raises PowerError.
    """
    try:
        lines = read_regular(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise PowerError(f"--power-csv {path}: can't be read ({why}); {ACCEPTED}") from None
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    if not lines:
        raise PowerError(f"--power-csv {path}: holds no line; {ACCEPTED}")
    try:
        rows = list(csv.reader(lines, delimiter=max(",;\t", key=lines[0].count)))
    except csv.Error as error:
        raise PowerError(f"--power-csv {path}: is no CSV ({error}); {ACCEPTED}") from None
    time_column, watt_column, first = _columns(rows[0], path)
    samples = [s for row in rows[first:] if (s := _log_sample(row, time_column, watt_column)) is not None]
    if len(rows) > first and not samples:
        raise PowerError(f"--power-csv {path}: line {short_repr(lines[first])} is not understood; {ACCEPTED}")
    table = np.array(sorted(samples), np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1], len(rows) - first - len(samples)


def _columns(header: Sequence[str], path: pathlib.Path) -> tuple[int, int, int]:
    """Find the columns of time and watts, and the row where samples begin."""
    names = [re.sub(r"[^a-z]", "", name.lower()) for name in header]
    times, watts = ([i for i, name in enumerate(names) if name in known] for known in (TIME_NAMES, WATT_NAMES))
    if times and watts:
        return times[0], watts[0], 1
    if _log_sample(header, 0, 1) is None:
        listed = short_repr(", ".join(header))
        raise PowerError(f"--power-csv {path}: no columns of time and watts in {listed}; {ACCEPTED}")
    return 0, 1, 0


def _log_sample(row: Sequence[str], time_column: int, watt_column: int) -> tuple[float, float] | None:
    """Return (Unix seconds, watts); None where the row has no such thing."""
    try:
        sample = _unix_s(row[time_column]), float(row[watt_column])
    except (ValueError, IndexError, OverflowError):
        return None
    return sample if math.isfinite(sample[1]) else None


def _unix_s(text: str) -> float:
    """Return the Unix seconds of a number or an ISO 8601 time (local without a zone). Raises ValueError."""
    text = text.strip()
    try:
        number = float(text)
    except ValueError:
        iso = re.sub(r"Z$", "+00:00", text)
        iso = re.sub(r"\.(\d+)", lambda match: f".{match[1][:6]:0<6}", iso)  # Python 3.10 takes 3 or 6 digits only
        return datetime.datetime.fromisoformat(iso).timestamp()
    for least, seconds in UNIX_UNITS.items():
        if least <= number < 1e20:
            return number * seconds
    raise ValueError(f"{text} is no time since 1970")
