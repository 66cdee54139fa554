"""`edgekv power`: what the machine draws, live or as JSON. Its actions are in files of their own."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

from edgekv.cli.metering import add_meter_options, open_sampler
from edgekv.cli.options import Command
from edgekv.cli.output import redraw
from edgekv.cli.plots import plot_power, require_matplotlib
from edgekv.cli.power_doctor import add_doctor
from edgekv.cli.power_record import add_record
from edgekv.errors import PowerError
from edgekv.machine import machine_info
from edgekv.power import PowerSampler
from edgekv.power.conditions import Conditions
from edgekv.power.source import MeterInfo, PowerSource, Unmetered
from edgekv.power.trace import Window

ACTIONS = {"record": add_record, "doctor": add_doctor}
JSON_SECONDS = 10.0
REFRESH_S = 1.0


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_meter_options(parser)
    parser.add_argument("--json", action="store_true", help="print a summary as JSON at the end")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help=f"stop after N seconds (default: at Ctrl-C; with --json {JSON_SECONDS:g})",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for name, add in ACTIONS.items():
        add(actions, name)
    parser.epilog = "edgekv power record --csv FILE -- COMMAND meters any program and passes its exit status on"


def _execute(arguments: argparse.Namespace) -> int:
    seconds = arguments.seconds
    if seconds is not None and not seconds > 0:
        raise PowerError(f"--seconds {seconds:g}: accepted: more than 0")
    picture = getattr(arguments, "plot", None)
    if picture:
        require_matplotlib()
    source = _open(arguments)
    if picture and not isinstance(source, PowerSampler):
        raise PowerError(f"--plot {picture}: there would be nothing in it; `edgekv power doctor` says why")
    if arguments.json:
        _print_json(source, seconds or JSON_SECONDS)
    else:
        _print_live(source, seconds)
    if picture and isinstance(source, PowerSampler):
        plot_power(source.trace(), picture)
    return 0


def _open(arguments: argparse.Namespace) -> PowerSource:
    """The sampler, or what says why there is none: temperature and clocks are shown all the same."""
    try:
        return open_sampler(arguments)
    except PowerError as error:
        if getattr(arguments, "meter", "auto") != "auto":
            raise
        return Unmetered(str(error))


def _print_json(source: PowerSource, seconds: float) -> None:
    source.start()
    begun_s, before = time.perf_counter(), Conditions.now()
    _wait(seconds)
    ended_s, after = time.perf_counter(), Conditions.now()
    source.stop()
    facts: dict[str, Any] = {
        "meter": dataclasses.asdict(source.about()),
        "power": None,
        "reason": None,
        "before": before.as_dict(),
        "after": after.as_dict(),
        "machine": machine_info(),
    }
    try:
        facts["power"] = dataclasses.asdict(source.window(begun_s, ended_s))
    except PowerError as error:
        facts["reason"] = str(error)
    print(json.dumps(facts, indent=2))


def _print_live(source: PowerSource, seconds: float | None) -> None:
    """A block of lines each second, over the last one where the output is a terminal."""
    source.start()
    begun_s = time.perf_counter()
    if isinstance(source, Unmetered):  # once: it will not change
        print("\n".join([*_power_lines(source, begun_s, begun_s), Conditions.now().to_text()]))
        return
    height = 0
    for elapsed_s in _ticks(seconds):
        now_s = begun_s + elapsed_s
        lines = [*_power_lines(source, max(begun_s, now_s - REFRESH_S), now_s), Conditions.now().to_text()]
        height = redraw(lines, height)
    source.stop()


def _ticks(seconds: float | None) -> Iterator[float]:
    """Seconds since the start, about once per REFRESH_S until ``seconds`` or Ctrl-C."""
    begun_s = time.perf_counter()
    left = seconds
    while left is None or left > 0:
        if not _wait(REFRESH_S if left is None else min(left, REFRESH_S)):
            return
        elapsed_s = time.perf_counter() - begun_s
        left = None if seconds is None else seconds - elapsed_s
        yield elapsed_s


def _wait(seconds: float) -> bool:
    """Whether the time passed without Ctrl-C."""
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        return False
    return True


def _power_lines(source: PowerSource, start_s: float, end_s: float) -> list[str]:
    about = source.about()
    try:
        window = source.window(start_s, end_s)
    except PowerError as error:
        return [f"{about.meter or 'power'}  n/a: {error}"]
    return _window_lines(about, window)


def _window_lines(about: MeterInfo, window: Window) -> list[str]:
    head = f"{about.meter}  {window.average_w:.2f} W"
    if about.correction:
        head += f", {about.correction.joules(window.joules, window.seconds) / window.seconds:.2f} W at the wall"
    lines = [f"{head}  (peak {window.peak_w:.2f} W, {window.rate_hz:.0f} Hz)"]
    width = max(len(rail) for rail in about.rails)
    for rail, joules in window.rails_j.items():
        part = "" if rail in about.total else "  (not in the total)"
        lines.append(f"  {rail:<{width}}  {joules / window.seconds:.3f} W{part}")
    return lines


POWER = Command("show what this machine draws; meter any command; say what can be measured", _arguments, _execute)
