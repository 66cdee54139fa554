"""`edgekv board`: measures this machine in about ten minutes and writes a page that others can compare."""

from __future__ import annotations

import argparse
import contextlib
import pathlib

import msgspec

from edgekv.checkpoint.shipped import read_shape
from edgekv.cli.options import add, option, yes
from edgekv.cli.terminal import Bars, say
from edgekv.errors import ConfigError
from edgekv.files import atomic_write, require_writable, user_path
from edgekv.power.board import FULL, NO_TIME, QUICK, Board, Plan, Run, add_log, open_meter
from edgekv.power.board_page import page
from edgekv.power.sampler import read_log

MINUTES = 10.0


def board_arguments(parser: argparse.ArgumentParser) -> None:
    add(
        parser,
        "shape threads",
        output=option("FOLDER", "where MACHINE.json and MACHINE.md go (default: here)", default="."),
        minutes=option(
            "N", "for this run; the next one goes on (default %(default)g)", type=float, default=MINUTES
        ),
        about=option("TEXT", "cooling, case, power supply, room: what no file says"),
        shape=option("LIST", f"shapes, the smallest first (default {','.join(FULL.shapes)})"),
        threads="cores to use (default: chosen at load)",
        quick=yes("a smoke test of half a minute on a tiny model"),
        again=yes("begin anew, not where an earlier run ended"),
    )
    log = "energies from an external meter's log of this run, or of a finished one"
    add(parser.add_mutually_exclusive_group(), "power power_csv", power_csv=log)


def board_command(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.minutes <= 1e5:
        raise ConfigError(f"--minutes {arguments.minutes:g}: accepted are minutes above 0")
    source, meter = open_meter(arguments.power)
    board = _new_board(arguments, meter)
    folder = user_path(arguments.output)
    path, text = folder / f"{board.slug}.json", folder / f"{board.slug}.md"
    with contextlib.suppress(OSError):  # `require_writable` says why
        folder.mkdir(parents=True, exist_ok=True)
    for each in (path, text):
        require_writable(each)
    if arguments.power_csv is not None:
        read_log(user_path(arguments.power_csv))
    if path.exists() and not arguments.again:
        board = _continued(path, board, arguments)
    try:
        with Bars() as bars:
            Run(board, path, source, 60 * arguments.minutes, say, bars.update).go()
    finally:
        atomic_write(text, page(board).encode())
    if arguments.power_csv:
        add_log(board, arguments.power_csv)
        board.save(path)
        atomic_write(text, page(board).encode())
    print(f"{path}\n{text}")
    later = sum(left.why == NO_TIME for left in board.left_out)
    if later:
        say(f"{later} measurements were left out for the time; the same command goes on with them")
    return 0


def _new_board(arguments: argparse.Namespace, meter: str) -> Board:
    plan = QUICK if arguments.quick else FULL
    if arguments.shape:
        plan = msgspec.structs.replace(plan, shapes=tuple(arguments.shape.split(",")))
    for shape in plan.shapes:
        read_shape(shape)
    plan = msgspec.structs.replace(plan, threads=arguments.threads)
    return Board.new(plan, arguments.about or "", meter)


def _continued(path: pathlib.Path, new: Board, arguments: argparse.Namespace) -> Board:
    """The board of an earlier run. Raises ConfigError where it is of another machine, version or plan."""
    board = Board.load(path)
    for name, before, now in (
        ("machine", board.machine, new.machine),
        ("plan", _plan_text(board.plan), _plan_text(new.plan)),
    ):
        if before != now:
            raise ConfigError(
                f"{path}: was measured with another {name} ({before}, now {now}); begin anew with "
                "--again, or give another --output"
            )
    if arguments.about:
        board.surroundings = new.surroundings
    return board


def _plan_text(plan: Plan) -> str:
    return f"{','.join(plan.shapes)}; threads {plan.threads or 'chosen'}; {plan.seconds:g} s each"
