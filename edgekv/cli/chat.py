"""`edgekv chat`: a conversation on the terminal, with answers on standard output, all else on standard error."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import shlex
import sys
import unicodedata
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from edgekv.checkpoint.hub import shipped_note
from edgekv.checks import Count, checked_value
from edgekv.cli.options import (
    SESSION,
    add_options,
    add_sampling_options,
    error_text,
    load_options,
    option,
    sampling_params,
    sampling_value,
    switch,
)
from edgekv.cli.run import is_saved, open_session, open_template
from edgekv.cli.terminal import Bars, Interrupt, raw_stream
from edgekv.engine.chat import MAX_NEW_TOKENS, Chat, answer_tokens
from edgekv.engine.sampling import SamplingParams
from edgekv.engine.session import Session, Step
from edgekv.engine.session_file import require_session_file
from edgekv.errors import CacheError, ContextError, EdgeKVError, MemoryBudgetError, SessionError
from edgekv.files import user_path
from edgekv.machine import format_bytes
from edgekv.vision.images import open_image
from edgekv.vision.model import require_vision

QUIT_WORDS = ("/quit", "/exit", "/bye", "quit", "exit")
TAKE_FILES = ("/save", "/load", "/image")
LENGTH = "max_new_tokens"
QUOTES = '"""'
PROMPT, MORE = "> ", "| "
WIDE = "\u1100-\u11ff\u2e80-\ua4cf\uac00-\ud7af\uf900-\ufaff\uff00-\uff60"  # letters that lines may end after
PIECES = re.compile(rf"\n|[^\S\n]+|[{WIDE}]|[^\s{WIDE}]+")


# Input: a message is a line, or the lines between triple quotes


def lines(*, history: bool) -> Iterator[str]:
    """Yields the messages that the user types, but empty ones; Ctrl-C discards a message, Ctrl-D ends.

    On a terminal prompt_toolkit edits them, if it is installed: a pasted text is one message, and Alt-Enter begins
    another line. history: whether typed messages are kept in a file for the next chat.
    """
    read = _editor(history) if sys.stdin.isatty() else lambda prompt: input()
    while True:
        try:
            text = read(PROMPT)
            while is_open(text):
                text += "\n" + read(MORE)
        except EOFError:
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        text = text.strip()
        if text.startswith(QUOTES) and text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES):
            text = text[len(QUOTES) : -len(QUOTES)].strip()
        if text:
            yield text


def history_file() -> pathlib.Path | None:
    """Returns the file of typed messages, which only this user can read; None if it can't be written."""
    state = os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local" / "state"
    path = pathlib.Path(state) / "edgekv" / "chat-history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return None
    return path


def is_open(text: str) -> bool:
    """Returns whether a message begins with triple quotes that are not closed yet."""
    return text.lstrip().startswith(QUOTES) and text.count(QUOTES) % 2 == 1


def _editor(history: bool) -> Callable[[str], str]:
    """Returns a reader of messages: Enter ends one, unless its quotes are open; TAB completes commands."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion, PathCompleter
        from prompt_toolkit.document import Document
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.output import create_output
    except ImportError:
        return input

    def enter(event: Any) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    class Commands(Completer):  # type: ignore[misc]
        def get_completions(self, document: Any, event: Any) -> Iterable[Any]:
            text = document.text_before_cursor
            name, blank, rest = text.partition(" ")
            if not blank and text.startswith("/"):
                names = [*(f"/{command}" for command in COMMANDS), *QUIT_WORDS[:3]]
                return [Completion(name, -len(text)) for name in names if name.startswith(text)]
            files = PathCompleter(expanduser=True)
            return files.get_completions(Document(rest), event) if name in TAKE_FILES else []

    keys: Any = KeyBindings()
    keys.add("enter")(enter)
    keys.add("escape", "enter")(lambda event: event.current_buffer.newline(copy_margin=False))
    session: Any = PromptSession(
        history=FileHistory(str(path)) if history and (path := history_file()) else InMemoryHistory(),
        output=create_output(raw_stream(sys.stderr)),
        multiline=True,
        completer=Commands(),
        complete_while_typing=False,
        key_bindings=keys,
        prompt_continuation=MORE,
    )
    return lambda prompt: str(session.prompt(prompt))


# Output: words are not split at a terminal's edge


class Wrapped:
    """A text that arrives in pieces, with line breaks before words that do not fit a line of ``width()`` cells.

    Lines between ``` stay as they are.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._word, self._blank, self._column = "", "", 0
        self._is_code = self._is_within = False  # whether the last word is longer than a line, and may go on

    def push(self, text: str, *, last: bool = False) -> str:
        """Takes more text; returns what can be printed: all but a word that may go on, unless it is the last."""
        pieces, done, width = PIECES.findall(self._word + text), "", self._width()
        self._word = ""
        for i, piece in enumerate(pieces):
            may_go_on = i == len(pieces) - 1 and not last
            if piece.isspace():
                done, self._blank = (done + piece, "") if piece == "\n" else (done, self._blank + piece)
                self._column, self._is_within = 0 if piece == "\n" else self._column, False
            elif may_go_on and not self._is_within and _cells(piece) < width:
                self._word = piece
            else:
                self._is_code ^= self._column == 0 and piece.startswith("```")
                end = self._column + _cells(self._blank + piece)
                if self._column and end > width and not (self._is_code or self._is_within):
                    done, self._blank, end = done + "\n", "", _cells(piece)
                done += self._blank + piece
                self._blank, self._column, self._is_within = "", end, may_go_on
        return done


def _cells(text: str) -> int:
    """Returns the width of a text on a terminal."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)


# The conversation


class Terminal:
    """A conversation on the terminal: it runs commands, and streams answers."""

    def __init__(self, chat: Chat, arguments: argparse.Namespace, sampling: SamplingParams) -> None:
        self.chat, self.arguments, self.sampling, self._first = chat, arguments, sampling, sampling
        self._length: int | None = arguments.max_new_tokens  # of an answer; None: `answer_tokens` of the context
        self._images: list[str] = []
        self._n_answers = 0

    @property
    def max_new_tokens(self) -> int:
        """Tokens of an answer at most."""
        return self._length or answer_tokens(self.chat.session.plan.ctx)

    def run(self, messages: Iterable[str]) -> None:
        """Answers each message until the input ends or /exit comes. An error is printed, and the chat goes on."""
        for message in messages:
            if message in QUIT_WORDS:
                return
            try:
                name, _, text = message[1:].partition(" ")
                name = "help" if name == "?" else name
                if message.startswith("/") and "/" not in name:  # which a path has
                    if name not in COMMANDS:
                        names, advice = [f"/{command}" for command in (*COMMANDS, "quit")], "// begins a message"
                        raise EdgeKVError(f"/{name} is unknown", value=f"/{name}", accepted=names, advice=advice)
                    if name in ("load", "image") and not text.strip():
                        raise EdgeKVError(f"/{name} needs a file: /{name} FILE")
                    COMMANDS[name](self, text.strip())
                else:
                    images, self._images = self._images, []
                    text = message[1:] if message.startswith("//") else message
                    self._answer(functools.partial(self.chat.ask, text, images=images))
            except ContextError as error:  # of the message; the context of a chat stays as it is
                larger = f", or begin a chat with --ctx {error.accepted[0]}" if error.accepted else ""
                say(f"error: {error.problem}, the context {error.value}: shorten it{larger}")
            except EdgeKVError as error:
                options = getattr(self.arguments, "options", None)
                say(f"error: {error_text(error, options)}")

    def _answer(self, begin: Callable[..., Generator[Step, None, None]]) -> None:
        session, n_before = self.chat.session, self._n_left()
        sampling, seed = self.sampling, self.sampling.seed
        if seed is not None:  # each answer has its own: trying again would otherwise change nothing
            sampling = dataclasses.replace(sampling, seed=seed + self._n_answers)
        self._n_answers += 1
        with Interrupt() as interrupt, Bars() as bars:

            def progress(done: int, total: int) -> None:
                interrupt.check()
                bars.update("reading", done, total)

            settings = {LENGTH: self._length, "sampling": sampling, "stop": self.arguments.stop}
            try:
                with contextlib.closing(begin(**settings, progress=progress)) as steps:
                    self._stream(steps, interrupt)
                say(f"({session.report().speed()}; context {session.n_held} of {session.plan.ctx})")
            except KeyboardInterrupt:  # in a prompt, or the second one
                say("(stopped)")
            if interrupt.requested:
                session.report().finish_message = "by Ctrl-C"
        if n := self._n_left() - n_before:
            say(f"(the context was full: the {n} oldest messages left it)")

    def _stream(self, steps: Iterator[Step], interrupt: Interrupt) -> None:
        cut_off, is_tty = None, sys.stdout.isatty()
        wrapped = Wrapped(lambda: os.get_terminal_size(sys.stdout.fileno()).columns or 80)
        for step in steps:
            print(wrapped.push(step.text) if is_tty else step.text, end="", flush=True)
            if step.finish_reason == "length":
                is_most = step.finish_message == LENGTH
                most = f"{self.max_new_tokens} tokens; /set {LENGTH} N for more"
                cut_off = f"(stopped: {most if is_most else step.finish_message})"
            if interrupt.requested:
                cut_off = "(stopped)"
                break
        print(wrapped.push("", last=True) if is_tty else "", flush=True)
        if cut_off:
            say(cut_off)

    def _n_left(self) -> int:
        """Returns the number of messages that have left the context."""
        return sum(bool(message.get("dropped")) for message in self.chat.messages)

    def save(self, text: str) -> None:
        """FILE: write the conversation with its cache (default: --session)"""
        path = text or self.arguments.session
        if not path:
            raise EdgeKVError("/save needs a file: /save FILE")
        if is_there := os.path.exists(user_path(path)):
            require_session_file(path)
        replaced = ", in place of the session that was there" if is_there else ""
        size = self.chat.session.save(path)
        say(f"{path}: {self.chat.session.n_held} tokens, {format_bytes(size)}{replaced}")

    def load(self, text: str) -> None:
        """FILE: take up a saved conversation"""
        if not os.path.exists(user_path(text)):
            raise SessionError(f"/load {text}: there is no such file")
        before, options = self.chat.session, load_options(self.arguments)
        like_before = {name: getattr(options, name) for name in ("kv_budget", "overflow", "draft")}
        try:
            self.chat.session = Session.restore(text, before, **like_before)
        except (CacheError, ContextError, MemoryBudgetError) as error:
            words = shlex.join([self.arguments.model or "demo", "--session", text])
            why = f"has a context of {error.value}, more than this chat" * isinstance(error, ContextError)
            advice = f"open it in a chat of its own: edgekv chat {words}"
            raise SessionError(f"{text}: {why or error.problem}; {advice}") from None
        before.close()
        session = self.chat.session
        held = f"{session.n_held} of {session.plan.ctx} tokens, kv {session.plan.kv.short}"
        say(f"{text}: {len(self.chat.messages)} messages, {held}")
        if session.plan.ctx < before.plan.ctx:
            say(f"(the file's context has {session.plan.ctx} tokens, this chat's had {before.plan.ctx})")

    def system(self, text: str) -> None:
        """TEXT: another system message; alone it shows it, `/system none` removes it"""
        if text:
            self.chat.set_system("" if text == "none" else text)
        system_messages = [message["content"] for message in self.chat.messages if message["role"] == "system"]
        say(f"system: {system_messages[0]}" if system_messages else "there is no system message")

    def set(self, text: str) -> None:
        """NAME NUMBER: temperature and so on, or NAME default, as at the start; alone it lists them"""
        settings: dict[str, Any] = {**self.sampling.as_dict(), LENGTH: self._length}
        defaults = {**self._first.as_dict(), LENGTH: self.arguments.max_new_tokens}
        if text:
            name, _, value = text.partition(" ")
            name = name.lstrip("-").replace("-", "_")
            if name not in settings:
                raise EdgeKVError(f"/set {name}: there is no such setting", value=name, accepted=settings)
            try:
                is_default = value.strip() == "default"
                settings[name] = defaults[name] if is_default else _read(name, value.strip(), settings[name])
                length = settings.pop(LENGTH)
                self._length = None if length is None else checked_value(LENGTH, length, Count)
                self.sampling = SamplingParams(**settings)
            except EdgeKVError as error:
                raise EdgeKVError(error.render(lambda name, wrong: f"/set {name} {value}")) from None
        biases = ",".join(f"{token}={bias:g}" for token, bias in (self.sampling.logit_bias or {}).items())
        shown = {**self.sampling.as_dict(), "logit_bias": biases or "none", LENGTH: self.max_new_tokens}
        say(", ".join(f"{name} {'drawn' if number is None else number}" for name, number in shown.items()))

    def image(self, text: str) -> None:
        """FILE: show it with the next message"""
        path = str(pathlib.Path(text.strip("'\"")).expanduser())
        require_vision(self.chat.session.model)
        open_image(path)
        self._images.append(path)
        say(f"{path} goes with the next message")

    def stats(self, text: str) -> None:
        """tokens, times, bytes of the last answer"""
        session, report = self.chat.session, self.chat.session.report()
        say(f"context     {session.n_held} of {session.plan.ctx} tokens")
        say("there is no answer yet" if report.time_to_first_token_s is None else report.to_text())

    def retry(self, text: str) -> None:
        """another answer to the last question"""
        self._answer(self.chat.retry)

    def undo(self, text: str) -> None:
        """take back the last question and its answer"""
        say(f"(taken back: {self.chat.undo()})")

    def history(self, text: str) -> None:
        """what has been said"""
        for message in self.chat.messages:
            say(f"{message['role']}: {message['content']}")

    def clear(self, text: str) -> None:
        """forget what has been said"""
        self.chat.clear()
        say("(cleared)")

    def help(self, text: str) -> None:
        """this list"""
        for name, command in COMMANDS.items():
            say(f"/{name:<9}{command.__doc__}")
        say("/quit     end (also /bye, exit, Ctrl-D); Ctrl-C stops an answer; TAB completes commands and files")
        say(f"an answer has at most {self.max_new_tokens} tokens (/set {LENGTH} N)")
        say("where the context is full, the oldest turns leave it")
        say(f"{QUOTES} before and after a message of several lines; // begins one with a slash")


def _read(name: str, text: str, before: Any) -> Any:
    """Returns the value of a /set command; for logit_bias, ``before`` with another token, or None."""
    if name != "logit_bias":
        return sampling_value(name, text)
    return None if text == "none" else {**(before or {}), **dict([sampling_value(name, text)])}


COMMANDS: dict[str, Callable[[Terminal, str], None]] = {
    name: getattr(Terminal, name)
    for name in ("save", "load", "system", "set", "image", "stats", "retry", "undo", "history", "clear", "help")
}
"""The commands that begin with a slash; the help of a command is its docstring."""


def say(text: str) -> None:
    """Prints on standard error, apart from the answers."""
    print(text, file=sys.stderr, flush=True)


# edgekv chat


def chat_arguments(parser: argparse.ArgumentParser) -> None:
    system = option("TEXT", "the system message of a new conversation")
    no_history = switch("keep no file of the lines that were typed")
    names = f"{SESSION} session overflow chat_template device draft prefix_cache"
    changed = {"draft": {"default": "auto"}, "overflow": {"default": "slide"}}
    add_options(parser, names, **changed, system=system, no_history=no_history)
    add_sampling_options(parser, max_new_tokens=str(MAX_NEW_TOKENS))


def chat_command(arguments: argparse.Namespace) -> int:
    options = load_options(arguments)
    sampling_params(arguments)  # a bad value is said before anything is loaded
    taken_up = is_saved(arguments)
    session = open_session(arguments, options, Bars())
    sampling = sampling_params(arguments, session.model.sampling)
    chat = Chat(session, open_template(arguments, session), arguments.system)
    model, plan = session.model, session.plan
    if sys.stdin.isatty():
        say(
            f"{model.name}, {model.n_parameters / 1e6:,.1f} M parameters, kv {plan.kv.short} "
            f"({format_bytes(plan.cache_bytes)}), context {plan.ctx} tokens; /help lists commands, Ctrl-D ends"
        )
        for note in plan.notes:
            say(note)
    if note := shipped_note(model.path)[0]:
        say(note)
    if taken_up:
        if session.n_held and not chat.messages:
            advice = f"go on with edgekv run --session {shlex.quote(arguments.session)}, or give another file"
            raise SessionError(f"{arguments.session}: is a text of `edgekv run`, no chat", advice=advice)
        say(f"{arguments.session}: {len(chat.messages)} messages, {session.n_held} tokens")
    Terminal(chat, arguments, sampling).run(lines(history=not arguments.no_history))
    if arguments.session is not None:
        chat.session.save(arguments.session)
    chat.session.close()  # which keeps what was read
    return 0
