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
STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"?|[][{}]', re.DOTALL)  # texts, and what opens and closes
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
class Call:
    """The ``number``-th call of a tool: arguments is JSON, or as far as it came where the answer was cut off."""

    number: int
    id: str
    name: str
    arguments: str = ""


Delta = Content | Reasoning | Call


class AnswerParser:
    """Takes text in pieces of any length; gives what is certain of it so far, and calls once they are whole.

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
        self._name: str | None = None  # of a call whose arguments stand alone
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
        if last and self._forced and not self._n_calls and not self.is_cut:
            self._cut("", whole=False)
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
            self._read = self._calling
        elif text:
            self._read = self._content
        return bool(text)

    def _named(self, form: ToolFormat, last: bool) -> bool:
        """A bare name, and a mark behind which its arguments stand."""
        head, found, after = self._held.partition(form.args)
        name, has_id, _ = head.partition("[CALL_ID]")
        if after := after.lstrip():
            self._name, self._held, self._read = name.strip(), after, self._calling
        elif last:
            self._cut(name.strip(), whole=bool(has_id or found))
        return bool(after)

    def _calling(self, last: bool) -> bool:
        """An object: a name with its arguments, or these alone."""
        end = object_end(self._held)
        if not end and not last:
            return False
        text, self._held = (self._held[:end], self._held[end:]) if end else (self._held, "")
        self.is_cut = not end
        head = HEAD.match(text)
        if self._name is not None:
            self._call(self._name, text)
        elif head and (name := _json(head[1])):
            arguments = text[head.end() :]
            self._call(name, arguments[: object_end(arguments) or len(arguments)])
        elif end:
            self._any_order(text)
        else:
            found = NAME.match(text)
            self._cut(found[1] if found else "", whole=bool(found and found[2]))
        self._read = self._between if self._name is None else self._content
        self._name = None
        return True

    def _any_order(self, text: str) -> None:
        """A call in another order of its fields; what is no call is content."""
        value = _json(text)
        given = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
        if isinstance(given, dict) and isinstance(value.get("name"), str):
            self._call(value["name"], json.dumps(given, ensure_ascii=False))
        else:
            self._give(Content(text))

    def _cut(self, name: str, whole: bool) -> None:
        """A call that was cut off before its arguments: given where only one has this name, or begins with it."""
        self.is_cut, self._held = True, ""
        fitting = [each for each in self._names if (each == name if whole else each.startswith(name))]
        if len(fitting) == 1:
            self._call(fitting[0], "")

    def _call(self, name: str, arguments: str) -> None:
        id = "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
        self._out.append(Call(self._n_calls, id, name, arguments))
        self._n_calls += 1

    def _give(self, delta: Content | Reasoning) -> None:
        if delta.text and not (self._forced and isinstance(delta, Content)):
            self._out.append(delta)


def object_end(text: str) -> int:
    """Return how many characters the object takes that the text begins with; 0: it has no end yet."""
    depth = 0
    for found in STRUCTURE.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    return 0


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
