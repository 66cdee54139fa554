"""Rewrite the parts of the site that come from the code and from docs/data: schemes, command line, the picture.

usage: python tools/site_pages.py [--check]     (--check: exit 1 when a page is out of date)
       python tools/site_pages.py --picture     (draws docs/pictures/schemes.svg; needs matplotlib)
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

from pages import rewrite
from schemes import schemes_table, short_table

from edgekv.cli import parser

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"(<!-- (\w+): written by tools/site_pages\.py -->\n).*?(<!-- /\2 -->)", re.DOTALL)
PICTURE = DOCS / "pictures" / "schemes.svg"


def commands_text() -> str:
    """Every command, with what its --help says of it and of its options."""
    lines: list[str] = []
    for name, sub in subcommands(parser()):
        lines += [f"## edgekv {name}", "", f"{sentence(sub.description)}", ""]
        rows = [(_shown(action), _help(sub, action)) for action in sub._actions if action.help and _shown(action)]
        if rows:
            lines += ["| option | |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows), ""]
    return "\n".join(lines)


def subcommands(top: argparse.ArgumentParser, before: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """By name, those of a command behind it."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield f"{before}{name}", sub
                yield from subcommands(sub, f"{before}{name} ")


def sentence(text: str | None) -> str:
    """With a capital and a full stop."""
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _shown(action: argparse.Action) -> str:
    """The option as it is typed; "" for --help and for what chooses a command."""
    if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
        return ""
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    value = "" if action.nargs == 0 else f" {_metavar(action)}"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def _metavar(action: argparse.Action) -> str:
    name = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    name = " ".join(name) if isinstance(name, tuple) else name
    return f"[{name}]" if action.nargs == "?" else name


def _help(sub: argparse.ArgumentParser, action: argparse.Action) -> str:
    facts = vars(action) | {"prog": sub.prog}
    text = (action.help or "") % facts
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


PARTS: dict[str, Callable[[], str]] = {"schemes": schemes_table, "best": short_table, "commands": commands_text}
PAGES = (DOCS / "schemes.md", DOCS / "reference" / "commands.md")


def updated(text: str) -> str:
    """A page's text with each of PARTS written anew."""
    return BLOCK.sub(lambda block: block[1] + PARTS[block[2]]() + block[3], text)


def main() -> int:
    """Writes or checks PAGES."""
    if "--picture" in sys.argv[1:]:
        from schemes_picture import draw

        draw(PICTURE)
        return 0
    return max([rewrite(page, updated) for page in PAGES])


if __name__ == "__main__":
    sys.exit(main())
