"""Reads a meter from a thread of its own, at a rate that leaves the processor to the run.

A thread rather than a process: reading releases the interpreter lock, and both were measured beside decoding
(docs/power.md). It is a daemon: a sensor that never answers costs its samples and nothing else.
"""

from __future__ import annotations

import resource
import threading
import time
from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np

from edgekv.errors import PowerError
from edgekv.power.base import Clock, PowerMeter, Reading, Throttle, reason
from edgekv.power.source import MeterInfo, PowerSource
from edgekv.power.trace import Trace, Window

CPU_SHARE = 0.006  # of one core: readings that cost more are made less often
CPU_AHEAD_S = 0.002  # what the first readings may cost beyond that
MAX_HZ = 100.0
LATE_S = 0.5  # a reading that took longer belongs to no moment
FIRST_SAMPLE_S = 3.0  # how long `start` waits for the sensor
STOP_S = 3.0
MARK_S = 0.2  # how long the edge of a phase waits for its sample


class PowerSampler(PowerSource):
    """Samples of ``meter`` between `start` and `stop`; lost ones are counted by reason.

    hz: readings per second (default: the meter's most). ``clock`` and ``cpu_clock`` are monotonic seconds. Raises
    PowerError for a rate that the meter can't have.
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
        """Returns once the sensor was read for the first time, or does not answer."""
        self._begun_s = self._clock()
        self._thread.start()
        self._first.wait(FIRST_SAMPLE_S)

    def stop(self) -> None:
        """Takes a last sample; does not wait for a sensor that does not answer."""
        self._stopping = True
        self._wake.set()
        self._thread.join(STOP_S)
        self._ended_s = self._clock()

    def mark(self) -> None:
        """Takes a sample now, with the counters that are too expensive to be read each time."""
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
        """The samples so far."""
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
        """Reads once; returns the seconds from this reading to the next."""
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
    """Seconds to wait until ``cpu_s`` of processor time are no more than CPU_SHARE of the time since the start."""
    return max(0.0, (cpu_s - CPU_AHEAD_S) / CPU_SHARE - elapsed_s)


def _children_s() -> float:
    """Processor time of child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
