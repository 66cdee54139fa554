"""Errors a user can act on: one line naming the value, what is accepted and what to do. The CLI exits with 2.

An error keeps its parts, so that the library, the command line and the server each spell parameters in their way.
"""

import difflib
import re
import string
from collections.abc import Callable, Iterable
from typing import Any

MAX_SHOWN, MAX_QUOTED = 60, 300  # characters of a wrong value: within a message, and at its beginning
Spelling = Callable[[str, object], str]
"""A function of a parameter's name and value, which returns text; the value is None for a mere mention."""


def short_repr(value: object, limit: int = MAX_SHOWN) -> str:
    """Returns a value for an error message: on one line, cut behind ``limit`` characters."""
    try:
        text = re.sub(r"\s*\n\s*", " ", repr(value))
    except ValueError:  # of a whole number with thousands of digits
        text = f"a long {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."


def nearest(value: object, names: Iterable[str]) -> str:
    """Returns the one or two names that a wrong one was probably meant for ("q4 or q8"), or an empty text."""
    lower = {name.lower(): name for name in names}
    word = value.lower() if isinstance(value, str) else ""
    begun = [name for name in lower if len(word) > 2 and name.startswith(word)]
    close = difflib.get_close_matches(word, lower, 2, 0.7 if len(word) > 3 else 0.6) or begun[:2]
    return " or ".join(lower[name] for name in close)


def as_argument(name: str, value: object) -> str:
    """Spells a parameter as calls of the library do: ``ctx=65``, or `ctx` in backticks without a value."""
    return f"`{name}`" if value is None else f"{name}={short_repr(value, MAX_QUOTED)}"


class EdgeKVError(Exception):
    """The base of every error that edgekv raises on purpose.

    problem: what is wrong. field: the wrong parameter of `edgekv.LoadOptions` or of a function ("ctx"), or None.
    value: its value. accepted: the accepted values, as names or phrases. advice: what to do, which is made with
    ``{ctx}`` for a mention of another parameter, and ``{slots:1}`` for one with a value.
    """

    def __init__(
        self,
        problem: str = "",
        *,
        field: str | None = None,
        value: object = None,
        accepted: Iterable[str] = (),
        advice: str = "",
    ) -> None:
        super().__init__(problem)
        self.problem, self.field, self.value = problem, field, value
        self.accepted, self._advice = tuple(accepted), advice

    @property
    def advice(self) -> str:
        return _Advice(as_argument).format(self._advice)

    def __str__(self) -> str:
        return self.render(as_argument)

    def render(self, spelling: Spelling) -> str:
        """Returns the error in one line, with parameters as ``spelling`` writes them."""
        parts = [self.problem] if self.problem else []
        if self.accepted:
            parts.append(f"accepted: {', '.join(self.accepted)}")
        if self._advice:
            parts.append(_Advice(spelling).format(self._advice))
        if "did you mean" not in self._advice and (close := nearest(self.value, self.accepted)):
            parts.append(f"did you mean {close}?")
        text = "; ".join(parts)
        if self.field is None or (self.value is None and self.problem):
            return text
        return f"{spelling(self.field, self.value)}: {text}"


class _Advice(string.Formatter):
    """Formats advice: a replacement field is a parameter's name, its format specification the value."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return key

    def format_field(self, value: Any, format_spec: str) -> str:
        return self._spelling(value, format_spec or None)


class CheckpointError(EdgeKVError):
    """A model file is missing, damaged, or does not hold what its config promises."""


class ConfigError(EdgeKVError):
    """A config.json or a setting is missing, contradictory or unsupported."""


class TokenizerError(EdgeKVError):
    """No usable tokenizer was found, or a tokenizer file is damaged."""


class CacheError(EdgeKVError):
    """A KV scheme is unknown, its options are wrong, or an operation is impossible for it."""


class ContextError(EdgeKVError):
    """A prompt or a context length does not fit the model or the session."""


class ImageError(EdgeKVError):
    """An image can't be read, or the model can't see it."""


class SessionError(EdgeKVError):
    """A session can't go on: its file is damaged, or of another model or scheme; it is in use or closed."""


class MemoryBudgetError(EdgeKVError):
    """The asked weights, cache and scratch do not fit this machine's memory."""


class PowerError(EdgeKVError):
    """Power can't be measured as asked: no sensor, no permission, or a log that can't be used."""
