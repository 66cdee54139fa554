"""Declarations of the schemes' options: what each accepts, checked before a cache is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from edgekv.errors import CacheError, short_repr
from edgekv.types import F32

MAX_TOKENS = (1 << 31) - 1  # positions are int32
MIN_FACTOR, MAX_FACTOR = 1e-4, 1e4  # of scores: a temperature, or a scale that an adapter has learned


class Accepts(NamedTuple):
    """The values that an option accepts.

    phrases: a description for people. accepts: whether a value of the option's type is one. extremes: for tests.
    """

    phrases: tuple[object, ...]
    accepts: Callable[[Any], bool]
    extremes: tuple[Any, ...]


class Config:
    """Base of a scheme's frozen dataclass of options, which checks each against its declaration.

    scheme: the scheme's name. Raises CacheError (field kv) for a value that an option does not accept.
    """

    scheme: ClassVar[str]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, field.name, value := value.item())
            if not accepts(field, value):
                raise bad_option(self.scheme, field.name, value, *accepted_by(field).phrases)


def accepted_by(field: dataclasses.Field[Any]) -> Accepts:
    """Returns what an option accepts: all values of its type where it has no declaration, as in other packages."""
    default = field.default
    finite = "a finite number" if type(default) is float else f"a {type(default).__name__}"
    anything = Accepts((finite,), lambda value: type(value) is not float or math.isfinite(value), (default,))
    result: Accepts = field.metadata.get("accepts", anything)
    return result


def accepts(field: dataclasses.Field[Any], value: object) -> bool:
    """Returns whether an option accepts a value of any type."""
    kinds = (int, float) if type(field.default) is float else (type(field.default),)
    return type(value) in kinds and accepted_by(field).accepts(value)


def _option(default: Any, phrases: Iterable[object], accepts: Callable[[Any], bool], *extremes: Any) -> Any:
    return dataclasses.field(default=default, metadata={"accepts": Accepts(tuple(phrases), accepts, extremes)})


def number(default: float, least: float, most: float, unit: str = "", *, or_zero: bool = False) -> Any:
    """Declares a number from least to most, whole where the default is an int."""
    span = f"{least} to {most}" if type(default) is int else f"{least:g} to {most:g}"

    def accepts(value: float) -> bool:
        return least <= value <= most or (or_zero and value == 0)

    return _option(default, [*(["0"] if or_zero else []), span + unit], accepts, least, most)


def tokens(default: int, least: int = 0) -> Any:
    """Declares a number of tokens."""
    return number(default, least, MAX_TOKENS, " tokens")


def seed() -> Any:
    """Declares the seed of a random generator."""
    return number(0, 0, (1 << 63) - 1)


def one_of(default: Any, values: Iterable[Any]) -> Any:
    """Declares one of a few values."""
    known = tuple(values)
    return _option(default, known, known.__contains__, *known)


def flag(default: bool) -> Any:
    """Declares a switch, on or off."""
    return _option(default, ("true", "false"), lambda value: True, False, True)


def digit_string(characters: str, phrase: str) -> Any:
    """Declares a string of digits, empty by default."""
    return _option("", [phrase], lambda value: set(value) <= set(characters), "")


def share_of_context(default: float) -> Any:
    """Declares a budget of tokens: a fraction of the context, or a number."""

    def accepts(value: float) -> bool:
        return 0 < value <= 1 or (1 < value <= MAX_TOKENS and value == int(value))

    phrase = f"a fraction of the context up to 1, or a whole number of tokens from 2 to {MAX_TOKENS}"
    return _option(default, [phrase], accepts, 0.5, 1.0, float(MAX_TOKENS))


def bad_option(scheme: str, name: str, value: object, *accepted: object) -> CacheError:
    """Returns the error of an option's value. accepted: the values, or descriptions of them."""
    text = value if isinstance(value, str) else short_repr(value)
    kv, phrases = f"{scheme}:{name}={text:.60}", [str(x) for x in accepted]
    return CacheError(field="kv", value=kv, accepted=phrases)


def require_only(wanted: str, given: Iterable[str], scheme: str, source: str) -> None:
    """Raises CacheError (field adapter) unless an adapter brings one parameter, ``wanted``, and no other."""
    if unknown := sorted({wanted} ^ set(given)):
        problem = f"{source}: {scheme} takes {wanted} and nothing else, not {', '.join(unknown)}"
        raise CacheError(problem, field="adapter")


def are_factors(x: F32) -> bool:
    """Returns whether scores can be multiplied with all of x, of any shape, or divided by it."""
    return bool(((x >= MIN_FACTOR) & (x <= MAX_FACTOR)).all())


def require_shape(name: str, x: F32, source: str, *shapes: tuple[int, ...]) -> None:
    """Raises CacheError (field adapter) unless a layer's parameter x of an adapter has one of the shapes."""
    if x.shape not in shapes:
        problem = f"{source}: {name} has shape {x.shape} in a layer"
        raise CacheError(problem, field="adapter", accepted=[str(shape) for shape in shapes])


def require_factors(name: str, x: F32, n_heads: int, source: str) -> None:
    """Raises CacheError (field adapter) unless x, () or (n_heads,), are factors of scores."""
    require_shape(name, x, source, (), (1,), (n_heads,))
    if not are_factors(x):
        problem = f"{source}: {name} is {x.min():g} to {x.max():g}"
        raise CacheError(problem, field="adapter", accepted=[f"{MIN_FACTOR:g} to {MAX_FACTOR:g}"])
