"""The command line: parses, runs one command, turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from edgekv.cli.bench import BENCH
from edgekv.cli.budget import BUDGET
from edgekv.cli.caches import CACHES
from edgekv.cli.chat import CHAT
from edgekv.cli.completion import add_completion
from edgekv.cli.demo import DEMO
from edgekv.cli.evaluate import EVAL
from edgekv.cli.flags import in_flags
from edgekv.cli.info import INFO
from edgekv.cli.power import POWER
from edgekv.cli.pull import PULL
from edgekv.cli.quantize import QUANTIZE
from edgekv.cli.run import RUN
from edgekv.cli.serve import SERVE
from edgekv.errors import EdgeKVError
from edgekv.version import __version__

COMMANDS = {
    "run": RUN,
    "demo": DEMO,
    "chat": CHAT,
    "serve": SERVE,
    "pull": PULL,
    "info": INFO,
    "budget": BUDGET,
    "caches": CACHES,
    "quantize": QUANTIZE,
    "eval": EVAL,
    "bench": BENCH,
    "power": POWER,
}


def parser() -> argparse.ArgumentParser:
    """The whole command line: a subcommand for each of COMMANDS."""
    main_parser = argparse.ArgumentParser(
        prog="edgekv",
        description="Run Llama- and GPT-2-style models with long contexts on small machines.",
    )
    main_parser.add_argument("--version", action="version", version=f"edgekv {__version__}")
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        command.add_arguments(sub)
        sub.set_defaults(execute=command.execute)
    add_completion(commands, main_parser)
    return main_parser


def _drop_output() -> None:
    """What is left for standard output goes nowhere: Python would try again, and complain, when it ends."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.close(descriptor)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 2 for bad input (one line on stderr), 130 after Ctrl-C."""
    arguments = parser().parse_args(argv)
    try:
        status: int = arguments.execute(arguments)
        sys.stdout.flush()
    except EdgeKVError as error:
        print(f"edgekv: error: {in_flags(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away
        _drop_output()
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            raise
        _drop_output()
        print(
            f"edgekv: error: standard output can't be written ({error.strerror}): make room, or redirect it",
            file=sys.stderr,
        )
        return 2
    return status
