"""Jetson Thor's monitor of its input (INA238), as hwmon shows it: power1_input in microwatts."""

from __future__ import annotations

import functools
import pathlib

from edgekv.power.base import MeterAbsent, PowerMeter, Reading, Root, read_rails, try_reading
from edgekv.power.sysfs import NumberFile, folders, read_word

INPUT = "VIN"


class Ina238(PowerMeter):
    """Every hwmon device called ina238; the USB-C ports' `ucsi-source-psy-*` report contracts, not power."""

    name = "ina238"
    summary = "Jetson Thor INA238"
    covers = "everything that the board's input feeds, the carrier board included"

    def __init__(self, devices: dict[str, pathlib.Path]) -> None:
        self._sources = {
            rail: functools.partial(_watts, NumberFile(device / "power1_input"))
            for rail, device in devices.items()
        }
        self.rails = tuple(devices)
        self.total = (INPUT,) if INPUT in devices else self.rails

    @classmethod
    def probe(cls, root: Root = "/") -> Ina238:
        devices = [d for d in folders(root, "sys/class/hwmon/hwmon*") if read_word(d / "name") == "ina238"]
        if not devices:
            raise MeterAbsent("no Jetson Thor INA238")
        meter = cls({_rail(device, len(devices) == 1): device for device in devices})
        try_reading(meter, f"look at {devices[0]} as root")
        return meter

    def read(self) -> Reading:
        return Reading(power_w=read_rails(self._sources, self.total))


def _rail(device: pathlib.Path, only: bool) -> str:
    label = read_word(device / "power1_label") or read_word(device / "in1_label")
    return label or (INPUT if only else device.name)


def _watts(file: NumberFile) -> float:
    return file() * 1e-6
