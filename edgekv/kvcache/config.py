"""Options of schemes: what each accepts, declared where it is and checked before anything is made of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from edgekv.errors import CacheError, short_repr
from edgekv.types import F32

MOST_TOKENS = (1 << 31) - 1  # positions are int32
LEAST_FACTOR, MOST_FACTOR = 1e-4, 1e4  # of scores: a temperature, or a scale that an adapter has learned


class Accepts(NamedTuple):
    """phrases: what an option takes, for people. takes: whether it takes a value of its type. ends: extremes."""

    phrases: tuple[object, ...]
    takes: Callable[[Any], bool]
    ends: tuple[Any, ...]


class Config:
    """Base of a scheme's frozen dataclass of options: checks each against its declaration. ``scheme``: its name.

    Raises CacheError (field kv) for a value of another type, and for one that its option does not take.
    """

    scheme: ClassVar[str]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, field.name, value := value.item())
            if not takes(field, value):
                raise bad_option(self.scheme, field.name, value, *declared(field).phrases)


def declared(field: dataclasses.Field[Any]) -> Accepts:
    """Returns what an option accepts: without a declaration, as other packages have them, all of its type."""
    default = field.default
    finite = "a finite number" if type(default) is float else f"a {type(default).__name__}"
    anything = Accepts((finite,), lambda value: type(value) is not float or math.isfinite(value), (default,))
    accepts: Accepts = field.metadata.get("accepts", anything)
    return accepts


def takes(field: dataclasses.Field[Any], value: object) -> bool:
    """Returns whether an option takes the value, of whatever type."""
    kinds = (int, float) if type(field.default) is float else (type(field.default),)
    return type(value) in kinds and declared(field).takes(value)


def _option(default: Any, phrases: Iterable[object], takes: Callable[[Any], bool], *ends: Any) -> Any:
    return dataclasses.field(default=default, metadata={"accepts": Accepts(tuple(phrases), takes, ends)})


def number(default: float, least: float, most: float, unit: str = "", *, or_zero: bool = False) -> Any:
    """Declares an option from least to most, whole where the default is an int."""
    span = f"{least} to {most}" if type(default) is int else f"{least:g} to {most:g}"

    def takes(value: float) -> bool:
        return least <= value <= most or (or_zero and value == 0)

    return _option(default, [*(["0"] if or_zero else []), span + unit], takes, least, most)


def tokens(default: int, least: int = 0) -> Any:
    """Declares an option that counts tokens."""
    return number(default, least, MOST_TOKENS, " tokens")


def seed() -> Any:
    """Declares an option that random numbers come from."""
    return number(0, 0, (1 << 63) - 1)


def one_of(default: Any, values: Iterable[Any]) -> Any:
    """Declares an option of a few values."""
    known = tuple(values)
    return _option(default, known, known.__contains__, *known)


def flag(default: bool) -> Any:
    """Declares an option that is on or off."""
    return _option(default, ("true", "false"), lambda value: True, False, True)


def digit_string(characters: str, phrase: str) -> Any:
    """Declares an option of digits, none by default."""
    return _option("", [phrase], lambda value: set(value) <= set(characters), "")


def share_of_context(default: float) -> Any:
    """Declares an option for tokens that are kept: a fraction of the context, or their number."""

    def takes(value: float) -> bool:
        return 0 < value <= 1 or (1 < value <= MOST_TOKENS and value == int(value))

    phrase = f"a fraction of the context up to 1, or a whole number of tokens from 2 to {MOST_TOKENS}"
    return _option(default, [phrase], takes, 0.5, 1.0, float(MOST_TOKENS))


def bad_option(scheme: str, name: str, value: object, *accepted: object) -> CacheError:
    """Returns the refusal of an option's value. accepted: what it takes, a value or a phrase each."""
    text = value if isinstance(value, str) else short_repr(value)
    whole, phrases = f"{scheme}:{name}={text:.60}", [str(each) for each in accepted]
    return CacheError(field="kv", value=whole, accepted=phrases)


def require_only(wanted: str, given: Iterable[str], scheme: str, source: str) -> None:
    """Raises CacheError (field adapter) unless an adapter brings one parameter, ``wanted``, and no other."""
    unknown = sorted({wanted} ^ set(given))
    if unknown:
        raise CacheError(
            f"{source}: {scheme} takes {wanted} and nothing else, not {', '.join(unknown)}", field="adapter"
        )


def are_factors(x: F32) -> bool:
    """Returns whether scores can be multiplied with them, or divided by them."""
    return bool(((x >= LEAST_FACTOR) & (x <= MOST_FACTOR)).all())


def require_factors(name: str, x: F32, source: str) -> None:
    """Raises CacheError (field adapter) for what an adapter can't have learned. x: (n,) or any other shape."""
    if not are_factors(x):
        accepted = f"{LEAST_FACTOR:g} to {MOST_FACTOR:g}"
        raise CacheError(
            f"{source}: {name} is {x.min():g} to {x.max():g}",
            field="adapter",
            accepted=[accepted],
        )
