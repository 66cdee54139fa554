"""`edgekv power doctor`: which sensors are here, which can be read, and how to get permission."""

from __future__ import annotations

import argparse
import grp
import os
from typing import Any

from edgekv.machine import machine_info
from edgekv.power import SurveyedMeter, survey
from edgekv.power.base import MeterRefused, Root
from edgekv.power.boards import find_board, power_file
from edgekv.power.conditions import throttle

RULE = "99-edgekv-power.rules"
GROUP = "video"


def add_doctor(actions: Any, name: str) -> None:
    """The action `doctor` of `edgekv power`."""
    parser = actions.add_parser(name, help="say which sensors are here and can be read, and how to get permission")
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    """0 if something can be measured, else 1."""
    findings = survey()
    print("\n".join(f"{topic:<12}{text}" for topic, text in diagnosis(findings)))
    return 0 if any(finding.meter for finding in findings) else 1


def diagnosis(findings: list[SurveyedMeter], root: Root = "/") -> list[tuple[str, str]]:
    """(topic, text): the board, every kind of sensor, permissions, and what --power would use."""
    rows = [("board", _board_text(root)), *((finding.name, _finding_text(finding)) for finding in findings)]
    rows.append(("throttling", "is reported here" if throttle(root) else "nothing here reports it"))
    rows.append(("group", _group_text()))
    if any(isinstance(finding.problem, MeterRefused) for finding in findings):
        rows += [("permission", line) for line in _rule_lines()]
    rows.append(("verdict", _verdict([finding.name for finding in findings if finding.meter])))
    return rows


def _board_text(root: Root) -> str:
    board, name = find_board(root), machine_info(root)["board"]
    return f"{name}: {board.to_text()}" if board else f"{name or 'not a known board'}: no profile"


def _finding_text(finding: SurveyedMeter) -> str:
    if finding.meter is None:
        return f"{'-- ' if not isinstance(finding.problem, MeterRefused) else '!! '}{finding.problem}"
    meter = finding.meter
    try:
        reading = meter.read()
    except (OSError, ValueError) as error:
        return f"ok, though it just failed once ({error})"
    watts = ", ".join(f"{rail} {value:.3g} W" for rail, value in reading.power_w.items())
    total = " + ".join(meter.total) if len(meter.total) <= 4 else f"all {len(meter.total)} rails"
    return f"ok {watts or ', '.join(meter.rails)}; total = {total}: {meter.covers}"


def _group_text() -> str:
    try:
        member = grp.getgrnam(GROUP).gr_gid in {os.getegid(), *os.getgroups()}
    except KeyError:
        return f"there is no group {GROUP} on this system"
    return f"you are{'' if member else ' not'} in the group {GROUP}"


def _rule_lines() -> list[str]:
    rule = power_file(RULE)
    if rule is None:
        return [f"{RULE} did not come with this installation: take it from the folder power/ of the source"]
    return [
        f"sudo cp {rule} /etc/udev/rules.d/",
        "sudo udevadm control --reload && sudo udevadm trigger",
        f"sudo usermod -aG {GROUP} $USER, then log in again",
    ]


def _verdict(usable: list[str]) -> str:
    if usable:
        return f"--power uses {usable[0]}" + (f"; also here: {', '.join(usable[1:])}" if usable[1:] else "")
    return "nothing can be measured here: use an external meter's log with --power-csv FILE"
