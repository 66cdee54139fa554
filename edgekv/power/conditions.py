"""What surrounds a measurement: the board's profile, temperature, clocks, cooling, load, limits on the clocks."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
from typing import Any

import psutil

from edgekv.machine import format_bytes, machine_info
from edgekv.power.meters import Root, Throttle, all_limits, read_word, vcgencmd_throttle

CPU_COOLING = re.compile(r"cpufreq|throttle", re.IGNORECASE)  # cooling devices that slow a processor down
CHECKOUT = pathlib.Path(__file__).resolve().parent.parent.parent / "power"
INSTALLED = pathlib.Path(sys.prefix) / "share" / "edgekv" / "power"


def folders(root: Root, pattern: str) -> list[pathlib.Path]:
    """List what matches below ``root``, in a stable order."""
    return sorted(pathlib.Path(root).glob(pattern))


def _pi_voltage(root: Root) -> Throttle | None:
    """Read the kernel's under-voltage alarm of a Raspberry Pi, which needs no permission."""
    for device in folders(root, "sys/class/hwmon/hwmon*"):
        if read_word(device / "name") == "rpi_volt":
            return Throttle(frozenset({"under-voltage"} if read_word(device / "in0_lcrit_alarm") == "1" else ()))
    return None


def _cpu_cooling(root: Root) -> Throttle | None:
    """Find cooling devices that the kernel uses to slow processors down: every Jetson, many Arm boards."""
    devices = {
        kind: read_word(device / "cur_state")
        for device in folders(root, "sys/class/thermal/cooling_device*")
        if (kind := read_word(device / "type")) and CPU_COOLING.search(kind)
    }
    if not devices:
        return None
    return Throttle(frozenset(f"cooling by {kind}" for kind, state in devices.items() if state not in ("0", None)))


def _intel_counts(root: Root) -> Throttle | None:
    """Count how often each package of an Intel processor was slowed down for its temperature."""
    path = "sys/devices/system/cpu/cpu*/thermal_throttle/package_throttle_count"
    counts = [int(text) for file in folders(root, path) if (text := read_word(file)) and text.isdigit()]
    return Throttle(ever={"processor temperature": sum(counts)}) if counts else None


def throttle(root: Root = "/") -> Throttle | None:
    """Read everything that the system reports about limited clocks; None where it reports nothing."""
    return all_limits(vcgencmd_throttle(), _pi_voltage(root), _cpu_cooling(root), _intel_counts(root))


def throttled_between(before: Throttle | None, after: Throttle | None) -> tuple[str, ...] | None:
    """List what limited the clocks at either moment or between them; None: nothing here could say.

    A sticky flag that was set before and is not in force can't tell whether it happened again.
    """
    if before is None or after is None:
        return None
    risen = {name for name, count in after.ever.items() if count > before.ever.get(name, 0)}
    certain = before.now | after.now | risen
    sticky = {n for n, count in before.ever.items() if count == after.ever.get(n) == 1 and n not in certain}
    return (*sorted(certain), *(f"{name} (before the run; whether again is not known)" for name in sorted(sticky)))


def throttle_text(limits: tuple[str, ...] | None) -> str:
    """Write limits for people."""
    if limits is None:
        return "throttling n/a (nothing here reports it)"
    return f"throttling: {', '.join(limits)}" if limits else "no throttling"


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
        """Look at the machine. The load is that since the last call, at first since the start."""
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
        """Return the fields for JSON."""
        limits = None if self.throttle is None else sorted(self.throttle.now)
        return dataclasses.asdict(self) | {"throttle": limits}

    def to_text(self) -> str:
        """Write them for people, in a line."""
        degrees = f"{self.temperature_c:.1f} C" if self.temperature_c is not None else "temperature n/a"
        clock = f"{self.clock_mhz:.0f} MHz" if self.clock_mhz is not None else "clock n/a"
        limits = throttle_text(None if self.throttle is None else tuple(sorted(self.throttle.now)))
        memory = format_bytes(self.memory_used_bytes)
        return f"{degrees}, {clock}, load {self.load_percent:.0f}%, memory {memory}, {limits}"


def cooling(root: Root = "/") -> list[str]:
    """List the fans and fan-like cooling devices that the system names."""
    found = []
    for device in folders(root, "sys/class/hwmon/hwmon*"):
        name = read_word(device / "name") or "fan"
        found += [f"{name} at {read_word(fan)} rpm" for fan in sorted(device.glob("fan*_input"))]
    for device in folders(root, "sys/class/thermal/cooling_device*"):
        kind, most = read_word(device / "type"), read_word(device / "max_state")
        if kind and "fan" in kind.lower():
            found.append(f"{kind} in state {read_word(device / 'cur_state')} of {most}")
    return found


def clock_ranges(root: Root = "/") -> list[str]:
    """List governor and range of each of the kernel's policies: the cores that are clocked together."""
    lines = []
    for policy in folders(root, "sys/devices/system/cpu/cpufreq/policy*"):
        least, most = (read_word(policy / f"cpuinfo_{end}_freq") for end in ("min", "max"))
        if least and most and least.isdigit() and most.isdigit():
            cores, governor = read_word(policy / "affected_cpus"), read_word(policy / "scaling_governor")
            lines.append(f"cores {cores}: {governor}, {int(least) // 1000} to {int(most) // 1000} MHz")
    return lines


def find_profile(root: Root = "/") -> dict[str, Any] | None:
    """Return the profile in `power/boards` of this machine, by its device tree's model; None for any other."""
    model, folder = machine_info(root)["board"], power_file("boards")
    profiles = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))] if folder else []
    return next((profile for profile in profiles if model and re.search(profile["model"], model)), None)


def profile_text(profile: dict[str, Any]) -> str:
    """Write a profile for people, in a line."""
    measured = f", {profile['measured_gb_s']:g} measured" if profile["measured_gb_s"] else ""
    note = f"; {profile['note']}" if profile["note"] else ""
    cpu = f"{profile['cores']} x {profile['cpu']} at {profile['clock_mhz']} MHz"
    return f"{cpu}, {profile['peak_gb_s']:g} GB/s peak{measured}{note}"


def power_file(name: str) -> pathlib.Path | None:
    """Find a file of `power/` by its name there: in the checkout, else where the wheel put it."""
    return next((folder / name for folder in (CHECKOUT, INSTALLED) if (folder / name).exists()), None)
