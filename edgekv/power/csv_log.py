"""An external meter's log: a CSV file of time and watts, aligned with the run by its timestamps."""

from __future__ import annotations

import csv
import datetime
import math
import os
import pathlib
import re
import time
from collections.abc import Sequence

import numpy as np

from edgekv.errors import PowerError
from edgekv.files import read_regular, user_path
from edgekv.power.base import Clock, Throttle
from edgekv.power.source import MeterInfo, PowerSource
from edgekv.power.trace import Trace, Window
from edgekv.schema import shown

TIME_NAMES = ("time", "timestamp", "datetime", "date", "unix", "timeunixs", "times", "epoch")
WATT_NAMES = ("watts", "watt", "w", "power", "powerw", "totalw", "p")
ACCEPTED = "accepted: a header with time and watts (or two columns without one), Unix seconds or ISO 8601 times"
UNIX_UNITS = {1e17: 1e-9, 1e14: 1e-6, 1e11: 1e-3, 1e8: 1.0}  # least number -> seconds: ns, us, ms, s since 1970
STEP_S = 0.05  # the wall clock was set during the run if it moved by more against the monotonic one


class CsvLog(PowerSource):
    """A log that another program writes during the run; it is read when the run has ended.

    Raises PowerError if the file can't be used as it is now.
    """

    has_idle = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        wall_clock: Clock = time.time,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._path, self._wall_clock, self._clock = user_path(path), wall_clock, clock
        self._notes: tuple[str, ...] = ()
        self._offset_s = wall_clock() - clock()
        self._trace = self._read()

    def start(self) -> None:
        self._offset_s = self._wall_clock() - self._clock()

    def stop(self) -> None:
        moved_s = self._wall_clock() - self._clock() - self._offset_s
        if abs(moved_s) > STEP_S:
            self._notes = (
                f"the system clock was set by {moved_s:+.2f} s during the run: the log may be misaligned",
            )
        self._trace = self._read()

    def mark(self) -> None:
        return

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
            covered = f"{_clock_time(times[0] + self._offset_s)} to {_clock_time(times[-1] + self._offset_s)}"
            ran = f"{_clock_time(start_s + self._offset_s)} to {_clock_time(end_s + self._offset_s)}"
            raise PowerError(f"{self._path} covers {covered}, this ran {ran} (UTC)") from error

    def about(self) -> MeterInfo:
        trace, covers = self._trace, f"what the external meter measures ({self._path.name})"
        return MeterInfo(
            "csv", covers, rails=trace.rails, total=trace.total, losses=dict(trace.losses), notes=self._notes
        )

    def throttle(self) -> Throttle | None:
        return None


def read_log(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Unix times (n,), watts (n,) in order of time, and how many lines were neither.

    The last line may be half-written. Raises PowerError.
    """
    try:
        lines = read_regular(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise PowerError(
            f"--power-csv {path}: can't be read ({why}); give the log of a meter: {ACCEPTED}"
        ) from None
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    if not lines:
        raise PowerError(f"--power-csv {path}: holds no line; {ACCEPTED}")
    delimiter = max(",;\t", key=lines[0].count)
    try:
        rows = list(csv.reader(lines, delimiter=delimiter))
    except csv.Error as error:
        raise PowerError(f"--power-csv {path}: is no CSV ({error}); {ACCEPTED}") from None
    time_column, watt_column, first = _columns(rows[0], path)
    samples = []
    for row in rows[first:]:
        try:
            sample = _unix_s(row[time_column]), float(row[watt_column])
        except (ValueError, IndexError, OverflowError):
            continue
        if math.isfinite(sample[1]):
            samples.append(sample)
    if len(rows) > first and not samples:
        raise PowerError(f"--power-csv {path}: line {shown(lines[first])} is not understood; {ACCEPTED}")
    samples.sort()
    table = np.array(samples, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1], len(rows) - first - len(samples)


def _columns(header: Sequence[str], path: pathlib.Path) -> tuple[int, int, int]:
    """The columns of time and watts, and the row where samples begin."""
    names = [re.sub(r"[^a-z]", "", name.lower()) for name in header]
    found = [
        next((i for i, name in enumerate(names) if name in known), None) for known in (TIME_NAMES, WATT_NAMES)
    ]
    if found[0] is not None and found[1] is not None:
        return found[0], found[1], 1
    try:
        _unix_s(header[0]), float(header[1])
    except (ValueError, IndexError, OverflowError):
        listed = shown(", ".join(header))
        raise PowerError(f"--power-csv {path}: no columns of time and watts in {listed}; {ACCEPTED}") from None
    return 0, 1, 0


def _unix_s(text: str) -> float:
    """Seconds since 1970 of a number or an ISO 8601 time (local, where it names no zone). Raises ValueError."""
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


def _clock_time(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, datetime.timezone.utc).strftime("%H:%M:%S")
