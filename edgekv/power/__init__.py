"""Power meters: one entry per kind of sensor; the command line, the tests and the docs all read METERS.

In the order of preference: sensors that see the whole board first.
"""

from __future__ import annotations

import dataclasses

from edgekv.errors import PowerError, unknown
from edgekv.power.base import MeterAbsent, MeterRefused, PowerMeter, Root
from edgekv.power.battery import Battery
from edgekv.power.ina238 import Ina238
from edgekv.power.ina3221 import Ina3221, Ina3221Iio
from edgekv.power.nvml import Nvml
from edgekv.power.phases import EnergyMeter
from edgekv.power.rapl import Rapl
from edgekv.power.rpi import RpiPmic
from edgekv.power.sampler import PowerSampler

__all__ = ["METERS", "EnergyMeter", "PowerSampler", "Sampler", "SurveyedMeter", "find_meter", "survey"]

Sampler = PowerSampler  # its older name

METERS: dict[str, type[PowerMeter]] = {
    "rpi-pmic": RpiPmic,
    "ina238": Ina238,
    "ina3221": Ina3221,
    "ina3221-iio": Ina3221Iio,
    "rapl": Rapl,
    "nvml": Nvml,
    "battery": Battery,
}
NOTHING = "no power sensor that edgekv knows is here (an external meter's log: `edgekv run --power-csv`)"


@dataclasses.dataclass(frozen=True)
class SurveyedMeter:
    """One kind of sensor on this machine: the meter, or why there is none."""

    name: str
    meter: PowerMeter | None = None
    problem: PowerError | None = None


def survey(root: Root = "/") -> list[SurveyedMeter]:
    """Every entry of METERS, tried."""
    findings = []
    for name, kind in METERS.items():
        try:
            findings.append(SurveyedMeter(name, meter=kind.probe(root)))
        except PowerError as problem:  # noqa: PERF203
            findings.append(SurveyedMeter(name, problem=problem))
    return findings


def find_meter(name: str = "auto", root: Root = "/", device: str | None = None) -> tuple[PowerMeter, list[str]]:
    """The named meter, or the best one that sees the work of ``device`` ("cpu", "gpu"; None: any); and notes.

    The notes say which better sensors can't be read. Raises PowerError: none is here, or none can be read.
    """
    if name != "auto":
        if name not in METERS:
            raise unknown(PowerError, "meter", name, ("auto", *METERS))
        return METERS[name].probe(root), []
    notes = []
    for finding in survey(root):
        if isinstance(finding.problem, MeterRefused):
            notes.append(str(finding.problem))
        if finding.meter is None:
            continue
        if device in finding.meter.sees or device is None:
            return finding.meter, notes
        notes.append(f"{finding.name} is here but sees no work on the {device}")
    raise MeterAbsent("; ".join(notes) or NOTHING)
