"""A laptop's or handheld's battery while it discharges, under /sys/class/power_supply."""

from __future__ import annotations

import functools
import pathlib

from edgekv.power.base import MeterAbsent, MeterRefused, PowerMeter, Reading, Root, read_rails, try_reading
from edgekv.power.sysfs import NumberFile, folders, read_word

REMEDY = "unplug the charger: only a discharging battery shows what the machine draws"


class Battery(PowerMeter):
    """power_now in uW, or current_now (uA) times voltage_now (uV); some drivers count discharging as negative."""

    name = "battery"
    summary = "a discharging battery"
    covers = "the whole machine with its display; a slow average, good for minutes rather than seconds"
    max_hz = 1.0

    def __init__(self, devices: list[pathlib.Path]) -> None:
        self._sources = {device.name: functools.partial(_watts, device) for device in devices}
        self.rails = self.total = tuple(self._sources)

    @classmethod
    def probe(cls, root: Root = "/") -> Battery:
        supplies = folders(root, "sys/class/power_supply/*")
        # A mouse's or a headset's battery has the scope Device.
        batteries = [
            s for s in supplies if read_word(s / "type") == "Battery" and read_word(s / "scope") != "Device"
        ]
        if not batteries:
            raise MeterAbsent("no battery")
        for battery in batteries:
            status = read_word(battery / "status")
            if status != "Discharging":
                raise MeterRefused(
                    f"battery {battery.name} is {(status or 'in an unknown state').lower()}: {REMEDY}"
                )
        meter = cls(batteries)
        try_reading(meter, "its driver reports neither power_now nor current_now and voltage_now")
        return meter

    def read(self) -> Reading:
        return Reading(power_w=read_rails(self._sources, self.total))


def _watts(device: pathlib.Path) -> float:
    status = read_word(device / "status")
    if status != "Discharging":
        raise ValueError(f"{device.name} is {status}")
    try:
        return abs(NumberFile(device / "power_now")()) * 1e-6
    except FileNotFoundError:
        microamperes, microvolts = (NumberFile(device / f"{name}_now")() for name in ("current", "voltage"))
        return abs(microamperes) * microvolts * 1e-12
