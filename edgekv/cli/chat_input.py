'''Messages from the terminal or a pipe: a line each, or what stands between two lines of """.'''

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from edgekv.cli.output import raw

QUOTES = '"""'
PROMPT, MORE = "> ", "| "


def lines(*, history: bool) -> Iterator[str]:
    """Messages that are not empty; Ctrl-C abandons one, Ctrl-D ends.

    On a terminal prompt_toolkit edits them, where it is installed: what is pasted is one message, Alt-Enter begins
    another line. history: whether they are kept for the next time.
    """
    read = _editor(history) if sys.stdin.isatty() else _plain
    while True:
        try:
            text = _whole(read)
        except EOFError:
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if text:
            yield text


def history_file() -> pathlib.Path:
    """Where typed lines are kept: under $XDG_STATE_HOME, or ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local" / "state"
    return pathlib.Path(state) / "edgekv" / "chat-history"


def is_open(text: str) -> bool:
    """Whether a message that begins with quotes is still to be closed."""
    return text.lstrip().startswith(QUOTES) and text.count(QUOTES) % 2 == 1


def _whole(read: Callable[[str], str]) -> str:
    """One message, without its quotes."""
    text = read(PROMPT)
    while is_open(text):
        text += "\n" + read(MORE)
    text = text.strip()
    return text[len(QUOTES) : -len(QUOTES)].strip() if _is_quoted(text) else text


def _is_quoted(text: str) -> bool:
    return len(text) >= 2 * len(QUOTES) and text.startswith(QUOTES) and text.endswith(QUOTES)


def _plain(prompt: str) -> str:
    return input(prompt if sys.stdin.isatty() else "")


def _editor(history: bool) -> Callable[[str], str]:
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.output import create_output
    except ImportError:
        return _plain
    kept: Any = FileHistory(str(path)) if history and (path := _writable_history()) else InMemoryHistory()
    session: Any = PromptSession(
        history=kept,
        output=create_output(raw(sys.stderr)),
        multiline=True,
        key_bindings=_keys(),
        prompt_continuation=MORE,
        erase_when_done=False,
    )
    return lambda prompt: str(session.prompt(prompt))


def _keys() -> Any:
    """Enter ends a message unless it is quoted and open; Alt-Enter begins another line."""
    from prompt_toolkit.key_binding import KeyBindings

    def enter(event: Any) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    keys: Any = KeyBindings()
    keys.add("enter")(enter)
    keys.add("escape", "enter")(lambda event: event.current_buffer.newline(copy_margin=False))
    return keys


def _writable_history() -> pathlib.Path | None:
    """The file, for this user's eyes alone; None where it can't be."""
    path = history_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return None
    return path
