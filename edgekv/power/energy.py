"""Energy of a run by phase, from a power sensor or an energy counter that is sampled beside it.

Sampled power is integrated by the trapezoid rule; its uncertainty is half of each change between two samples,
times the time between them. An energy counter gives its rise; its uncertainty is the mean power, times the time
between each end of the window and the nearest reading, and times the counter's tick at each end. A window that is
known too badly is refused with the reason. The sensor's own error is not known, and not contained in any of this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import pathlib
import queue
import re
import resource
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from edgekv.errors import PowerError, short_repr
from edgekv.files import read_regular, user_path
from edgekv.power import meters
from edgekv.power.meters import Clock, PowerMeter, Reading, Root, Throttle, error_text, join_limits
from edgekv.types import F64

GOOD_ERROR = 0.1  # relative: up to this an energy counter is preferred to samples of power
MAX_ERROR = 0.5  # relative, of a counter without samples of power beside it: beyond, energy is not known
MAX_GAP = 0.5  # of a window's length: with a longer time between two samples of power, energy is not known
IDLE_S = 5.0  # at rest before a run


@dataclasses.dataclass(frozen=True)
class Integral:
    """Joules, known to plus or minus ``error_j``."""

    joules: float
    error_j: float


def integrate_power(times_s: F64, watts: F64, start_s: float, end_s: float) -> Integral:
    """Integrates sampled power by the trapezoid rule; times (n,) ascending, watts (n,), n >= 1."""
    inside = (times_s > start_s) & (times_s < end_s)
    t = np.concatenate([[start_s], times_s[inside], [end_s]])
    p, intervals = np.interp(t, times_s, watts), np.diff(t)
    return Integral(float(intervals @ (p[:-1] + p[1:])) / 2, float(intervals @ np.abs(np.diff(p))) / 2)


def integrate_counter(times_s: F64, joules: F64, start_s: float, end_s: float, tick_s: float) -> Integral:
    """Returns the rise of an energy counter; times (n,) ascending, joules (n,) so far, n >= 1.

    tick_s: how old the counter's value can be.
    """
    rise = float(np.diff(np.interp([start_s, end_s], times_s, joules))[0])
    unsure_s = sum(tick_s + float(np.abs(times_s - edge_s).min()) for edge_s in (start_s, end_s))
    return Integral(rise, rise * unsure_s / (end_s - start_s))


def longest_interval(times_s: F64, start_s: float, end_s: float) -> float:
    """Returns the longest time within start_s..end_s without one of the samples at times_s (n,)."""
    inside = times_s[(times_s >= start_s) & (times_s <= end_s)]
    return float(np.diff(np.concatenate([[start_s], inside, [end_s]])).max())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Energy between two moments; None means "not measured".

    error_j: uncertainty of ``joules``. rails_j: joules of each
    rail that every sample has read.
    """

    seconds: float
    joules: float
    average_w: float
    error_j: float | None = None
    peak_w: float | None = None
    n_samples: int | None = None
    rails_j: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Trace:
    """Samples of a meter: times (n,) in seconds, power and energy (n, n_rails), NaN where a rail was not read.

    total: rails whose sum is the total. tick_s: how old an energy counter's value can be. losses: lost samples by
    reason.
    """

    times_s: F64
    power_w: F64
    energy_j: F64
    rails: tuple[str, ...]
    total: tuple[str, ...]
    tick_s: float = 0.0
    losses: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def watts(self, rails: tuple[str, ...] | None = None) -> F64:
        """Returns the power (n,) of the rails (default: the total's) at each sample.

        From counters: the mean since the sample before (the first: until the next).
        """
        power = self._sum(self.power_w, rails or self.total)
        if np.isfinite(power).any() or len(self.times_s) < 2:
            return power
        mean = np.diff(self._sum(self.energy_j, rails or self.total)) / np.diff(self.times_s)
        return np.concatenate([mean[:1], mean])

    def window(self, start_s: float, end_s: float) -> Window:
        """Returns the energy of start_s..end_s, on the clock of ``times_s``. Raises PowerError if not known."""
        inside = (self.times_s >= start_s) & (self.times_s <= end_s)
        n, seconds, watts = int(inside.sum()), end_s - start_s, self.watts()[inside]
        energy = self._integrate(self.total, start_s, end_s)
        if energy is None:
            lost = ", ".join(f"{count} x {why}" for why, count in self.losses.items())
            why = f"; lost: {lost}" if lost else ": too short for this meter"
            raise PowerError(f"{n} samples in {seconds:.3g} s{why}")
        if energy.joules <= 0:
            raise PowerError(f"the meter did not move within {seconds:.3g} s")
        always = np.all(np.isfinite(self.power_w[inside]) | np.isfinite(self.energy_j[inside]), axis=0)
        read = [rail for rail, is_known in zip(self.rails, always, strict=True) if is_known]
        by_rail = {rail: self._integrate((rail,), start_s, end_s) for rail in read}
        return Window(
            seconds=seconds,
            joules=energy.joules,
            error_j=energy.error_j,
            average_w=energy.joules / seconds,
            peak_w=float(np.nanmax(watts)) if n else None,
            n_samples=n,
            rails_j={rail: integral.joules for rail, integral in by_rail.items() if integral is not None},
        )

    def _integrate(self, rails: tuple[str, ...], start_s: float, end_s: float) -> Integral | None:
        """Integrates the sum of the rails: by the energy counter where that is good, else by power, else not."""
        power, energy = self._sum(self.power_w, rails), self._sum(self.energy_j, rails)
        sampled, counted = np.isfinite(power), np.isfinite(energy)
        if counted.any():
            rise = integrate_counter(self.times_s[counted], energy[counted], start_s, end_s, self.tick_s)
            most = GOOD_ERROR if sampled.any() else MAX_ERROR
            if rise.error_j <= most * rise.joules and (rise.joules or not sampled.any()):
                return rise
        times_s = self.times_s[sampled]
        if longest_interval(times_s, start_s, end_s) >= MAX_GAP * (end_s - start_s):
            return None
        return integrate_power(times_s, power[sampled], start_s, end_s)

    def _sum(self, values: F64, rails: tuple[str, ...]) -> F64:
        """Adds up values (n, n_rails) to (n,); NaN where one of the rails was not read."""
        total: F64 = values[:, [self.rails.index(rail) for rail in rails]].sum(axis=1)
        return total


@dataclasses.dataclass(frozen=True)
class MeterInfo:
    """The meter that figures come from.

    meter: its name; None where nothing can be measured, and ``covers`` says why. total: the rails that were added
    up. losses: lost samples by reason.
    """

    meter: str | None
    covers: str = ""
    rails: tuple[str, ...] = ()
    total: tuple[str, ...] = ()
    losses: dict[str, int] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


class PowerSource:
    """What a run's energy is taken from. This base class measures nothing, and says why.

    It is started before a run and stopped after it; times are those of `time.perf_counter`.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def start(self) -> None:
        """Begins to meter."""

    def stop(self) -> None:
        """Ends metering."""

    def mark(self) -> None:
        """Reads the sensor now, where a phase begins or ends."""

    def window(self, start_s: float, end_s: float) -> Window:
        """Returns the energy between two moments, after `stop`. Raises PowerError saying why it is not known."""
        raise PowerError(self._why)

    def about(self) -> MeterInfo:
        """Describes the meter."""
        return MeterInfo(None, self._why)

    def read_throttle(self) -> Throttle | None:
        """Returns the limits on the clocks that the sensor itself knows; None: it knows of none."""
        return None


# Energy by phase


@dataclasses.dataclass(frozen=True)
class Idle:
    """Mean power of the machine at rest, just before the run."""

    watts: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseEnergy(Window):
    """Energy of one phase (prefill, decode); None means "not measured", and ``reason`` says why.

    joules: gross, all that the meter's total has seen. net_j: ``joules`` minus idle power times the seconds.
    """

    tokens: int | None
    joules: float | None = None  # type: ignore[assignment]
    average_w: float | None = None  # type: ignore[assignment]
    net_j: float | None = None
    mj_per_token: float | None = None
    net_mj_per_token: float | None = None
    reason: str | None = None

    @classmethod
    def of(cls, window: Window, tokens: int | None, idle: Idle | None) -> PhaseEnergy:
        """Returns the energy of a phase that took ``window`` and made so many tokens."""
        net_j = None if idle is None else window.joules - idle.watts * window.seconds
        gross, net = (1e3 * j / tokens if j is not None and tokens else None for j in (window.joules, net_j))
        return cls(**vars(window), tokens=tokens, net_j=net_j, mj_per_token=gross, net_mj_per_token=net)

    def to_text(self) -> str:
        """Writes what was measured for a terminal."""
        error = f" ± {self.error_j:.2g}" if self.error_j else ""
        text = f"{self.joules:.4g}{error} J"
        if self.tokens:
            above = f" ({self.net_mj_per_token:.4g} above idle)" if self.net_mj_per_token is not None else ""
            text += f", {self.mj_per_token:.4g} mJ per token{above}"
        return f"{text}, {self.average_w:.3g} W"


@dataclasses.dataclass(frozen=True)
class EnergyReport:
    """Energy of a run by phase, and everything that a reader needs to judge it."""

    about: MeterInfo
    idle: Idle | None
    phases: Mapping[str, PhaseEnergy]
    throttling: tuple[str, ...] | None

    def rows(self) -> list[tuple[str, str]]:
        """Lists (topic, text) for a terminal: the energy and its meter in a line, then what makes it doubtful."""
        about, phases = self.about, self.phases.items()
        parts = [f"{name} {phase.to_text()}" for name, phase in phases if phase.joules is not None]
        for reason in dict.fromkeys(phase.reason for _, phase in phases if phase.reason):
            names = " and ".join(name for name, phase in phases if phase.reason == reason)
            parts.append(f"{names} n/a: {reason}")
        if about.meter is not None:
            parts.append(f"measured by {about.meter}: {about.covers}")
        notes = [f"lost {count} samples: {why}" for why, count in about.losses.items()]
        notes += [meters.throttle_text(self.throttling)] if self.throttling else []
        return [("energy", "; ".join(parts)), *(("note", note) for note in (*notes, *about.notes))]


@dataclasses.dataclass
class Phase:
    """When a phase ran, and how many tokens it made."""

    tokens: int
    start_s: float = 0.0
    end_s: float = 0.0


class EnergyMeter:
    """Measures energy by phase from any source (None: nothing is measured, and nothing reported):

        with EnergyMeter(PowerSampler(find_meter()[0])) as meter:
            with meter.phase("prefill", tokens=512):
                ...
            with meter.phase("decode") as phase:
                phase.tokens += 1
        report = meter.report()

    Entering it starts the source and waits ``idle_s`` seconds to see what the machine draws at rest (0: not).
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
            self._before = join_limits(meters.read_throttle(self._root), self._source.read_throttle())
            self._source.start()
            if self._idle_s and self._source.about().meter:
                begun_s = self._clock()
                try:
                    time.sleep(self._idle_s)
                except BaseException:  # a Ctrl-C: `__exit__` is not called
                    self._source.stop()
                    raise
                self._idle_span = begun_s, self._clock()
        return self

    def __exit__(self, *error: object) -> None:
        if self._source:
            self._source.stop()
            self._after = join_limits(meters.read_throttle(self._root), self._source.read_throttle())

    @contextlib.contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[Phase]:
        """Meters what runs inside as the phase ``name``. Raises PowerError for one that has run already."""
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
        """Reports on all phases, after the block."""
        source = self._source
        if source is None:
            return None
        idle, phases = None, {}
        if self._idle_span is not None:
            with contextlib.suppress(PowerError):
                window = source.window(*self._idle_span)
                idle = Idle(window.average_w, window.seconds)
        for name, phase in self._phases.items():
            tokens, seconds = phase.tokens or None, phase.end_s - phase.start_s
            try:
                phases[name] = PhaseEnergy.of(source.window(phase.start_s, phase.end_s), tokens, idle)
            except PowerError as error:
                phases[name] = PhaseEnergy(tokens=tokens, seconds=seconds, reason=str(error))
        return EnergyReport(source.about(), idle, phases, meters.limits_between(self._before, self._after))


# Sources: a sensor, a log

CPU_SHARE = 0.006  # of one core, at most, outside the edges of phases: costly readings are made less often
MAX_HZ = 100.0
LATE_S = 0.5  # a reading that took longer belongs to no moment
FIRST_SAMPLE_S, MARK_S, STOP_S = 3.0, 0.2, 3.0  # how long start, mark and stop wait for the sensor


class PowerSampler(PowerSource):
    """A thread that samples ``meter`` between `start` and `stop`, and counts lost samples by reason.

    A thread rather than a process: reading releases the interpreter lock, and both were measured beside decoding
    (docs/lab/energy.md). It is a daemon: a sensor that never answers costs its samples and nothing else.
    """

    def __init__(self, meter: PowerMeter, *, notes: Sequence[str] = ()) -> None:
        self.meter, self.notes = meter, tuple(notes)
        self._period_s = 1 / min(meter.max_hz, MAX_HZ)
        self._rows = array("d")  # per sample: time, each rail's watts, each rail's joules
        self._losses: Counter[str] = Counter()
        self._thread_s = 0.0  # processor time so far
        self._is_stopping = False
        self._requests: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()  # of samples at once
        self._thread = threading.Thread(target=self._run, name="edgekv-power", daemon=True)

    def start(self) -> None:
        """Returns once the sensor was read for the first time, or does not answer."""
        self._thread.start()
        self._request(FIRST_SAMPLE_S)

    def stop(self) -> None:
        """Takes a last sample; does not wait for a sensor that does not answer."""
        self._is_stopping = True
        self._request(STOP_S)

    def mark(self) -> None:
        """Takes a sample now, with the counters that are too expensive to be read each time."""
        self._request(MARK_S)

    def _request(self, most_s: float) -> None:
        taken = threading.Event()
        self._requests.put(taken)
        taken.wait(most_s)

    def window(self, start_s: float, end_s: float) -> Window:
        return self.trace().window(start_s, end_s)

    def about(self) -> MeterInfo:
        meter = self.meter
        return MeterInfo(meter.name, meter.covers, meter.rails, meter.total, dict(self._losses), self.notes)

    def read_throttle(self) -> Throttle | None:
        return self.meter.read_throttle()

    def trace(self) -> Trace:
        """Returns the samples so far."""
        meter, width = self.meter, 1 + 2 * len(self.meter.rails)
        rows = np.array(self._rows[: len(self._rows) // width * width]).reshape(-1, width)
        power, energy = np.split(rows[:, 1:], 2, axis=1)
        return Trace(rows[:, 0], power, energy, meter.rails, meter.total, meter.tick_s, dict(self._losses))

    def _is_paused(self) -> bool:
        """Returns whether it samples at `mark` and `stop` alone."""
        return False

    def _run(self) -> None:
        due_s = time.perf_counter() + self._period_s
        while True:
            try:
                wait_s = None if self._is_paused() else max(0.0, due_s - time.perf_counter())
                taken = self._requests.get(timeout=wait_s)
            except queue.Empty:
                due_s = self._sample(is_edge=False)
                continue
            due_s = self._sample(is_edge=True)
            taken.set()
            if self._is_stopping:
                return

    def _sample(self, is_edge: bool) -> float:
        """Reads the sensor once; returns when the next regular reading is due."""
        begun_s, children_s = time.perf_counter(), _children_s()
        try:
            reading = self.meter.read_edge() if is_edge else self.meter.read()
        except Exception as error:  # whatever a driver's library raises must not end the run
            self._losses[error_text(error)] += 1
        else:
            self._store(reading, begun_s, time.perf_counter())
        took_s = time.perf_counter() - begun_s
        # A child of the run may have ended meanwhile: the sensor's can't have worked for longer than it lived.
        cpu_s = time.thread_time() - self._thread_s + min(_children_s() - children_s, took_s)
        self._thread_s = time.thread_time()
        pause_s = max(self._period_s, 2 * took_s)
        if not is_edge:  # edges lie outside the phases
            pause_s = max(pause_s, cpu_s / CPU_SHARE)
        return begun_s + pause_s

    def _store(self, reading: Reading, begun_s: float, ended_s: float) -> None:
        if ended_s - begun_s > LATE_S:
            self._losses[f"took longer than {LATE_S} s"] += 1
            return
        self._keep((begun_s + ended_s) / 2, reading)

    def _keep(self, time_s: float, reading: Reading) -> None:
        rails, missing = self.meter.rails, float("nan")
        power = [reading.power_w.get(rail, missing) for rail in rails]
        energy = [reading.energy_j.get(rail, missing) for rail in rails]
        self._rows.extend([time_s, *power, *energy])


@dataclasses.dataclass(eq=False)
class Share:
    """A request's part of what a meter sees, known after the block of `SharedMeter.share`.

    tokens: computed for it so far, which its thread counts. joules: its energy; watts: the mean power of all that
    the meter saw meanwhile. None: not known.
    """

    begun_s: float = 0.0
    tokens: float = 0.0
    joules: float | None = None
    watts: float | None = None
    _shared: float = 0.0  # of the tokens: those whose energy was shared out
    _own_j: float = 0.0
    _seen_j: float = 0.0
    _seen_s: float = 0.0  # when the meter was read last
    _longest_s: float = 0.0  # between two readings


class SharedMeter(PowerSampler):
    """A meter of requests that are answered at the same time, in any threads; `start` it once.

    The joules between two samples belong to the requests in proportion to the tokens computed for each meanwhile,
    or else until the next sample. It samples only while there are requests, and keeps no samples.
    """

    def __init__(self, meter: PowerMeter) -> None:
        super().__init__(meter)
        self._lock = threading.Lock()
        self._open: list[Share] = []
        self._last: tuple[float, Reading] | None = None
        self._unshared_j = 0.0

    def _is_paused(self) -> bool:
        return not self._open

    @contextlib.contextmanager
    def share(self) -> Iterator[Share]:
        """Meters what runs inside as one request, whose tokens are counted in the share."""
        now_s = time.perf_counter()
        share = Share(now_s, _seen_s=now_s)
        with self._lock:
            self._open.append(share)
        self.mark()
        try:
            yield share
        finally:
            self.mark()
            seconds = time.perf_counter() - share.begun_s
            with self._lock:
                self._open.remove(share)
                if not self._open:
                    share._own_j, self._unshared_j = share._own_j + self._unshared_j, 0.0
                longest_s = max(share._longest_s, share.begun_s + seconds - share._seen_s)
            if share._own_j > 0 and longest_s < MAX_GAP * seconds:
                share.joules, share.watts = share._own_j, share._seen_j / seconds

    def _keep(self, time_s: float, reading: Reading) -> None:
        with self._lock:
            before, self._last = self._last, (time_s, reading)
            if before is None or not self._open or time_s <= before[0]:
                return
            watts = mean_watts(*before, time_s, reading, self.meter.total)
            for share in self._open:
                begun_s = max(before[0], share.begun_s)
                share._longest_s = max(share._longest_s, time_s - begun_s)
                share._seen_j += watts * max(0.0, time_s - begun_s)
                share._seen_s = time_s
            begun_s = max(before[0], min(share.begun_s for share in self._open))
            self._unshared_j += watts * max(0.0, time_s - begun_s)
            new = {share: share.tokens - share._shared for share in self._open}
            if n_tokens := sum(new.values()):
                for share, n in new.items():
                    share._own_j += self._unshared_j * n / n_tokens
                    share._shared += n
                self._unshared_j = 0.0


def mean_watts(begun_s: float, before: Reading, ended_s: float, after: Reading, total: tuple[str, ...]) -> float:
    """Returns the mean power of the rails ``total`` between two readings, from watts, else from their counters."""
    if all(rail in reading.power_w for rail in total for reading in (before, after)):
        return sum(before.power_w[rail] + after.power_w[rail] for rail in total) / 2
    return sum(after.energy_j[rail] - before.energy_j[rail] for rail in total) / (ended_s - begun_s)


def _children_s() -> float:
    """Returns the processor time of child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# An external meter's log

EARLIEST_S, LATEST_S = 1e8, 1e11  # of a log, in Unix seconds: other numbers are no seconds since 1970
HEADER = re.compile(r".*time.*,.*\b(watts?|power|w)\b.*", re.IGNORECASE)
ACCEPTED = "lines of time,watts, with or without a header that says so; Unix seconds or ISO 8601"
SET_BY_S = 0.05  # the wall clock was set during the run if it moved by more against the monotonic one


class CsvLog(PowerSource):
    """A log of time and watts that another program writes during the run; it is read when the run has ended.

    Raises PowerError if the file can't be used as it is now.
    """

    def __init__(
        self, path: str | os.PathLike[str], wall_clock: Clock = time.time, clock: Clock = time.perf_counter
    ) -> None:
        self._path, self._wall_clock, self._clock = user_path(path), wall_clock, clock
        self._offset_s = wall_clock() - clock()
        self._moved_s = 0.0  # the wall clock, during the run
        self._trace = self._read()

    def start(self) -> None:
        self._offset_s = self._wall_clock() - self._clock()

    def stop(self) -> None:
        self._moved_s = self._wall_clock() - self._clock() - self._offset_s
        self._trace = self._read()

    def _read(self) -> Trace:
        times, watts, n_bad = read_log(self._path)
        losses = {"lines that are not a time and watts": n_bad} if n_bad else {}
        no_energy = np.full((len(times), 1), np.nan)
        return Trace(times - self._offset_s, watts[:, None], no_energy, ("log",), ("log",), losses=losses)

    def window(self, start_s: float, end_s: float) -> Window:
        if abs(self._moved_s) > SET_BY_S:
            raise PowerError(
                f"the system clock was set by {self._moved_s:+.2f} s during the run: {self._path} can't be aligned"
            )
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
        return MeterInfo("csv", covers, rails=trace.rails, total=trace.total, losses=dict(trace.losses))


def read_log(path: pathlib.Path) -> tuple[F64, F64, int]:
    """Returns Unix times (n,), watts (n,) in order of time, and how many lines were neither.

    The last line may be half-written. Raises PowerError.
    """
    try:
        lines = read_regular(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise _bad_log(path, f"can't be read ({why})") from None
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    if not lines:
        raise _bad_log(path, "holds no line")
    rows = lines[1:] if HEADER.fullmatch(lines[0]) else lines
    samples = [sample for row in rows if (sample := _log_sample(row)) is not None]
    if rows and not samples:
        raise _bad_log(path, f"line {short_repr(rows[0])} is not understood")
    table = np.array(sorted(samples), np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1], len(rows) - len(samples)


def _bad_log(path: pathlib.Path, problem: str) -> PowerError:
    return PowerError(problem, field="power_csv", value=str(path), accepted=[ACCEPTED])


def _log_sample(line: str) -> tuple[float, float] | None:
    """Returns (Unix seconds, watts); None for another line. ISO times are local without a zone."""
    try:
        time_text, watts = line.split(",")[:2]
        if "-" in time_text:  # Python 3.10 takes 3 or 6 digits alone, and no Z
            iso = re.sub(r"\.(\d+)", lambda digits: f".{digits[1][:6]:0<6}", time_text.strip())
            unix_s = datetime.datetime.fromisoformat(iso.replace("Z", "+00:00")).timestamp()
        else:
            unix_s = float(time_text)
        sample = unix_s, float(watts)
    except (ValueError, OverflowError):
        return None
    return sample if EARLIEST_S < unix_s < LATEST_S and math.isfinite(sample[1]) else None
