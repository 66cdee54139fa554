"""Take an answer's text apart as it comes: reasoning, content, tool calls."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import string
from collections.abc import Callable, Sequence
from typing import Any

from edgekv.server.prompts import END_THINK, THINK, ToolFormat

HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
NAME = re.compile(r'\{\s*"name"\s*:\s*"([\w.-]*)("?)')  # perhaps not all of it yet
ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # Mistral's templates take no other


@dataclasses.dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """What the model thought before."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallBegin:
    """The ``number``-th call: its arguments follow."""

    number: int
    id: str
    name: str


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """More of the JSON of a call's arguments."""

    number: int
    text: str


Delta = Content | Reasoning | CallBegin | CallArguments


class AnswerParser:
    """Takes text in pieces of any length; gives what is certain of it so far.

    thinks: the text begins within reasoning. form: how calls are written; None: there are none. names: of all that
    can be called. forced: the text is calls and nothing else. plain: all of it is content.
    """

    def __init__(
        self,
        *,
        thinks: bool = False,
        form: ToolFormat | None = None,
        names: Sequence[str] = (),
        forced: bool = False,
        plain: bool = False,
    ) -> None:
        self._form, self._names, self._forced = form, names, forced
        self.is_cut = False  # once it has ended: within a call
        self._held, self._out = "", list[Delta]()
        self._call: _Call | None = None
        self._n_calls = 0
        self._is_first = True  # nothing was given yet
        opening = self._reasoning if thinks else self._opening
        self._read: Callable[[bool], bool] = self._content if plain else opening

    @property
    def is_thinking(self) -> bool:
        """Whether the text is within reasoning."""
        return self._read == self._reasoning

    def push(self, text: str, last: bool = False) -> list[Delta]:
        """Return what more is known with this text."""
        self._held += text
        while self._held and self._read(last):
            pass
        if last and self._call is not None:
            self.is_cut = True
            if self._call.number is None:
                name = NAME.match(self._call.text)
                self._begin_cut(name[1] if name else "", whole=bool(name and name[2]))
        if last and self._forced and not self._n_calls and not self.is_cut:
            self._begin_cut("", whole=False)
        deltas, self._out = self._out, []
        return deltas

    def end(self) -> list[Delta]:
        """Return what was held back, once no more comes."""
        return self.push("", last=True)

    # What is held is read by one of these, in turn. Each returns whether the next can go on with the rest.

    def _opening(self, last: bool) -> bool:
        """At the beginning, and behind the reasoning."""
        text = self._held.lstrip()
        if not self._is_first:
            self._held = text
        if not last and (not text or (self._is_first and THINK.startswith(text))):
            return False
        if self._is_first and text.startswith(THINK):
            self._held, self._read = text[len(THINK) :].lstrip("\n"), self._reasoning
        elif self._form is not None and not self._form.begin and text.startswith("{"):
            self._held, self._read = text, self._between
        else:
            self._read = self._content
        self._is_first = False
        return True

    def _reasoning(self, last: bool) -> bool:
        self._is_first = False
        return self._upto(END_THINK, Reasoning, self._opening, last)

    def _content(self, last: bool) -> bool:
        return self._upto(self._form.begin if self._form else "", Content, self._between, last)

    def _upto(
        self, mark: str, kind: type[Content] | type[Reasoning], behind: Callable[[bool], bool], last: bool
    ) -> bool:
        """Give all before the mark; what may be its beginning is held."""
        at = self._held.find(mark) if mark else -1
        if at >= 0:
            self._give(kind(self._held[:at]))
            self._held, self._read = self._held[at + len(mark) :], behind
            return True
        safe = len(self._held) - (0 if last else possible_start(self._held, mark))
        self._give(kind(self._held[:safe]))
        self._held = self._held[safe:]
        return False

    def _between(self, last: bool) -> bool:
        """Behind the mark of a call, or between calls: the next brace begins one."""
        assert self._form is not None
        if self._form.args:
            return self._named(self._form, last)
        closing = self._form.closing.strip()
        text = self._held.lstrip(" \r\n\t,;[]")
        if closing and text.startswith(closing):
            text = text[len(closing) :].lstrip()
        elif not last and closing and closing.startswith(text):
            return False
        self._held = text
        if text.startswith("{"):
            self._call, self._read = _Call(), self._calling
        elif text:
            self._read = self._content
        return bool(text)

    def _named(self, form: ToolFormat, last: bool) -> bool:
        """A bare name, and a mark behind which its arguments stand."""
        head, found, after = self._held.partition(form.args)
        name, has_id, _ = head.partition("[CALL_ID]")
        if found:
            self._call, self._read = _Call(is_bare=True, number=self._begin(name.strip())), self._calling
            self._held = after.lstrip()
        elif last:
            self._begin_cut(name, whole=bool(has_id))
        return bool(found)

    def _calling(self, last: bool) -> bool:
        assert self._call is not None
        call, end = self._call, self._call.scan(self._held)
        call.text, self._held = call.text + self._held[:end], self._held[end:]
        if call.number is None and (head := HEAD.match(call.text)) and (name := _json(head[1])):
            call.number, call.n_given = self._begin(name), head.end()
        if call.number is not None:
            stop = call.arguments_end or len(call.text)
            if stop > call.n_given:
                self._out.append(CallArguments(call.number, call.text[call.n_given : stop]))
                call.n_given = stop
        if call.depth:
            return False
        if call.number is None:
            self._whole(call.text)
        self._call, self._read = None, self._content if call.is_bare else self._between
        return True

    def _whole(self, text: str) -> None:
        """A call in another order of its fields; what is no call is content."""
        value = _json(text)
        given = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
        if isinstance(given, dict) and isinstance(value.get("name"), str):
            self._out.append(CallArguments(self._begin(value["name"]), json.dumps(given, ensure_ascii=False)))
        else:
            self._give(Content(text))

    def _begin_cut(self, name: str, whole: bool) -> None:
        """A call that was cut off before its arguments: given where only one has this name, or begins with it."""
        self.is_cut, self._held = True, ""
        fitting = [each for each in self._names if (each == name if whole else each.startswith(name))]
        if len(fitting) == 1:
            self._begin(fitting[0])

    def _begin(self, name: str) -> int:
        number, self._n_calls = self._n_calls, self._n_calls + 1
        self._out.append(CallBegin(number, "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH)), name))
        return number

    def _give(self, delta: Content | Reasoning) -> None:
        if delta.text and not (self._forced and isinstance(delta, Content)):
            self._out.append(delta)


@dataclasses.dataclass
class _Call:
    """The JSON object of one call as it grows. is_bare: the arguments alone; number: once its name is known."""

    is_bare: bool = False
    number: int | None = None
    text: str = ""
    n_given: int = 0  # characters of the text
    depth: int = 0
    arguments_end: int | None = None
    in_string: bool = False
    is_escaped: bool = False

    def scan(self, more: str) -> int:
        """Follow braces and strings; return how many characters of ``more`` belong to the object."""
        for i, letter in enumerate(more):
            if self.is_escaped:
                self.is_escaped = False
            elif self.in_string:
                self.is_escaped, self.in_string = letter == "\\", letter != '"'
            elif letter == '"':
                self.in_string = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if self.depth == 1 and self.arguments_end is None and not self.is_bare:
                    self.arguments_end = len(self.text) + i + 1
                if self.depth == 0:
                    return i + 1
        return len(more)


def possible_start(text: str, mark: str) -> int:
    """Return the length of the longest end of the text that begins the mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def _json(text: str) -> Any:
    """Return the value; None where the text is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
