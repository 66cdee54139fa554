"""What knobs accept, declared with each of them and checked before anything is made of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from edgekv.checks import short_repr
from edgekv.errors import CacheError
from edgekv.types import F32

MOST_TOKENS = (1 << 31) - 1  # positions are int32
MOST_SEED = (1 << 63) - 1
LEAST_FACTOR, MOST_FACTOR = 1e-4, 1e4  # of scores: a temperature, or a scale that an adapter has learned


class Accepts(NamedTuple):
    """phrases: what a knob takes, for people. takes: whether it takes a value of its type. ends: extreme ones."""

    phrases: tuple[object, ...]
    takes: Callable[[Any], bool]
    ends: tuple[Any, ...]


class Knobs:
    """Base of a scheme's frozen dataclass of knobs: checks each against its declaration. ``scheme``: its name.

    Raises CacheError (field kv) for a value of another type, and for one that its knob does not take.
    """

    scheme: ClassVar[str]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, accepts = getattr(self, field.name), declared(field)
            if isinstance(value, np.generic):
                object.__setattr__(self, field.name, value := value.item())
            kinds = (int, float) if type(field.default) is float else (type(field.default),)
            if type(value) not in kinds or not accepts.takes(value):
                raise bad_knob(self.scheme, field.name, value, *accepts.phrases)


def declared(field: dataclasses.Field[Any]) -> Accepts:
    """What a knob accepts: of one without a declaration, as other packages have them, anything of its type."""
    default = field.default
    finite = "a finite number" if type(default) is float else f"a {type(default).__name__}"
    anything = Accepts((finite,), lambda value: type(value) is not float or math.isfinite(value), (default,))
    accepts: Accepts = field.metadata.get("accepts", anything)
    return accepts


def _declare(default: Any, accepts: Accepts) -> Any:
    return dataclasses.field(default=default, metadata={"accepts": accepts})


def number(default: float, least: float, most: float, unit: str = "", *, or_zero: bool = False) -> Any:
    """A knob from least to most, whole where the default is an int."""

    def takes(value: float) -> bool:
        return least <= value <= most or (or_zero and value == 0)

    span = f"{least} to {most}" if type(default) is int else f"{least:g} to {most:g}"
    return _declare(default, Accepts((*(["0"] if or_zero else []), span + unit), takes, (least, most)))


def tokens(default: int, least: int = 0) -> Any:
    """A knob that counts tokens."""
    return number(default, least, MOST_TOKENS, " tokens")


def seed() -> Any:
    """A knob that random numbers come from."""
    return number(0, 0, MOST_SEED)


def one_of(default: Any, values: Iterable[Any]) -> Any:
    """A knob with a few values."""
    known = tuple(values)
    return _declare(default, Accepts(known, known.__contains__, known))


def flag(default: bool) -> Any:
    """A knob that is on or off."""
    return _declare(default, Accepts(("true", "false"), lambda value: True, (False, True)))


def digit_string(characters: str, phrase: str) -> Any:
    """A knob of digits, none by default."""
    return _declare("", Accepts((phrase,), lambda value: set(value) <= set(characters), ("",)))


def share_of_context(default: float) -> Any:
    """A knob for tokens that are kept: a fraction of the context, or their number."""

    def takes(value: float) -> bool:
        return 0 < value <= 1 or (1 < value <= MOST_TOKENS and value == int(value))

    phrase = f"a fraction of the context up to 1, or a whole number of tokens from 2 to {MOST_TOKENS}"
    return _declare(default, Accepts((phrase,), takes, (0.5, 1.0, float(MOST_TOKENS))))


def require_only(wanted: str, given: Iterable[str], scheme: str, source: str) -> None:
    """An adapter brings one parameter, ``wanted``, and no other. Raises CacheError (field adapter)."""
    unknown = sorted({wanted} ^ set(given))
    if unknown:
        raise CacheError(
            f"{source}: kv={scheme!r} takes {wanted} and nothing else, not {', '.join(unknown)}",
            field="adapter",
            value=unknown,
            accepted=[wanted],
        )


def are_factors(x: F32) -> bool:
    """Whether scores can be multiplied with them, or divided by them."""
    return bool(((x >= LEAST_FACTOR) & (x <= MOST_FACTOR)).all())


def require_factors(name: str, x: F32, source: str) -> None:
    """Raises CacheError (field adapter) for what an adapter can't have learned. x: (n,) or any other shape."""
    if not are_factors(x):
        accepted = f"{LEAST_FACTOR:g} to {MOST_FACTOR:g}"
        raise CacheError(
            f"{source}: {name} is {x.min():g} to {x.max():g}; accepted: {accepted}",
            field="adapter",
            accepted=[accepted],
        )


def bad_knob(scheme: str, knob: str, value: object, *accepted: object) -> CacheError:
    """A value that a knob does not take. accepted: what it takes, a value or a phrase each."""
    text = value if isinstance(value, str) else short_repr(value)
    whole, takes = f"{scheme}:{knob}={text:.60}", [str(each) for each in accepted]
    return CacheError(f"kv={whole!r}: accepted: {', '.join(takes)}", field="kv", value=whole, accepted=takes)
