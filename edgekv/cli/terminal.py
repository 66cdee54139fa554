"""What goes out: text of which no character commands a terminal, tables, progress, files; and Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TextIO

from edgekv.errors import EdgeKVError
from edgekv.files import atomic_write

WIDTH = 100  # of tables, in characters
COUNTED_IN_BYTES = ("quantizing", "converting", "hashing")
PREFILL = "prefill"
PICTURES = (".png", ".svg", ".pdf")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def visible(text: str) -> str:
    """Writes out control characters but newline and tab, as \\x1b: a terminal would obey them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Makes `visible`, newlines and tabs too: errors may hold any name."""
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
    """Returns the stream behind `visible_terminals`."""
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


def say(text: str) -> None:
    """Prints a line of our own on standard error."""
    print(f"edgekv: {text}", file=sys.stderr, flush=True)


def print_rows(rows: Sequence[tuple[str, str]], file: TextIO | None = None) -> None:
    """Prints a line per topic."""
    print("\n".join(f"{topic:<12}{text}" for topic, text in rows), file=file)


def fitted(rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Aligns cells to lines; the last column is cut so that a line has WIDTH characters.

    left: columns that begin where they do; the others end there.
    """
    rows, lines = list(rows), []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        line = "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(cells)).rstrip()
        lines.append(line if len(line) <= WIDTH else line[: WIDTH - 3].rstrip() + "...")
    return "\n".join(lines)


def table(columns: Mapping[str, Callable[[Any], str]], items: Iterable[Any]) -> str:
    """Returns a line of the columns' names and one for each item."""
    return fitted([list(columns), *([show(item) for show in columns.values()] for item in items)])


def write_json(path: str, facts: Any) -> None:
    """Writes JSON, dataclasses included, whole or not at all. Raises CheckpointError where it can't be written."""
    atomic_write(path, (json.dumps(facts, indent=1, default=dataclasses.asdict) + "\n").encode())


Line = tuple[str, Any, Any]
"""A label, and its points' places along x and y: (n,) each."""


def require_matplotlib() -> None:
    """Raises EdgeKVError where it is missing: to be called before the work."""
    try:
        import matplotlib
    except ImportError:
        raise EdgeKVError("--plot needs matplotlib: pip install 'edgekv[plot]'") from None
    matplotlib.use("Agg")


def plot(path: str, lines: Sequence[Line], **axes_settings: Any) -> None:
    """Draws lines with a legend, in the format that the file's name ends with; axes_settings: of `Axes.set`."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    try:
        for label, x, y in lines:
            axes.plot(x, y, "o-" if len(x) < 10 else "-", linewidth=1, markersize=5, label=label)
        axes.set(**axes_settings)
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
        data = io.BytesIO()
        figure.savefig(data, format=os.path.splitext(path)[1][1:], dpi=150, bbox_inches="tight")
        atomic_write(path, data.getvalue())
    finally:
        pyplot.close(figure)


class Bars:
    """Progress on standard error, one task at a time; nothing where it is piped."""

    _task, _bar = "", None

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def update(self, task: str, done: int, total: int) -> None:
        """Shows a task at ``done`` of ``total``; another task's bar is closed."""
        if not sys.stderr.isatty():
            return
        if task != self._task or self._bar is None:
            from tqdm import tqdm

            self._close()
            unit = "B" if task in COUNTED_IN_BYTES else " tokens" if task == PREFILL else ""
            self._bar = tqdm(total=total, desc=task, unit=unit, unit_scale=unit == "B", leave=False)
            self._task = task
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._close()

    def prefill(self, n_tokens: int, layer: int, n_layers: int) -> None:
        """Shows a prompt of ``n_tokens``, of which ``layer`` of ``n_layers`` are through, in tokens."""
        self.update(PREFILL, n_tokens * layer // n_layers, n_tokens)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is to end a command as Ctrl-C does."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Inside the block SIGTERM raises Terminated."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Interrupt:
    """Inside the block the first Ctrl-C sets `requested`; a second one raises KeyboardInterrupt as usual.

    A step that is torn in two leaves some layers a token ahead, which costs some schemes their whole cache.
    """

    requested = False

    def __enter__(self) -> Interrupt:
        self._before: Any = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raises KeyboardInterrupt if it was requested: between the layers of a prompt."""
        if self.requested:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.check()
        self.requested = True
