"""Sources of power: a sensor that a thread reads, an external meter's log, an estimate, or none.

A thread rather than a process: reading releases the interpreter lock, and both were measured beside decoding
(docs/energy.md). It is a daemon: a sensor that never answers costs its samples and nothing else.
"""

from __future__ import annotations

import csv
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
from collections.abc import Sequence

import numpy as np

from edgekv.checks import short_repr
from edgekv.errors import PowerError
from edgekv.files import read_regular, user_path
from edgekv.power.energy import MeterInfo, PowerSource, Trace, Window
from edgekv.power.meters import Clock, PowerMeter, Reading, Throttle, reason
from edgekv.types import F64

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
