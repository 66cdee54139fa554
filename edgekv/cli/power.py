"""`edgekv power`: shows the machine's power, meters any command, and finds the sensors of this machine."""

from __future__ import annotations

import argparse
import contextlib
import csv
import grp
import io
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median

import numpy as np

from edgekv.cli.options import SOURCE, add_options, model_path, number, option, output_file, switch
from edgekv.cli.terminal import Bars, print_rows, redraw, table, terminable
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import SessionPlan, find_device, resolve_device
from edgekv.engine.model import Model
from edgekv.errors import PowerError
from edgekv.files import atomic_write
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import EXACT
from edgekv.machine import all_cores, available_memory_bytes, blas_threads, machine_info, require_memory
from edgekv.power import EnergyMeter, PowerSampler, find_meter, survey
from edgekv.power.energy import IDLE_S, CsvLog, PowerSource, SharedMeter, Trace
from edgekv.power.meters import (
    Conditions,
    MeterAbsent,
    MeterRefused,
    PowerMeter,
    PowerModes,
    Root,
    limits_between,
    power_file,
    read_throttle,
    throttle_text,
)
from edgekv.weights.cpu import candidates

GPU_DEVICES = {"cuda": "gpu"}  # of --device
OFF = "off"  # of --power
REFRESH_S = 1.0
DECODE_S, ROUNDS = 5.0, 3  # of advice: of each setting
SETTLE_S = 1.0  # after a change of mode
DEPTH = 256  # tokens before a stretch
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
    """Returns the meter of --power, by default the best for --device (None: any), and notes on it.

    Raises PowerError where there is none.
    """
    if arguments.power == OFF:
        raise PowerError("--power off")
    device = arguments.device and resolve_device(arguments.device, CacheSpec.parse(EXACT))
    try:
        return find_meter(arguments.power or "auto", device=device and GPU_DEVICES.get(device, "cpu"))
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
    asked = arguments.power not in (None, OFF) or arguments.power_csv is not None or bool(arguments.power_idle)
    idle_s = arguments.power_idle if arguments.power_idle is not None else IDLE_S if asked else 0
    return EnergyMeter(source if asked or source.about().meter else None, idle_s=idle_s)


def shared_meter(arguments: argparse.Namespace) -> SharedMeter | None:
    """Returns a meter of a server's requests; None where none is found. Raises as `energy_source`."""
    source = energy_source(arguments)
    return SharedMeter(source.meter) if isinstance(source, PowerSampler) else None


# edgekv power


def power_arguments(parser: argparse.ArgumentParser) -> None:
    meter = {"default": argparse.SUPPRESS, "dest": "power"}  # given before the action or after it
    seconds = option("N", "stop after N seconds (default: at Ctrl-C)", type=positive_number, default=math.inf)
    add_options(parser, "meter", meter=meter, seconds=seconds)
    parser.set_defaults(power=None, power_csv=None, device=None)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    about = "meter a command, write the samples as CSV, print a summary"
    record = actions.add_parser("record", help=about, allow_abbrev=False)
    samples = option("FILE", "write every sample: Unix time, watts, each rail's watts", type=output_file)
    idle = option("S", "seconds at rest before, to subtract (default: none)", type=float, default=0.0)
    add_options(record, "meter", meter=meter, csv=samples, idle=idle)
    record.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="a program, its arguments")
    record.set_defaults(execute=_record)
    about = "say which number of threads takes the fewest joules a token on a model, and what it costs in speed"
    advise = actions.add_parser("advise", help=about, description=about, allow_abbrev=False)
    seconds = option("S", "seconds of each stretch (default %(default)g)", type=positive_number, default=DECODE_S)
    modes = switch("try the modes of nvpmodel or cpufreq too; the present one comes back, also after Ctrl-C")
    add_options(advise, f"{SOURCE} weights kv ctx meter", meter=meter, seconds=seconds, modes=modes)
    advise.set_defaults(execute=_advise, device="cpu")
    about = "say which sensors are here and can be read, and how to get permission"
    actions.add_parser("doctor", help=about).set_defaults(execute=_doctor)
    parser.epilog = "edgekv power record --csv FILE -- COMMAND meters any program and passes its exit status on"


def power_command(arguments: argparse.Namespace) -> int:
    """Prints the power each second, on a terminal over the last one, for --seconds or until Ctrl-C."""
    source, seconds, height = energy_source(arguments), arguments.seconds, 0
    source.start()
    begun_s = now_s = time.perf_counter()
    if not isinstance(source, PowerSampler):  # once: it will not change
        seconds = 0
        redraw([*_power_lines(source, now_s, now_s), Conditions.now().to_text()], 0)
    with contextlib.suppress(KeyboardInterrupt):
        while now_s < begun_s + seconds:
            time.sleep(min(REFRESH_S, begun_s + seconds - now_s))
            now_s = time.perf_counter()
            lines = _power_lines(source, max(begun_s, now_s - SHOWN_S), now_s)
            height = redraw([*lines, Conditions.now().to_text()], height)
    source.stop()
    return 0


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
    sampler = energy_source(arguments)
    if arguments.csv and not isinstance(sampler, PowerSampler):
        advice = "leave --csv out to run the command without samples"
        raise PowerError(f"--csv {arguments.csv}: {sampler.about().covers}", advice=advice)
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
    if arguments.csv:
        assert isinstance(sampler, PowerSampler)
        atomic_write(arguments.csv, samples_csv(sampler.trace(), unix_offset_s).encode())
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


# edgekv power advise


Stretches = list[tuple[float, float]]
"""Joules per token and tokens per second of each stretch."""


def _advise(arguments: argparse.Namespace) -> int:
    """Decodes with each number of threads in each mode, in turns; prints which takes the fewest joules."""
    (meter, _), modes = find_power_meter(arguments), PowerModes.find()
    if arguments.modes and modes is None:
        raise PowerError("--modes: neither nvpmodel nor a governor of cpufreq can be chosen here; leave it out")
    model = Model.open(model_path(arguments), config=arguments.config)
    plan = SessionPlan.make(model, kv=arguments.kv, ctx=arguments.ctx, weights=arguments.weights)
    require_memory(plan.parts(), available_memory_bytes())
    cores, form, sampler = all_cores(), model.weight_format(plan.weights), PowerSampler(meter)
    numbers = range(1, cores + 1) if cores <= 8 else sorted(candidates(cores))
    names = [f" in mode {name}" for name in modes.names] if modes and arguments.modes else [""]
    found: dict[str, Stretches] = {f"--threads {n}{name}": [] for name in names for n in numbers}
    before = read_throttle()
    with Bars() as bars, terminable(), contextlib.ExitStack() as stack:
        decoders = [find_device("cpu").decoder(model, form, plan.ctx, n, bars.update) for n in numbers]
        if modes and arguments.modes:
            modes.apply(modes.now)  # a refusal comes before any work
            stack.callback(modes.apply, modes.now)
        sampler.start()
        stack.callback(sampler.stop)
        for i, stretches in enumerate(ROUNDS * list(found.values())):
            mode, k = divmod(i % len(found), len(decoders))
            if modes and arguments.modes and k == 0:
                modes.apply([modes.names[mode]] * len(modes.now))
                time.sleep(SETTLE_S)
            bars.update("metering", i, ROUNDS * len(found))
            stretches.append(timed_decode(decoders[k], plan, sampler, arguments.seconds))
    print(table(ADVICE, found.items()))
    rows = [("advice", advice(found)), ("measured", f"by {meter.name}: {meter.covers}")]
    if throttled := limits_between(before, read_throttle()):
        rows.append(("note", throttle_text(throttled)))
    if modes and not arguments.modes:
        rows.append(("modes", f"{modes.kind}: {', '.join(modes.names)}; now {modes.now[0]}; --modes tries them"))
    print_rows(rows)
    return 0


def timed_decode(
    decoder: Decoder, plan: SessionPlan, sampler: PowerSampler, seconds: float
) -> tuple[float, float]:
    """Returns joules per token and tokens per second. Raises PowerError where the meter does not know."""
    from edgekv.eval.bench import SchemeTimer

    depth = min(DEPTH, plan.ctx // 2)
    timer = SchemeTimer(decoder, plan.kv, depth, plan.ctx - depth)
    with blas_threads(1):
        sampler.mark()
        begun_s = now_s = time.perf_counter()
        while now_s < begun_s + seconds and len(timer.totals) < plan.ctx - depth - 1:
            timer.decode(1)
            now_s = time.perf_counter()
        sampler.mark()
    try:
        joules = sampler.window(begun_s, now_s).joules
    except PowerError as error:
        raise PowerError(f"{error}; measure longer: --seconds {2 * seconds:g}") from None
    return joules / len(timer.totals), len(timer.totals) / (now_s - begun_s)


def advice(found: Mapping[str, Stretches]) -> str:
    """Compares the setting of the fewest joules per token with the fastest one."""
    joules, speeds = ({name: median(s[i] for s in found[name]) for name in found} for i in (0, 1))
    best, fastest = min(found, key=joules.__getitem__), max(found, key=speeds.__getitem__)
    if best == fastest:
        return f"{best}: the fewest joules per token, and the fastest"
    if max(found[best])[0] >= min(found[fastest])[0]:
        return f"{fastest}: the fastest, and no other is surely below it in joules per token"
    saved, slower = 1 - joules[best] / joules[fastest], 1 - speeds[best] / speeds[fastest]
    return f"{best}: {saved:.0%} fewer joules per token than {fastest}, the fastest; {slower:.0%} fewer tokens/s"


ADVICE: dict[str, Callable[[tuple[str, Stretches]], str]] = {
    "setting": lambda row: row[0],
    "J per token": lambda row: f"{median(joules for joules, _ in row[1]):.4g}",
    "from": lambda row: f"{min(row[1])[0]:.4g}",
    "to": lambda row: f"{max(row[1])[0]:.4g}",
    "tokens/s": lambda row: f"{median(speed for _, speed in row[1]):.2f}",
}

# edgekv power doctor


def _doctor(arguments: argparse.Namespace) -> int:
    """Prints what can be measured here; returns 0 if anything can, else 1."""
    meters = survey()
    print_rows(diagnosis(meters))
    return 0 if any(isinstance(meter, PowerMeter) for meter in meters.values()) else 1


def diagnosis(meters: dict[str, PowerMeter | PowerError], root: Root = "/") -> list[tuple[str, str]]:
    """Returns (topic, text) of the board, each kind of sensor, permissions, and the one that is used."""
    try:
        member = grp.getgrnam(GROUP).gr_gid in {os.getegid(), *os.getgroups()}
        group = f"you are{'' if member else ' not'} in the group {GROUP}"
    except KeyError:
        group = f"there is no group {GROUP} on this system"
    rows = [
        ("board", machine_info(root)["board"] or "not named by the system"),
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
        verdict = f"run and serve use {usable[0]}" + (
            f"; also here: {', '.join(usable[1:])}" if usable[1:] else ""
        )
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
