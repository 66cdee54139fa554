"""`edgekv chat`: turns with a model on the terminal, answers streamed to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

from edgekv.chat.conversation import MAX_NEW_TOKENS, Chat
from edgekv.cli.conversation import (
    add_draft_option,
    add_session_options,
    add_template_option,
    is_saved,
    open_session,
    open_template,
    save_session,
)
from edgekv.cli.flags import in_flags
from edgekv.cli.interrupt import Interrupt
from edgekv.cli.options import (
    Bars,
    Command,
    add_adapter_option,
    add_device_option,
    add_model_options,
    load_options,
    wants_list,
)
from edgekv.cli.sampling_options import add_sampling_options, sampling_params
from edgekv.errors import EdgeKVError
from edgekv.machine import format_bytes
from edgekv.session.generation import Step
from edgekv.session.sampling_params import SamplingParams

PROMPT = "> "


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_adapter_option(parser)
    add_session_options(parser)
    add_template_option(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message of a new conversation")
    add_sampling_options(parser, temperature=0.7, max_new_tokens=MAX_NEW_TOKENS)
    add_device_option(parser)
    add_draft_option(parser, "auto")


def _execute(arguments: argparse.Namespace) -> int:
    if wants_list(arguments):
        return 0
    options = load_options(arguments)
    sampling_params(arguments)
    taken_up = is_saved(arguments)
    session = open_session(arguments, options, Bars())
    chat = Chat(session, open_template(arguments, session), arguments.system)
    if taken_up:
        _say(f"{arguments.session}: {len(chat.messages)} messages, {len(session.tokens)} tokens")
    Terminal(chat, arguments).run()
    save_session(arguments, session)
    return 0


class Terminal:
    """Reads lines, runs commands, streams answers."""

    def __init__(self, chat: Chat, arguments: argparse.Namespace) -> None:
        self.chat, self.arguments = chat, arguments
        self._n_answers = 0

    def run(self) -> None:
        """Until the end of input or /exit. An error is said, and the conversation goes on."""
        with contextlib.suppress(ImportError):  # history and editing of lines, where Python was built with it
            import readline  # noqa: F401
        for line in _lines():
            if line in ("/exit", "/quit"):
                return
            self._take(line)

    def _take(self, line: str) -> None:
        try:
            if line.startswith("/"):
                self._command(*line[1:].partition(" ")[::2])
            else:
                self._answer(self.chat.ask, line)
        except EdgeKVError as error:
            _say(f"error: {error}")

    def _command(self, name: str, rest: str) -> None:
        if name not in ACTIONS:
            raise EdgeKVError(
                f"/{name} is unknown; there are: {', '.join(f'/{known}' for known in ACTIONS)}, /exit"
            )
        ACTIONS[name].run(self, rest.strip())

    def _answer(self, begin: Callable[..., Generator[Step, None, None]], *texts: str) -> None:
        left_out = self._n_left_out()
        with Interrupt() as interrupt, Bars() as bars:

            def progress(done: int, total: int) -> None:
                interrupt.check()
                bars.update("prefill", done, total)

            try:
                steps = begin(
                    *texts,
                    max_new_tokens=self.arguments.max_new_tokens,
                    sampling=self._sampling(),
                    stop=self.arguments.stop,
                    progress=progress,
                )
                with contextlib.closing(steps):
                    self._stream(steps, interrupt)
            except KeyboardInterrupt:  # in a prompt, or the second one
                _say("(stopped)")
        self._say_left_out(left_out)

    def _sampling(self) -> SamplingParams:
        """With a --seed, each answer has its own: trying again would otherwise change nothing."""
        params, n = sampling_params(self.arguments), self._n_answers
        self._n_answers += 1
        return params if params.seed is None else dataclasses.replace(params, seed=params.seed + n)

    def _stream(self, steps: Iterator[Step], interrupt: Interrupt) -> None:
        cut_off = None
        for step in steps:
            sys.stdout.write(step.text)
            sys.stdout.flush()
            if step.finish_reason == "length":
                cut_off = step.finish_message
            if interrupt.requested:
                cut_off = "Ctrl-C"
                break
        sys.stdout.write("\n")
        sys.stdout.flush()
        if cut_off:
            _say(f"(stopped: {cut_off})")

    def _say_left_out(self, before: tuple[int, int]) -> None:
        messages, tokens = (now - then for now, then in zip(self._n_left_out(), before, strict=True))
        if messages or tokens:
            _say(
                f"(the context was full: {messages} of the oldest messages, {tokens} tokens of this turn dropped)"
            )

    def _n_left_out(self) -> tuple[int, int]:
        """Messages and tokens that no longer fit."""
        return sum(bool(m.get("dropped")) for m in self.chat.messages), self.chat.session.n_dropped

    def save(self, rest: str) -> None:
        """/save: the conversation with its cache, to a file."""
        path = rest or self.arguments.session
        if not path:
            raise EdgeKVError("/save needs a file: /save FILE")
        size = self.chat.session.save(path, compress=self.arguments.session_compress)
        _say(f"{path}: {len(self.chat.session.tokens)} tokens, {format_bytes(size)}")

    def load(self, rest: str) -> None:
        """/load: a saved conversation in place of this one."""
        if not rest:
            raise EdgeKVError("/load needs a file: /load FILE")
        self.chat.session.load_state(rest)
        _say(f"{rest}: {len(self.chat.messages)} messages, {len(self.chat.session.tokens)} tokens")

    def stats(self, rest: str) -> None:
        """/stats: the context's use, and the report of the last answer."""
        session = self.chat.session
        _say(f"context     {len(session.tokens)} of {session.plan.ctx} tokens\n{session.report().to_text()}")

    def retry(self, rest: str) -> None:
        """/retry: another answer to the last question."""
        self._answer(self.chat.retry)

    def history(self, rest: str) -> None:
        """/history: what has been said."""
        for message in self.chat.messages:
            _say(f"{message['role']}: {message['content']}")

    def clear(self, rest: str) -> None:
        """/clear: forgets all but the system message."""
        self.chat.clear()

    def help(self, rest: str) -> None:
        """/help: the list of commands."""
        for name, action in ACTIONS.items():
            _say(f"/{name:<10}{action.help}")
        _say(f"/{'exit':<10}end (also Ctrl-D); Ctrl-C stops an answer")


class Action(NamedTuple):
    """A command of the terminal: what /help says of it, and what it does with the rest of the line."""

    help: str
    run: Callable[[Terminal, str], None]


ACTIONS = {
    "save": Action("FILE: write the conversation with its cache (default: --session)", Terminal.save),
    "load": Action("FILE: take up a saved conversation", Terminal.load),
    "stats": Action("tokens, times, bytes of the last answer", Terminal.stats),
    "retry": Action("another answer to the last question", Terminal.retry),
    "history": Action("what has been said", Terminal.history),
    "clear": Action("forget what has been said", Terminal.clear),
    "help": Action("this list", Terminal.help),
}


def _lines() -> Iterator[str]:
    """Lines that are not empty, from the terminal or a pipe; Ctrl-C abandons a line, Ctrl-D ends."""
    prompt = PROMPT if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            _say("")
            continue
        if line:
            yield line


def _say(text: str) -> None:
    print(in_flags(text), file=sys.stderr)


CHAT = Command("talk with a model in turns; /help lists what can be done on the way", _arguments, _execute)
