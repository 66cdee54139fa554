"""The conversation on a terminal: commands that begin with a slash, and answers as they come."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

from edgekv.chat.conversation import MAX_NEW_TOKENS, Chat
from edgekv.cli.bars import Bars
from edgekv.cli.flags import in_flags
from edgekv.cli.interrupt import Interrupt
from edgekv.cli.sampling_options import token_bias
from edgekv.cli.summary import speed
from edgekv.errors import EdgeKVError, unknown
from edgekv.machine import format_bytes
from edgekv.session.generation import Step
from edgekv.session.sampling_params import SamplingParams
from edgekv.vision import picture, require_vision

ENDS = ("/exit", "/quit", "/bye")
LENGTH = "max_new_tokens"


class Terminal:
    """Takes messages, runs commands, streams answers."""

    def __init__(self, chat: Chat, arguments: argparse.Namespace, sampling: SamplingParams) -> None:
        self.chat, self.arguments, self.sampling = chat, arguments, sampling
        self.max_new_tokens: int = arguments.max_new_tokens or MAX_NEW_TOKENS
        self._images: list[str] = []
        self._n_answers = 0

    def run(self, messages: Iterable[str]) -> None:
        """Until the end of input or /exit. An error is said, and the conversation goes on."""
        for message in messages:
            if message in ENDS:
                return
            self._take(message)

    def _take(self, message: str) -> None:
        try:
            if message.startswith("/"):
                self._command(*message[1:].partition(" ")[::2])
            else:
                images, self._images = self._images, []
                self._answer(lambda **how: self.chat.ask(message, images=images, **how))
        except EdgeKVError as error:
            say(f"error: {in_flags(str(error))}")

    def _command(self, name: str, rest: str) -> None:
        if name not in ACTIONS:
            raise EdgeKVError(
                f"/{name} is unknown; there are: {', '.join(f'/{known}' for known in ACTIONS)}, /exit"
            )
        ACTIONS[name].run(self, rest.strip())

    def _answer(self, begin: Callable[..., Generator[Step, None, None]]) -> None:
        left_out = self._n_left_out()
        with Interrupt() as interrupt, Bars() as bars:

            def progress(done: int, total: int) -> None:
                interrupt.check()
                bars.update("reading", done, total)

            try:
                steps = begin(
                    max_new_tokens=self.max_new_tokens,
                    sampling=self._next_sampling(),
                    stop=self.arguments.stop,
                    progress=progress,
                )
                with contextlib.closing(steps):
                    self._stream(steps, interrupt)
                self._say_use()
            except KeyboardInterrupt:  # in a prompt, or the second one
                say("(stopped)")
        self._say_left_out(left_out)

    def _next_sampling(self) -> SamplingParams:
        """With a seed, each answer has its own: trying again would otherwise change nothing."""
        n, seed = self._n_answers, self.sampling.seed
        self._n_answers += 1
        return self.sampling if seed is None else dataclasses.replace(self.sampling, seed=seed + n)

    def _stream(self, steps: Iterator[Step], interrupt: Interrupt) -> None:
        cut_off = None
        for step in steps:
            sys.stdout.write(step.text)
            sys.stdout.flush()
            if step.finish_reason == "length":
                cut_off = in_flags(step.finish_message or "")
            if interrupt.requested:
                cut_off = "Ctrl-C"
                break
        sys.stdout.write("\n")
        sys.stdout.flush()
        if cut_off:
            say(f"(stopped: {cut_off})")

    def _say_use(self) -> None:
        session = self.chat.session
        ctx = session.plan.ctx
        say(f"({speed(session.report())}; context {min(len(session.tokens), ctx)} of {ctx})")

    def _say_left_out(self, before: tuple[int, int]) -> None:
        messages, tokens = (now - then for now, then in zip(self._n_left_out(), before, strict=True))
        if messages or tokens:
            say(f"(the context was full: {messages} of the oldest messages, {tokens} tokens of this turn dropped)")

    def _n_left_out(self) -> tuple[int, int]:
        """Messages and tokens that no longer fit."""
        return sum(bool(m.get("dropped")) for m in self.chat.messages), self.chat.session.state.n_dropped

    def save(self, rest: str) -> None:
        """/save: the conversation with its cache, to a file."""
        path = rest or self.arguments.session
        if not path:
            raise EdgeKVError("/save needs a file: /save FILE")
        size = self.chat.session.save(path, compress=self.arguments.session_compress)
        say(f"{path}: {len(self.chat.session.tokens)} tokens, {format_bytes(size)}")

    def load(self, rest: str) -> None:
        """/load: a saved conversation in place of this one."""
        if not rest:
            raise EdgeKVError("/load needs a file: /load FILE")
        self.chat.session.load_state(rest)
        say(f"{rest}: {len(self.chat.messages)} messages, {len(self.chat.session.tokens)} tokens")

    def system(self, rest: str) -> None:
        """/system: shows, sets or removes the system message."""
        if rest:
            self.chat.set_system("" if rest == "none" else rest)
        now = [message["content"] for message in self.chat.messages if message["role"] == "system"]
        say(f"system: {now[0]}" if now else "there is no system message")

    def set(self, rest: str) -> None:
        """/set: shows the settings, or changes one."""
        if rest:
            self._change(*rest.partition(" ")[::2])
        settings = {**self.sampling.as_dict(), LENGTH: self.max_new_tokens}
        say(", ".join(f"{name} {_shown(name, value)}" for name, value in settings.items()))

    def _change(self, name: str, text: str) -> None:
        fields: dict[str, Any] = self.sampling.as_dict()
        name = name.replace("-", "_")
        if name not in (*fields, LENGTH):
            raise unknown(EdgeKVError, "/set", name, (*fields, LENGTH))
        if name == "logit_bias":
            biases = {} if text == "none" else {**(self.sampling.logit_bias or {}), **dict([token_bias(text)])}
            self.sampling = dataclasses.replace(self.sampling, logit_bias=biases or None)
            return
        try:
            value = float(text)
        except ValueError:
            raise EdgeKVError(f"/set {name} {text!r}: give a number") from None
        whole = int(value) if value.is_integer() else value
        if name != LENGTH:
            self.sampling = SamplingParams(**{**fields, name: whole})
        elif isinstance(whole, int) and whole >= 1:
            self.max_new_tokens = whole
        else:
            raise EdgeKVError(f"/set {name} {text}: give a whole number of 1 or more")

    def image(self, rest: str) -> None:
        """/image: the next message shows this file."""
        if not rest:
            raise EdgeKVError("/image needs a file: /image FILE")
        path = str(pathlib.Path(rest.strip("'\"")).expanduser())
        require_vision(self.chat.session.model)
        picture(path)
        self._images.append(path)
        say(f"{path} goes with the next message")

    def stats(self, rest: str) -> None:
        """/stats: the context's use, and the report of the last answer."""
        session = self.chat.session
        say(f"context     {len(session.tokens)} of {session.plan.ctx} tokens")
        report = session.report()
        say("there is no answer yet" if report.time_to_first_token_s is None else in_flags(report.to_text()))

    def retry(self, rest: str) -> None:
        """/retry: another answer to the last question."""
        self._answer(self.chat.retry)

    def history(self, rest: str) -> None:
        """/history: what has been said."""
        for message in self.chat.messages:
            say(f"{message['role']}: {message['content']}")

    def clear(self, rest: str) -> None:
        """/clear: forgets all but the system message."""
        self.chat.clear()

    def help(self, rest: str) -> None:
        """/help: the list of commands."""
        for name, action in ACTIONS.items():
            say(f"/{name:<9}{action.help}")
        say('/exit     end (also Ctrl-D); Ctrl-C stops an answer; """ before and after takes several lines')


def _shown(name: str, value: Any) -> str:
    if name == "logit_bias":
        return ",".join(f"{token}={bias:g}" for token, bias in (value or {}).items()) or "none"
    return "drawn" if value is None else str(value)


class Action(NamedTuple):
    """A command of the terminal: what /help says of it, and what it does with the rest of the line."""

    help: str
    run: Callable[[Terminal, str], None]


ACTIONS = {
    "save": Action("FILE: write the conversation with its cache (default: --session)", Terminal.save),
    "load": Action("FILE: take up a saved conversation", Terminal.load),
    "system": Action("TEXT: another system message; none removes it", Terminal.system),
    "set": Action("NAME NUMBER: temperature, presence_penalty and so on; alone it lists them", Terminal.set),
    "image": Action("FILE: show it with the next message", Terminal.image),
    "stats": Action("tokens, times, bytes of the last answer", Terminal.stats),
    "retry": Action("another answer to the last question", Terminal.retry),
    "history": Action("what has been said", Terminal.history),
    "clear": Action("forget what has been said", Terminal.clear),
    "help": Action("this list", Terminal.help),
}


def say(text: str) -> None:
    """For people, not for who reads the answers."""
    print(text, file=sys.stderr, flush=True)
