"""What surrounds a measurement: temperature, clocks, load, memory, and whether the clocks were limited."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import psutil

from edgekv.machine import format_bytes
from edgekv.power.base import Root, Throttle
from edgekv.power.rpi import vcgencmd_throttle
from edgekv.power.sysfs import folders, read_word

CPU_COOLING = re.compile(r"cpufreq|throttle", re.IGNORECASE)  # cooling devices that slow a processor down


def _raspberry_pi(root: Root) -> Throttle | None:
    return vcgencmd_throttle()


def _pi_voltage(root: Root) -> Throttle | None:
    """The kernel's under-voltage alarm of a Raspberry Pi, which needs no permission."""
    for device in folders(root, "sys/class/hwmon/hwmon*"):
        if read_word(device / "name") == "rpi_volt":
            return Throttle(frozenset({"under-voltage"} if read_word(device / "in0_lcrit_alarm") == "1" else ()))
    return None


def _cooling(root: Root) -> Throttle | None:
    """Cooling devices that the kernel uses to slow processors down: every Jetson, many Arm boards."""
    devices = {
        kind: read_word(device / "cur_state")
        for device in folders(root, "sys/class/thermal/cooling_device*")
        if (kind := read_word(device / "type")) and CPU_COOLING.search(kind)
    }
    if not devices:
        return None
    return Throttle(frozenset(f"cooling by {kind}" for kind, state in devices.items() if state not in ("0", None)))


def _intel_counts(root: Root) -> Throttle | None:
    """How often each package of an Intel processor was slowed down for its temperature."""
    path = "sys/devices/system/cpu/cpu*/thermal_throttle/package_throttle_count"
    counts = [int(text) for file in folders(root, path) if (text := read_word(file)) and text.isdigit()]
    return Throttle(ever={"processor temperature": sum(counts)}) if counts else None


THROTTLES: tuple[Callable[[Root], Throttle | None], ...] = (_raspberry_pi, _pi_voltage, _cooling, _intel_counts)


def throttle(root: Root = "/") -> Throttle | None:
    """Everything that the system reports about limited clocks; None where it reports nothing."""
    together: Throttle | None = None
    for read in THROTTLES:
        found = read(root)
        if found is not None:
            together = found if together is None else together | found
    return together


def throttled_between(before: Throttle | None, after: Throttle | None) -> tuple[str, ...] | None:
    """What limited the clocks at either moment or between them; None: nothing here could say.

    A sticky flag that was set before and is not in force can't tell whether it happened again.
    """
    if before is None or after is None:
        return None
    risen = {name for name, count in after.ever.items() if count > before.ever.get(name, 0)}
    certain = before.now | after.now | risen
    sticky = {n for n, count in before.ever.items() if count == after.ever.get(n) == 1 and n not in certain}
    return (*sorted(certain), *(f"{name} (before the run; whether again is not known)" for name in sorted(sticky)))


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Hottest sensor in degrees Celsius, mean core clock in MHz, load in percent of all cores; None: not known.

    memory_used_bytes: of the whole machine, caches that can be dropped not counted.
    """

    temperature_c: float | None
    clock_mhz: float | None
    load_percent: float
    memory_used_bytes: int
    throttle: Throttle | None

    @classmethod
    def now(cls, root: Root = "/") -> Conditions:
        """The load is that since the last call, at first since the start."""
        groups = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
        degrees = [sensor.current for group in groups.values() for sensor in group if sensor.current]
        clock = psutil.cpu_freq()
        return cls(
            temperature_c=max(degrees, default=None),
            clock_mhz=clock.current if clock and clock.current else None,
            load_percent=psutil.cpu_percent(),
            memory_used_bytes=int(psutil.virtual_memory().used),
            throttle=throttle(root),
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        limits = None if self.throttle is None else sorted(self.throttle.now)
        return dataclasses.asdict(self) | {"throttle": limits}

    def to_text(self) -> str:
        """For people, in a line."""
        known = [
            f"{self.temperature_c:.1f} C" if self.temperature_c is not None else "temperature n/a",
            f"{self.clock_mhz:.0f} MHz" if self.clock_mhz is not None else "clock n/a",
            f"load {self.load_percent:.0f}%",
            f"memory {format_bytes(self.memory_used_bytes)}",
            throttle_text(None if self.throttle is None else tuple(sorted(self.throttle.now))),
        ]
        return ", ".join(known)


def throttle_text(limits: tuple[str, ...] | None) -> str:
    """For people; empty where nothing was limited."""
    if limits is None:
        return "throttling n/a (nothing here reports it)"
    return f"throttling: {', '.join(limits)}" if limits else "no throttling"
