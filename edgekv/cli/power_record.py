"""`edgekv power record --csv FILE -- COMMAND`: meters any program; its exit status is passed on."""

from __future__ import annotations

import argparse
import csv
import io
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

from edgekv.cli.metering import add_meter_options, open_sampler
from edgekv.cli.output import output_file
from edgekv.cli.plots import plot_power, require_matplotlib
from edgekv.errors import PowerError
from edgekv.files import atomic_write
from edgekv.machine import format_bytes, peak_rss_bytes
from edgekv.power import EnergyMeter, PowerSampler
from edgekv.power.source import Unmetered
from edgekv.power.trace import Trace

PHASE = "command"


def add_record(actions: Any, name: str) -> None:
    """The action `record` of `edgekv power`."""
    parser = actions.add_parser(
        name, help="meter a command, write the samples as CSV, print a summary", allow_abbrev=False
    )
    add_meter_options(parser)
    parser.add_argument(
        "--csv", type=output_file, metavar="FILE", help="write every sample: Unix time, watts, each rail's watts"
    )
    parser.add_argument(
        "--idle", type=float, default=0.0, metavar="S", help="seconds at rest before, to subtract (default: none)"
    )
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="a program, its arguments")
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    command = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    if not command:
        raise PowerError("power record: no command; give it after --, as in edgekv power record -- sleep 5")
    picture = getattr(arguments, "plot", None)
    if picture:
        require_matplotlib()
    sampler = _open(arguments)
    unix_offset_s = time.time() - time.perf_counter()
    with EnergyMeter(sampler, idle_s=arguments.idle) as meter:
        child = _start(command)
        with meter.phase(PHASE):
            _wait(child)
    _, wait_status, usage = os.wait4(child.pid, 0)
    child.returncode = code = os.waitstatus_to_exitcode(wait_status)
    if arguments.csv and isinstance(sampler, PowerSampler):
        atomic_write(arguments.csv, samples_csv(sampler.trace(), unix_offset_s).encode())
    if picture and isinstance(sampler, PowerSampler):
        plot_power(sampler.trace(), picture)
    report = meter.report()
    rows = [("time", f"{report.phases[PHASE].seconds:.2f} s"), *report.rows()]
    rows.append(("used", f"{usage.ru_utime + usage.ru_stime:.2f} s of processor time, peak RSS {_peak(usage)}"))
    print("\n".join(f"{topic:<12}{text}" for topic, text in rows), file=sys.stderr)
    return code if code >= 0 else 128 - code  # as shells report a signal


def _open(arguments: argparse.Namespace) -> PowerSampler | Unmetered:
    """The meter; where there is none, and none was asked for by name, what says why the energy is n/a."""
    try:
        return open_sampler(arguments)
    except PowerError as error:
        if getattr(arguments, "meter", "auto") != "auto":
            raise
        for name in ("csv", "plot"):
            if path := getattr(arguments, name, None):
                raise PowerError(f"--{name} {path}: there would be nothing in it: {error}") from None
        return Unmetered(str(error))


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command)
    except OSError as error:
        raise PowerError(f"{command[0]}: can't be run ({error.strerror}); give a program that exists") from None


def _wait(child: subprocess.Popen[bytes]) -> None:
    """Until it ends, leaving it to be reaped. Ctrl-C reaches the program itself, which decides what to do."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    finally:
        signal.signal(signal.SIGINT, before)


def _peak(usage: Any) -> str:
    """A child's mark begins at its parent's, so that a smaller program's own is not known."""
    mark, ours = usage.ru_maxrss * 1024, peak_rss_bytes()
    return format_bytes(mark) if mark > ours else f"at most {format_bytes(ours)}"


def samples_csv(trace: Trace, unix_offset_s: float) -> str:
    """A line per sample; an energy counter's watts are the mean since the sample before.

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
