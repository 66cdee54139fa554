"""Jetson's three-channel monitors (INA3221), in the two ways that NVIDIA's kernels show them.

Paths, names and units: the kernel's Documentation/hwmon/ina3221.rst and the Jetson Linux Developer Guide.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from edgekv.power.base import MeterAbsent, PowerMeter, Reading, Root, read_rails, try_reading
from edgekv.power.sysfs import NumberFile, folders, read_word

WHOLE = ("VDD_IN", "POM_5V_IN")  # the module's input: everything else is inside
INSIDE = {"VDDQ_VDD2_1V8AO": "VIN_SYS_5V0"}  # AGX Orin: a rail that another one feeds

Source = Callable[[], float]


def total_rails(rails: Sequence[str]) -> tuple[str, ...]:
    """The input rail where there is one, else all rails that no other one contains."""
    for rail in WHOLE:
        if rail in rails:
            return (rail,)
    return tuple(rail for rail in rails if INSIDE.get(rail) not in rails)


class Ina3221(PowerMeter):
    """Kernel 5 and later (L4T 34 on): hwmon files in{n}_input mV and curr{n}_input mA; there is no power file."""

    name = "ina3221"
    summary = "Jetson INA3221 through hwmon"
    covers = "the Jetson module; the carrier board, USB and NVMe only where VDD_IN includes them"
    pattern: ClassVar[str] = "sys/bus/i2c/drivers/ina3221/*-*/hwmon/hwmon*"

    def __init__(self, sources: dict[str, Source]) -> None:
        self._sources = sources
        self.rails = tuple(sources)
        self.total = total_rails(self.rails)

    @classmethod
    def probe(cls, root: Root = "/") -> Ina3221:
        sources: dict[str, Source] = {}
        for folder in folders(root, cls.pattern):
            for rail, watts in cls.channels(folder):
                sources[rail if rail not in sources else f"{rail}@{folder}"] = watts
        if not sources:
            raise MeterAbsent(f"no {cls.summary}")
        meter = cls(sources)
        try_reading(meter, f"look at {folder} as root")
        return meter

    @staticmethod
    def channels(folder: pathlib.Path) -> Iterator[tuple[str, Source]]:
        """(rail, reader of its watts) of the three channels; channel 7 is the sum of the shunts, NC is nothing."""
        for channel in (1, 2, 3):
            rail = read_word(folder / f"in{channel}_label")
            volts, amperes = folder / f"in{channel}_input", folder / f"curr{channel}_input"
            if rail and rail != "NC" and amperes.exists():
                yield rail, functools.partial(_product_watts, NumberFile(volts), NumberFile(amperes))

    def read(self) -> Reading:
        return Reading(power_w=read_rails(self._sources, self.total))


class Ina3221Iio(Ina3221):
    """Kernel 4.9 (L4T 32): industrial-I/O files rail_name_{n} and in_power{n}_input in mW."""

    name = "ina3221-iio"
    summary = "Jetson INA3221 of L4T 32 (kernel 4.9)"
    pattern = "sys/bus/i2c/drivers/ina3221x/*-*/iio:device*"

    @staticmethod
    def channels(folder: pathlib.Path) -> Iterator[tuple[str, Source]]:
        for channel in (0, 1, 2):
            rail = read_word(folder / f"rail_name_{channel}")
            if rail and rail != "NC":
                yield rail, functools.partial(_milliwatts, NumberFile(folder / f"in_power{channel}_input"))


def _product_watts(millivolts: NumberFile, milliamperes: NumberFile) -> float:
    return millivolts() * milliamperes() * 1e-6


def _milliwatts(file: NumberFile) -> float:
    return file() * 1e-3
