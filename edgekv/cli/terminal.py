"""Output of the commands: escaped text, tables, plots, progress bars and files; and the handling of Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TextIO

from edgekv.errors import EdgeKVError
from edgekv.files import atomic_write

WIDTH = 100  # of tables, in characters
COUNTED_IN_BYTES = ("quantizing", "converting", "hashing")
PREFILL = "prefill"
BAR_DELAY_S = 0.4  # of a task, before which its bar is not drawn
NOTICE_S, REPEAT_S = 2.0, 30.0  # of a task, after which a line says that it goes on; and between such lines
PICTURES = (".png", ".svg", ".pdf")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Returns the text with control characters escaped (\\x1b), but newline and tab."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Returns the text with all control characters escaped, newlines and tabs too: errors may hold any name."""
    return escape_controls(text).replace("\n", "\\n").replace("\t", "\\t")


class _Terminal:
    """A terminal's stream that escapes what is written to it (`escape_controls`).

    raw: the stream itself, to move the cursor. returns: whether a carriage return at the beginning stays, with
    which progress bars are drawn.
    """

    def __init__(self, raw: TextIO, returns: bool) -> None:
        self.raw, self._returns = raw, returns

    def write(self, text: str) -> int:
        start = "\r" if self._returns and text.startswith("\r") else ""
        self.raw.write(start + escape_controls(text[len(start) :]))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw_stream(stream: TextIO) -> TextIO:
    """Returns the stream behind `visible_terminals`."""
    return stream.raw if isinstance(stream, _Terminal) else stream


@contextlib.contextmanager
def visible_terminals() -> Iterator[None]:
    """Escapes text for terminals (`escape_controls`) on standard output and error, inside the block.

    Files and pipes get the text as it is, with escapes for characters that their encoding lacks.
    """
    streams_before = sys.stdout, sys.stderr
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    streams: list[Any] = [
        _Terminal(stream, stream is sys.stderr) if stream.isatty() else stream for stream in streams_before
    ]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams_before


def redraw(lines: list[str], height: int) -> int:
    """Prints lines, on a terminal over the last ``height`` lines; returns their number."""
    if height and sys.stdout.isatty():
        raw_stream(sys.stdout).write(f"\x1b[{height}A\x1b[J")
    print("\n".join(lines), flush=True)
    return len(lines)


def say(text: str) -> None:
    """Prints a line on standard error."""
    print(f"edgekv: {text}", file=sys.stderr, flush=True)


def print_rows(rows: Sequence[tuple[str, str]], file: TextIO | None = None) -> None:
    """Prints a line per topic."""
    print("\n".join(f"{topic:<12}{text}" for topic, text in rows), file=file)


def align_columns(rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Returns rows of cells as aligned lines, cut to WIDTH characters.

    left: the columns that are aligned on the left; others are aligned on the right.
    """
    rows, lines = list(rows), []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        line = "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(cells)).rstrip()
        lines.append(line if len(line) <= WIDTH else line[: WIDTH - 3].rstrip() + "...")
    return "\n".join(lines)


def table(columns: Mapping[str, Callable[[Any], str]], items: Iterable[Any]) -> str:
    """Returns a table with a heading and a line per item. columns: a function from item to text, by heading."""
    return align_columns([list(columns), *([show(item) for show in columns.values()] for item in items)])


def write_json(path: str, facts: Any) -> None:
    """Writes JSON, dataclasses included, whole or not at all. Raises CheckpointError where it can't be written."""
    atomic_write(path, (json.dumps(facts, indent=1, default=dataclasses.asdict) + "\n").encode())


Line = tuple[str, Any, Any]
"""A label, and coordinates x and y (n,)."""


def require_matplotlib() -> None:
    """Raises EdgeKVError if matplotlib is missing; call it before long work."""
    try:
        import matplotlib
    except ImportError:
        raise EdgeKVError("--plot needs matplotlib: pip install 'edgekv[plot]'") from None
    matplotlib.use("Agg")


def plot(path: str, lines: Sequence[Line], **axes_settings: Any) -> None:
    """Draws lines with a legend to a file, in the format of its suffix. axes_settings: arguments of `Axes.set`."""
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
    """A progress bar on standard error, for one task at a time; if that is no terminal, lines for a long task."""

    _task, _bar, _due_s = "", None, 0.0

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def update(self, task: str, done: int, total: int) -> None:
        """Shows that ``done`` of ``total`` steps of a task are done, and closes the bar of another task."""
        if not sys.stderr.isatty():
            if task != self._task:
                self._task, self._due_s = task, time.monotonic() + NOTICE_S
            elif task != PREFILL and time.monotonic() > self._due_s:
                say(f"{task}: {done / total:.0%}")
                self._due_s = time.monotonic() + REPEAT_S
            return
        if task != self._task or self._bar is None:
            from tqdm import tqdm

            self._close()
            unit = "B" if task in COUNTED_IN_BYTES else " tokens" if task == PREFILL else ""
            scaled = unit == "B"
            self._bar = tqdm(total=total, desc=task, unit=unit, unit_scale=scaled, leave=False, delay=BAR_DELAY_S)
            self._task = task
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._close()

    def prefill(self, n_tokens: int, layer: int, n_layers: int) -> None:
        """Shows the progress of a prompt of ``n_tokens`` that has passed ``layer`` of ``n_layers`` layers."""
        self.update(PREFILL, n_tokens * layer // n_layers, n_tokens)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM inside `terminable`, to end a command as Ctrl-C does."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM raise Terminated, inside the block."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    old_handler = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)


class Interrupt:
    """A context in which the first Ctrl-C sets `requested`, and the second raises KeyboardInterrupt.

    An interrupt within a step would leave some layers a token ahead, and some schemes then lose their cache.
    """

    requested = False

    def __enter__(self) -> Interrupt:
        self._before: Any = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raises KeyboardInterrupt if it was requested; called between the layers of a prompt."""
        if self.requested:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.check()
        self.requested = True
