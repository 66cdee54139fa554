"""The options that choose a meter: those of commands that run a model, and those of `edgekv power`."""

from __future__ import annotations

import argparse
from typing import Any

from edgekv.cli.output import picture_file
from edgekv.errors import PowerError, unknown
from edgekv.power import METERS, EnergyMeter, PowerSampler, find_meter
from edgekv.power.csv_log import CsvLog
from edgekv.power.phases import IDLE_S, NoMeter
from edgekv.power.source import Estimate, PowerSource, Unmetered

GPU_DEVICES = {"cuda": "gpu"}  # of --device


def add_power_options(parser: argparse.ArgumentParser) -> None:
    """Which meter measures a run's energy, if any."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--power",
        nargs="?",
        const="auto",
        metavar="METER",
        help=f"report energy per token: auto (default), {', '.join(METERS)}",
    )
    group.add_argument(
        "--power-csv", metavar="FILE", help="energy from an external meter's log: time and watts per line"
    )
    group.add_argument(
        "--power-estimate", type=float, metavar="W", help="energy as time times W watts, labelled an estimate"
    )
    parser.add_argument(
        "--power-idle",
        type=float,
        default=IDLE_S,
        metavar="S",
        help="seconds at rest before the run, to subtract (default %(default)g; 0: none)",
    )


def add_meter_options(parser: argparse.ArgumentParser) -> None:
    """--meter and --hz of `edgekv power` and its actions; given before the action or after it."""
    here: Any = argparse.SUPPRESS
    parser.add_argument("--meter", default=here, metavar="NAME", help=f"auto (default), {', '.join(METERS)}")
    parser.add_argument(
        "--plot",
        type=picture_file,
        default=here,
        metavar="FILE",
        help="watts over time, at the end: PNG or SVG (needs edgekv[plot])",
    )
    parser.add_argument(
        "--hz", type=float, default=here, metavar="N", help="readings per second (default: the meter's most)"
    )


def open_sampler(arguments: argparse.Namespace) -> PowerSampler:
    """The meter of --meter, ready to start. Raises PowerError where nothing can be read."""
    meter, notes = find_meter(getattr(arguments, "meter", "auto"))
    return PowerSampler(meter, hz=getattr(arguments, "hz", None), notes=notes)


def energy_meter(arguments: argparse.Namespace) -> EnergyMeter | NoMeter:
    """What the options ask for, checked before anything is loaded.

    Where --power finds nothing that sees the work of --device, the report will say why.
    """
    source = energy_source(arguments)
    return EnergyMeter(source, idle_s=arguments.power_idle) if source else NoMeter()


def energy_source(arguments: argparse.Namespace) -> PowerSource | None:
    """The source that the options ask for, None where they ask for none."""
    if arguments.power_csv is not None:
        return CsvLog(arguments.power_csv)
    if arguments.power_estimate is not None:
        return Estimate(arguments.power_estimate)
    if arguments.power is None:
        return None
    if arguments.power not in ("auto", *METERS):
        raise unknown(PowerError, "meter", arguments.power, ("auto", *METERS))
    try:
        meter, notes = find_meter(arguments.power, device=GPU_DEVICES.get(arguments.device, "cpu"))
    except PowerError as error:
        return Unmetered(f"{error}; `edgekv power doctor` says more")
    return PowerSampler(meter, notes=notes)
