"""For mkdocs: a page may include a file of the repository, and what it links to outside of docs/ is no link.

`<!-- include: FILE -->` on a line of its own is replaced by the file, whose links are then those of its place.
"""

from __future__ import annotations

import pathlib
import posixpath
import re
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r"^<!-- include: (\S+) -->\n", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page as mkdocs is to read it. mkdocs calls this with every page."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    whole = INCLUDE.sub(lambda line: included(line[1], folder), markdown)
    return LINK.sub(lambda link: within(link, folder), whole)


def included(name: str, folder: str) -> str:
    """A file's text, with its links, from the root, as links from ``folder``."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if not name.endswith(".md"):
        return text
    place = posixpath.dirname(name)
    return LINK.sub(lambda link: moved(link, place, folder), text)


def moved(link: re.Match[str], place: str, folder: str) -> str:
    """A link of a document in ``place``, for one in ``folder``."""
    text, target, anchor = link.groups()
    if "://" in target:
        return link[0]
    return f"[{text}]({posixpath.relpath(posixpath.join(place, target), folder)}{anchor or ''})"


def within(link: re.Match[str], folder: str) -> str:
    """The link, or its text where it leads out of docs/."""
    text, target, _ = link.groups()
    if "://" in target or posixpath.normpath(posixpath.join(folder, target)).startswith("docs/"):
        return link[0]
    return text if "`" in text else f"{text} (`{posixpath.normpath(posixpath.join(folder, target))}`)"
