"""`edgekv board`: measures this machine in about ten minutes and writes a page that others can compare."""

from __future__ import annotations

import argparse
import contextlib

import msgspec

from edgekv.checkpoint.hub import read_shape
from edgekv.cli.options import add_options, option, switch
from edgekv.cli.power import energy_source
from edgekv.cli.terminal import Bars, say
from edgekv.errors import ConfigError
from edgekv.eval.board import FULL, NO_TIME, QUICK, Board, Run, page
from edgekv.files import atomic_write, require_writable, user_path

MINUTES = 10.0


def board_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        "shape threads power",
        output=option("FOLDER", "where MACHINE.json and MACHINE.md go (default: here)", default="."),
        minutes=option(
            "N", "for this run; the next one goes on (default %(default)g)", type=float, default=MINUTES
        ),
        about=option("TEXT", "cooling, case, power supply, room: what no file says"),
        shape=option("LIST", f"shapes, the smallest first (default {','.join(FULL.shapes)})"),
        threads="cores to use (default: chosen at load)",
        quick=switch("a smoke test of half a minute on a tiny model"),
        again=switch("begin anew, not where an earlier run ended"),
    )
    parser.set_defaults(device="cpu", power_csv=None)


def board_command(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.minutes <= 1e5:
        raise ConfigError(f"--minutes {arguments.minutes:g}: accepted are minutes above 0")
    plan = msgspec.structs.replace(QUICK if arguments.quick else FULL, threads=arguments.threads)
    if arguments.shape:
        plan = msgspec.structs.replace(plan, shapes=tuple(arguments.shape.split(",")))
    for shape in plan.shapes:
        read_shape(shape)
    source = energy_source(arguments)
    about = source.about()
    board = Board.new(plan, arguments.about or "", f"{about.meter or 'none'}: {about.covers}")
    folder = user_path(arguments.output)
    path, text = folder / f"{board.slug}.json", folder / f"{board.slug}.md"
    with contextlib.suppress(OSError):  # `require_writable` says why
        folder.mkdir(parents=True, exist_ok=True)
    for file in (path, text):
        require_writable(file)
    if path.exists() and not arguments.again:
        earlier = Board.load(path)
        for name in ("machine", "plan"):
            if getattr(earlier, name) != getattr(board, name):
                raise ConfigError(
                    f"{path}: was measured with another {name} ({getattr(earlier, name)}, now "
                    f"{getattr(board, name)}); begin anew with --again, or give another --output"
                )
        environment = board.environment if arguments.about else earlier.environment
        meter = board.meter if about.meter else earlier.meter
        board = msgspec.structs.replace(earlier, environment=environment, meter=meter)
    try:
        with Bars() as bars:
            Run(board, path, source, 60 * arguments.minutes, say, bars.update).go()
    finally:
        atomic_write(text, page(board).encode())
    print(f"{path}\n{text}")
    if n_left_out := sum(skipped.why == NO_TIME for skipped in board.left_out):
        say(f"{n_left_out} measurements were left out for the time; the same command goes on with them")
    return 0
