"""`edgekv completion SHELL`: a script that completes commands, options and files on the TAB key."""

from __future__ import annotations

import argparse
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")
HINT = 'to use it at once: eval "$(edgekv completion bash)"; or write it where your shell looks for them'


def add_completion(commands: Any, whole: argparse.ArgumentParser) -> None:
    """The command, which needs the parser of all the others."""
    help_text = "print a script for your shell's TAB key"
    parser = commands.add_parser("completion", help=help_text, description=help_text, epilog=HINT)
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(execute=lambda arguments: _print(whole, arguments.shell))


def _print(whole: argparse.ArgumentParser, shell: str) -> int:
    import shtab

    _complete_files(whole, shtab.FILE)
    print(shtab.complete(whole, shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: dict[str, str]) -> None:
    """Options whose value is a file or a folder complete as one."""
    for action in parser._actions:
        if action.metavar in ("FILE", "PATH", "FOLDER"):
            action.complete = files  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                _complete_files(sub, files)
