"""RAPL: the processor's own energy counters, in microjoules under /sys/class/powercap.

Zones and files: the kernel's Documentation/power/powercap/powercap.rst.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import time

from edgekv.power.base import (
    Clock,
    EnergyCounter,
    MeterAbsent,
    MeterRefused,
    PowerMeter,
    Reading,
    Root,
    read_rails,
    reason,
    try_reading,
)
from edgekv.power.sysfs import NumberFile, folders, read_word

ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")  # AMD's too; intel-rapl-mmio shows the same packages again
REMEDY = "energy_uj belongs to root; install the udev rule that `edgekv power doctor` names, or run as root"


@dataclasses.dataclass
class Zone:
    """One zone of powercap: its file energy_uj, and the counter that follows its overflows."""

    file: NumberFile
    counter: EnergyCounter

    def joules(self) -> float:
        """Joules since the first call."""
        return self.counter.advance(self.file() * 1e-6)


class Rapl(PowerMeter):
    """Packages and memory; core and uncore are parts of a package, psys contains it."""

    name = "rapl"
    summary = "RAPL of Intel and AMD processors"
    covers = "processor packages, and memory where it has a counter; not the board, disks, fans or a GPU"
    sees = frozenset({"cpu"})
    max_hz = 20.0
    tick_s = 0.001

    def __init__(self, zones: dict[str, Zone]) -> None:
        self._zones = zones
        self.rails = tuple(zones)
        self.total = tuple(r for r in zones if re.fullmatch(r"package-[^/]*|([^/]*/)?dram", r)) or self.rails[:1]

    @classmethod
    def probe(cls, root: Root = "/", clock: Clock = time.perf_counter) -> Rapl:
        every = [z for z in folders(root, "sys/class/powercap/intel-rapl:*") if ZONE.fullmatch(z.name)]
        names = {zone.name: read_word(zone / "name") or zone.name for zone in every}
        zones: dict[str, Zone] = {}
        for zone in every:
            parent = zone.name.rpartition(":")[0]
            rail = f"{names[parent]}/{names[zone.name]}" if parent in names else names[zone.name]
            zones[rail] = Zone(NumberFile(zone / "energy_uj"), EnergyCounter(_range_j(zone), clock=clock))
        if not zones:
            raise MeterAbsent("no RAPL counters")
        meter = cls(zones)
        try_reading(meter, REMEDY)
        return meter

    def read(self) -> Reading:
        return Reading(energy_j=read_rails({rail: zone.joules for rail, zone in self._zones.items()}, self.total))


def _range_j(zone: pathlib.Path) -> float:
    try:
        return NumberFile(zone / "max_energy_range_uj")() * 1e-6
    except FileNotFoundError:
        return math.inf
    except (OSError, ValueError) as error:
        raise MeterRefused(f"rapl: {zone}/max_energy_range_uj can't be read ({reason(error)}): {REMEDY}") from None
