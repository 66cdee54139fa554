"""`edgekv power`: shows the machine's power, meters any command, and finds the sensors of this machine."""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import grp
import io
import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np

from edgekv.cli.options import add_options, number, option, output_file, switch
from edgekv.cli.terminal import plot, print_rows, redraw, require_matplotlib
from edgekv.errors import PowerError
from edgekv.files import atomic_write
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import EXACT
from edgekv.machine import machine_info
from edgekv.power import EnergyMeter, PowerSampler, find_meter, survey
from edgekv.power.energy import IDLE_S, CsvLog, PowerSource, SharedMeter, Trace
from edgekv.power.meters import (
    Conditions,
    MeterAbsent,
    MeterRefused,
    PowerMeter,
    Root,
    find_profile,
    power_file,
    profile_text,
    read_throttle,
)

GPU_DEVICES = {"cuda": "gpu"}  # of --device
OFF = "off"  # of --power
JSON_SECONDS = 10.0
REFRESH_S = 1.0
SHOWN_S = 3.0  # over which live watts are averaged: long enough for a sensor with one reading a second
PHASE = "command"
RULE, GROUP = "99-edgekv-power.rules", "video"

positive_number = number("more than 0", lambda value: value > 0)

# Energy of a run


def add_power_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the meter of a run's energy."""
    add_options(parser.add_mutually_exclusive_group(), "power power_csv")
    add_options(parser, "power_idle")


def find_power_meter(arguments: argparse.Namespace) -> tuple[PowerMeter, list[str]]:
    """Returns the meter of --power, by default the best that sees the work of --device, and notes on it.

    Raises PowerError where there is none.
    """
    from edgekv.engine.loading import resolve_device

    if arguments.power == OFF:
        raise PowerError("--power off")
    device = resolve_device(arguments.device, CacheSpec.parse(EXACT))
    try:
        return find_meter(arguments.power or "auto", device=GPU_DEVICES.get(device, "cpu"))
    except MeterAbsent as error:
        raise MeterAbsent(f"{error}; `edgekv power doctor` says what can be measured") from None


def energy_source(arguments: argparse.Namespace) -> PowerSource:
    """Opens the source of power readings; where no meter is found, it measures nothing and says why.

    Raises PowerError where the options name a meter that can't be used.
    """
    if arguments.power_csv is not None:
        return CsvLog(arguments.power_csv)
    try:
        meter, notes = find_power_meter(arguments)
    except PowerError as error:
        if arguments.power not in (None, "auto", OFF):
            raise
        return PowerSource(str(error))
    return PowerSampler(meter, notes=notes if arguments.power else ())


def energy_meter(arguments: argparse.Namespace) -> EnergyMeter:
    """Returns a meter of a run's energy; unless the options ask for it, one that is silent without a sensor."""
    source = energy_source(arguments)
    asked = arguments.power not in (None, OFF) or arguments.power_csv is not None
    idle_s = arguments.power_idle if arguments.power_idle is not None else IDLE_S if asked else 0
    return EnergyMeter(source if asked or source.about().meter else None, idle_s=idle_s)


def shared_meter(arguments: argparse.Namespace) -> SharedMeter | None:
    """Returns a meter of a server's requests; None where none is found. Raises as `energy_source`."""
    source = energy_source(arguments)
    return SharedMeter(source.meter) if isinstance(source, PowerSampler) else None


# edgekv power


def power_arguments(parser: argparse.ArgumentParser) -> None:
    meter = {"default": argparse.SUPPRESS}  # given before the action or after it
    picture = {**meter, "help": "watts over time, at the end: PNG or SVG (needs edgekv[plot])"}
    until = f"stop after N seconds (default: at Ctrl-C; with --json {JSON_SECONDS:g})"
    seconds = option("N", until, type=positive_number)
    add_options(parser, "meter plot", meter=meter, plot=picture, seconds=seconds)
    parser.add_argument("--json", **switch("print a summary as JSON at the end"))
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    about = "meter a command, write the samples as CSV, print a summary"
    record = actions.add_parser("record", help=about, allow_abbrev=False)
    samples = option("FILE", "write every sample: Unix time, watts, each rail's watts", type=output_file)
    idle = option("S", "seconds at rest before, to subtract (default: none)", type=float, default=0.0)
    add_options(record, "meter plot", meter=meter, plot=picture, csv=samples, idle=idle)
    record.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="a program, its arguments")
    record.set_defaults(execute=_record)
    about = "say which sensors are here and can be read, and how to get permission"
    actions.add_parser("doctor", help=about).set_defaults(execute=_doctor)
    parser.epilog = "edgekv power record --csv FILE -- COMMAND meters any program and passes its exit status on"


def _open(arguments: argparse.Namespace) -> PowerSource:
    """Opens the meter. Without any, raises PowerError if an option needs one, else returns an empty source."""
    name, plotted = getattr(arguments, "meter", "auto"), getattr(arguments, "plot", None)
    if plotted:
        require_matplotlib()
    try:
        meter, notes = find_meter(name)
    except PowerError as error:
        if name != "auto" or plotted or getattr(arguments, "csv", None):
            raise
        return PowerSource(str(error))
    return PowerSampler(meter, notes=notes)


def _plot(source: PowerSource, arguments: argparse.Namespace) -> None:
    if isinstance(source, PowerSampler) and getattr(arguments, "plot", None):
        trace = source.trace()
        seconds = trace.times_s - trace.times_s[0] if len(trace.times_s) else trace.times_s
        rails = [(rail, seconds, trace.watts((rail,))) for rail in trace.rails if len(trace.rails) > 1]
        plot(arguments.plot, [("total", seconds, trace.watts()), *rails], xlabel="seconds", ylabel="watts")


def power_command(arguments: argparse.Namespace) -> int:
    source = _open(arguments)
    if arguments.json:
        _print_json(source, arguments.seconds or JSON_SECONDS)
    else:
        _print_live(source, math.inf if arguments.seconds is None else arguments.seconds)
    _plot(source, arguments)
    return 0


def _print_json(source: PowerSource, seconds: float) -> None:
    source.start()
    begun_s, conditions_before = time.perf_counter(), Conditions.now()
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(seconds)
    ended_s, conditions_after = time.perf_counter(), Conditions.now()
    source.stop()
    power = reason = None
    try:
        power = dataclasses.asdict(source.window(begun_s, ended_s))
    except PowerError as error:
        reason = str(error)
    facts = {
        "meter": dataclasses.asdict(source.about()),
        "power": power,
        "reason": reason,
        "before": conditions_before.as_dict(),
        "after": conditions_after.as_dict(),
        "machine": machine_info(),
    }
    print(json.dumps(facts, indent=2))


def _print_live(source: PowerSource, seconds: float) -> None:
    """Prints the power each second, on a terminal over the last one, for ``seconds`` or until Ctrl-C."""
    source.start()
    begun_s = now_s = time.perf_counter()
    if not isinstance(source, PowerSampler):  # once: it will not change
        seconds = 0
        redraw([*_power_lines(source, now_s, now_s), Conditions.now().to_text()], 0)
    height = 0
    with contextlib.suppress(KeyboardInterrupt):
        while now_s < begun_s + seconds:
            time.sleep(min(REFRESH_S, begun_s + seconds - now_s))
            now_s = time.perf_counter()
            lines = _power_lines(source, max(begun_s, now_s - SHOWN_S), now_s)
            height = redraw([*lines, Conditions.now().to_text()], height)
    source.stop()


def _power_lines(source: PowerSource, start_s: float, end_s: float) -> list[str]:
    """Returns a line with the meter's watts, and one for each of its rails."""
    about = source.about()
    try:
        window = source.window(start_s, end_s)
    except PowerError as error:
        return [f"{about.meter or 'power'}  n/a: {error}"]
    peak_w, rate_hz = window.peak_w or window.average_w, (window.n_samples or 0) / window.seconds
    lines = [f"{about.meter}  {window.average_w:.2f} W  (peak {peak_w:.2f} W, {rate_hz:.0f} Hz)"]
    width = max(len(rail) for rail in about.rails)
    for rail, joules in window.rails_j.items():
        part = "" if rail in about.total else "  (not in the total)"
        lines.append(f"  {rail:<{width}}  {joules / window.seconds:.3f} W{part}")
    return lines


# edgekv power record


def _record(arguments: argparse.Namespace) -> int:
    """Meters a program and returns its exit status. Ctrl-C reaches the program alone."""
    command = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    if not command:
        raise PowerError("power record: no command; give it after --, as in edgekv power record -- sleep 5")
    sampler = _open(arguments)
    unix_offset_s = time.time() - time.perf_counter()
    with EnergyMeter(sampler, idle_s=arguments.idle) as meter:
        try:
            child = subprocess.Popen(command)
        except OSError as error:
            why = f"can't be run ({error.strerror}); give a program that exists"
            raise PowerError(f"{command[0]}: {why}") from None
        old_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with meter.phase(PHASE):
                code = child.wait()
        finally:
            signal.signal(signal.SIGINT, old_handler)
    if arguments.csv and isinstance(sampler, PowerSampler):
        atomic_write(arguments.csv, samples_csv(sampler.trace(), unix_offset_s).encode())
    _plot(sampler, arguments)
    report = meter.report()
    assert report is not None
    print_rows([("time", f"{report.phases[PHASE].seconds:.2f} s"), *report.rows()], sys.stderr)
    return code if code >= 0 else 128 - code  # as shells report a signal


def samples_csv(trace: Trace, unix_offset_s: float) -> str:
    """Returns the samples as CSV; for an energy counter, watts are the mean since the last sample.

    `edgekv run --power-csv` reads the same form.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["time_unix_s", "watts", *(f"{rail}_w" for rail in trace.rails)])
    watts = trace.watts()
    rails = np.stack([trace.watts((rail,)) for rail in trace.rails], axis=1)
    for when, total, row in zip(trace.times_s + unix_offset_s, watts, rails, strict=True):
        numbers = ("" if np.isnan(value) else f"{value:.6g}" for value in (total, *row))
        writer.writerow([f"{when:.6f}", *numbers])
    return text.getvalue()


# edgekv power doctor


def _doctor(arguments: argparse.Namespace) -> int:
    """Prints what can be measured here; returns 0 if anything can, else 1."""
    meters = survey()
    print_rows(diagnosis(meters))
    return 0 if any(isinstance(meter, PowerMeter) for meter in meters.values()) else 1


def diagnosis(meters: dict[str, PowerMeter | PowerError], root: Root = "/") -> list[tuple[str, str]]:
    """Returns (topic, text) of the board, each kind of sensor, permissions, and the one that --power uses."""
    profile, board = find_profile(root), machine_info(root)["board"]
    text = profile_text(profile) if profile else "no profile"
    try:
        member = grp.getgrnam(GROUP).gr_gid in {os.getegid(), *os.getgroups()}
        group = f"you are{'' if member else ' not'} in the group {GROUP}"
    except KeyError:
        group = f"there is no group {GROUP} on this system"
    rows = [
        ("board", f"{board or 'not a known board'}: {text}"),
        *((name, _sensor_text(meter)) for name, meter in meters.items()),
    ]
    rows.append(("throttling", "is reported here" if read_throttle(root) else "nothing here reports it"))
    rows.append(("group", group))
    if any(isinstance(meter, MeterRefused) for meter in meters.values()):
        rule = power_file(RULE) or f"{RULE} (of the folder power/ of the source)"
        rows.append(("permission", f"sudo cp {rule} /etc/udev/rules.d/"))
        rows.append(("permission", "sudo udevadm control --reload && sudo udevadm trigger"))
        rows.append(("permission", f"sudo usermod -aG {GROUP} $USER, then log in again"))
    usable = [name for name, meter in meters.items() if isinstance(meter, PowerMeter)]
    verdict = "nothing can be measured here: use an external meter's log with --power-csv FILE"
    if usable:
        verdict = f"--power uses {usable[0]}" + (f"; also here: {', '.join(usable[1:])}" if usable[1:] else "")
    return [*rows, ("verdict", verdict)]


def _sensor_text(meter: PowerMeter | PowerError) -> str:
    if isinstance(meter, PowerError):
        return f"{'!!' if isinstance(meter, MeterRefused) else '--'} {meter}"
    try:
        reading = meter.read()
    except (OSError, ValueError) as error:
        return f"ok, though it just failed once ({error})"
    watts = ", ".join(f"{rail} {value:.3g} W" for rail, value in reading.power_w.items())
    total = " + ".join(meter.total) if len(meter.total) <= 4 else f"all {len(meter.total)} rails"
    return f"ok {watts or ', '.join(meter.rails)}; total = {total}: {meter.covers}"
