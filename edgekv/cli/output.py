"""What goes out: text to the terminal, of which no character commands it, and files, asked for before the work."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from edgekv.errors import ConfigError
from edgekv.files import atomic_write, require_writable

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
PICTURES = (".png", ".svg", ".pdf")


def visible(text: str) -> str:
    """The text with control characters but newline and tab written out: \\x1b. A terminal would obey them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """`visible`, and newlines and tabs too: of errors, which may hold any name."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


class _Terminal:
    """A terminal's stream that is written `visible` text; ``raw`` is the stream itself, for what moves the cursor.

    returns: the carriage return that a write begins with is kept: progress bars are drawn with it.
    """

    def __init__(self, raw: TextIO, returns: bool) -> None:
        self.raw, self._returns = raw, returns

    def write(self, text: str) -> int:
        kept = "\r" if self._returns and text.startswith("\r") else ""
        self.raw.write(kept + visible(text[len(kept) :]))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw(stream: TextIO) -> TextIO:
    """The stream behind `visible_terminals`."""
    return stream.raw if isinstance(stream, _Terminal) else stream


@contextlib.contextmanager
def visible_terminals() -> Iterator[None]:
    """Inside the block standard output and error, where they are terminals, are written `visible` text.

    To a file or a pipe text goes as it is; what its encoding lacks is written out.
    """
    before = sys.stdout, sys.stderr
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    streams: list[Any] = [
        _Terminal(stream, stream is sys.stderr) if stream.isatty() else stream for stream in before
    ]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def redraw(lines: list[str], height: int) -> int:
    """Prints lines, on a terminal over the last ``height`` ones; returns how many there are now."""
    if height and sys.stdout.isatty():
        raw(sys.stdout).write(f"\x1b[{height}A\x1b[J")
    print("\n".join(lines), flush=True)
    return len(lines)


def output_file(path: str) -> str:
    """For argparse: a file that can be written. Raises CheckpointError, before anything is done."""
    require_writable(path)
    return path


def picture_file(path: str) -> str:
    """For argparse: `output_file` of a picture. Raises ConfigError for another kind."""
    if os.path.splitext(path)[1].lower() not in PICTURES:
        raise ConfigError(f"{path}: is no picture; accepted: names that end in {', '.join(PICTURES)}")
    return output_file(path)


def write_json(path: str, facts: Any) -> None:
    """Whole or not at all. Raises CheckpointError where it can't be written."""
    atomic_write(path, (json.dumps(facts, indent=1) + "\n").encode())
