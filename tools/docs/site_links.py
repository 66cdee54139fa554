"""Makes pages of files outside docs/ and of the command line's help for mkdocs, and mends links across them.

README.md, CONTRIBUTING.md, SECURITY.md and CHANGELOG.md become pages, and so does every command's --help.
A link that leads out of docs/ to another file becomes plain text. `<!-- include: FILE -->` on a line of its own is
replaced by the file.
"""

from __future__ import annotations

import argparse
import pathlib
import posixpath
import re
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
}
INCLUDE = re.compile(r"^<!-- include: (\S+) -->\n", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the generated pages. mkdocs calls this once, with the files of docs/."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=from_root((ROOT / name).read_text(encoding="utf-8"))))
    files.append(File.generated(config, "commands.md", content="# Command line\n\n" + commands_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Returns a page's text as mkdocs is to read it. mkdocs calls this with every page."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    whole = INCLUDE.sub(lambda line: (ROOT / line[1]).read_text(encoding="utf-8"), markdown)
    return LINK.sub(lambda link: within(link, folder), whole)


def from_root(text: str) -> str:
    """Returns the text of a file of the root with its links as they are from docs/."""

    def moved(link: re.Match[str]) -> str:
        mark, words, target, anchor = link.groups()
        if "://" in target:
            return link[0]
        return f"{mark}[{words}]({posixpath.relpath(target, 'docs')}{anchor or ''})"

    return LINK.sub(moved, text)


def within(link: re.Match[str], folder: str) -> str:
    """Returns the link, led to a page of PAGES where it names such a file; its text where it leads out."""
    mark, words, target, anchor = link.groups()
    place = posixpath.normpath(posixpath.join(folder, target))
    if "://" in target or place.startswith("docs/"):
        return link[0]
    if place in PAGES:
        return f"{mark}[{words}]({posixpath.relpath('docs/' + PAGES[place], folder)}{anchor or ''})"
    return words if "`" in words else f"{words} (`{place}`)"


def commands_text() -> str:
    """Returns a section for every command: what its --help says of it and of its options."""
    from edgekv.cli import build_parser

    lines: list[str] = []
    for name, sub in subcommands(build_parser()):
        about = sub.description or ""
        lines += [f"## edgekv {name}", "", f"{about[:1].upper()}{about[1:]}." if about else "", ""]
        rows = [(_show(action), _help(sub, action)) for action in sub._actions if action.help and _show(action)]
        if rows:
            lines += ["| option | |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows), ""]
    return "\n".join(lines)


def subcommands(top: argparse.ArgumentParser, before: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields every command by its name, a command's own ones behind it."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield f"{before}{name}", sub
                yield from subcommands(sub, f"{before}{name} ")


def _show(action: argparse.Action) -> str:
    """Returns the option as it is typed; "" for --help and for what chooses a command."""
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
    text = (action.help or "") % (vars(action) | {"prog": sub.prog})
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
