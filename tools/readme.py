"""Rewrite the part of README.md that comes from the code: the table of commands.

usage: python tools/readme.py [--check]     (--check: exit 1 when the README is out of date)
"""

import argparse
import pathlib
import re
import sys

from pages import rewrite

from edgekv.cli import parser

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- commands: [^\n]*-->\n).*?(<!-- /commands -->)", re.DOTALL)


def commands_table() -> str:
    """A row per command, with what its help says."""
    rows = ["| `edgekv ...` | |", "|---|---|"]
    for action in parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            rows += [f"| `{choice.dest}` | {choice.help} |" for choice in action._choices_actions]
    return "\n".join(rows) + "\n"


def updated(text: str) -> str:
    """The README's text with the table written anew."""
    return BLOCK.sub(lambda match: match[1] + commands_table() + match[2], text)


if __name__ == "__main__":
    sys.exit(rewrite(README, updated))
