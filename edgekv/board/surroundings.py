"""What surrounds a measurement: how the machine is cooled and clocked, and what else it does meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from edgekv.board.record import Span, Surroundings
from edgekv.machine import all_cores
from edgekv.power.base import Root, Throttle
from edgekv.power.conditions import Conditions, throttle, throttled_between
from edgekv.power.sysfs import folders, read_word


def surroundings(about: str, root: Root = "/") -> Surroundings:
    """Of this machine; ``root`` is the folder that holds `sys`."""
    return Surroundings(tuple(_cooling(root)), tuple(_clocks(root)), about)


def _cooling(root: Root) -> list[str]:
    found = []
    for device in folders(root, "sys/class/hwmon/hwmon*"):
        name = read_word(device / "name") or "fan"
        found += [f"{name} at {read_word(fan)} rpm" for fan in sorted(device.glob("fan*_input"))]
    for device in folders(root, "sys/class/thermal/cooling_device*"):
        kind, most = read_word(device / "type"), read_word(device / "max_state")
        if kind and "fan" in kind.lower():
            found.append(f"{kind} in state {read_word(device / 'cur_state')} of {most}")
    return found


def _clocks(root: Root) -> list[str]:
    """A line per policy of the kernel's: the cores that are clocked together."""
    lines = []
    for policy in folders(root, "sys/devices/system/cpu/cpufreq/policy*"):
        least, most = (read_word(policy / f"cpuinfo_{end}_freq") for end in ("min", "max"))
        if least and most and least.isdigit() and most.isdigit():
            cores, governor = read_word(policy / "affected_cpus"), read_word(policy / "scaling_governor")
            lines.append(f"cores {cores}: {governor}, {int(least) // 1000} to {int(most) // 1000} MHz")
    return lines


class Watch:
    """Notes what goes on around a measurement, from its making to `span`."""

    def __init__(self, meter_throttle: Callable[[], Throttle | None] = lambda: None) -> None:
        self._meter_throttle = meter_throttle
        self._begun, self._before, self._busy = time.perf_counter(), self._throttle(), _busy_s()
        self.start()

    def start(self) -> None:
        """What is timed begins now."""
        self.started, self._timed = time.time(), time.perf_counter()
        self._ended: float | None = None

    def stop(self) -> float:
        """It ended now; returns its seconds."""
        self._ended = time.perf_counter()
        return self._ended - self._timed

    def span(self) -> Span:
        """All of it, up to now."""
        ended, now = self._ended or self.stop() + self._timed, Conditions.now()
        took = time.perf_counter() - self._begun
        limits = throttled_between(self._before, self._throttle())
        return Span(
            started=self.started,
            seconds=ended - self._timed,
            took_s=took,
            temperature_c=now.temperature_c,
            clock_mhz=now.clock_mhz,
            throttling=limits,
            others=_others(self._busy, took),
        )

    def others(self) -> float:
        """The share of the cores' time that other programs have taken so far."""
        return _others(self._busy, time.perf_counter() - self._begun)

    def _throttle(self) -> Throttle | None:
        system, own = throttle(), self._meter_throttle()
        if system is None or own is None:
            return system if own is None else own
        return system | own


def _busy_s() -> tuple[float, float]:
    """Seconds that all cores have worked, and that this process and its children have."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    # Linux counts a guest's time as user time too.
    busy = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
    return busy - getattr(times, "guest_nice", 0.0), sum(own[:4])


def _others(before: tuple[float, float], seconds: float) -> float:
    busy, own = (after - start for after, start in zip(_busy_s(), before, strict=True))
    cores = max(psutil.cpu_count() or 1, all_cores())
    return min(1.0, max(0.0, (busy - own) / (cores * seconds))) if seconds > 0 else 0.0
