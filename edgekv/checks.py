"""Checks of untrusted values: arguments and settings against annotations, JSON of files against structs.

NumPy's scalars and arrays of numbers are taken as Python's own; True and False are no numbers, NaN and infinity
neither. A range is a `msgspec.Meta` in an Annotated, whose description says what is accepted. In JSON, null
is as good as absent, whole numbers may be written as 64.0, and unknown fields are ignored.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import inspect
import math
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

from edgekv.errors import CacheError, CheckpointError, ConfigError, ContextError, EdgeKVError, nearest, short_repr

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

MAX_INT64 = (1 << 63) - 1
MAX_EXACT_INT = 1 << 53  # of the floats that stand for whole numbers
Count = Annotated[int, Meta(ge=1, le=MAX_INT64, description="a whole number of 1 or more")]
Natural = Annotated[int, Meta(ge=0, le=MAX_INT64, description="a whole number of 0 or more")]

ERRORS: dict[str, type[EdgeKVError]] = {
    "ctx": ContextError,
    "n_tokens": ContextError,
    "kv": CacheError,
    "kv_budget": CacheError,
    "model": CheckpointError,
}
"""The error class of a parameter with a wrong value; for others it is ConfigError."""
WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "None",
    collections.abc.Callable: "a function",
    collections.abc.Mapping: "a dict",
}
JSON_WORDS = {"array": "a list", "object": "an object", "bool": "true or false"} | {
    kind.__name__: WORDS[kind] for kind in (int, float, str)
}


def checked(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function so that its arguments are checked against their annotations.

    names: another name of a parameter in errors. Raises the parameter's error of ERRORS, and ConfigError for a
    name that is none of its parameters.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            hints = _hints(function)
            require_names(kwargs, _parameters(function), f"`{function.__qualname__.replace('.__init__', '')}`")
            bound = signature.bind(*args, **kwargs)
            for name in bound.arguments.keys() & hints.keys():
                if signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                    value = bound.arguments[name]
                    bound.arguments[name] = checked_value(names.get(name, name), value, hints[name])
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


def check_fields(settings: Any) -> None:
    """Checks and converts each field of a frozen dataclass, in its ``__post_init__``. Raises as `checked`."""
    hints = _hints(settings.__class__)
    for field in dataclasses.fields(settings):
        value = checked_value(field.name, getattr(settings, field.name), hints[field.name])
        object.__setattr__(settings, field.name, value)


def checked_value(name: str, value: Any, kind: Any) -> Any:
    """Returns a parameter's value as ``kind``, an annotation. Raises the parameter's error of ERRORS."""
    try:
        return _converted(value, kind)
    except TypeError:
        raise refusal(name, value, _accepted(kind)) from None


def refusal(name: str, value: object, accepted: str) -> EdgeKVError:
    """Returns the error of a parameter with a wrong value."""
    problem = "" if value is not None else f"`{name}` is None"
    return ERRORS.get(name, ConfigError)(problem, field=name, value=value, accepted=[accepted])


def require_names(given: Mapping[str, Any], names: Sequence[str], what: str) -> None:
    """Raises ConfigError for a given argument that is none of ``names``. what: the function, for the error."""
    for name in given.keys() - {*names}:
        advice = f"did you mean {close}?" if (close := nearest(name, names)) else ""
        raise ConfigError(
            f"{what} has no argument {name}", field=name, value=given[name], accepted=names, advice=advice
        )


@functools.cache
def _parameters(function: Any) -> list[str]:
    """Returns the names of a function's arguments, with those of a TypedDict that its ``**`` unpacks."""
    names: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        is_many = parameter.kind is inspect.Parameter.VAR_KEYWORD
        names += get_args(_hints(function)[name])[0].__annotations__ if is_many else [name]
    return [name for name in names if name != "self"]


@functools.cache
def _hints(annotated: Any) -> dict[str, Any]:
    return get_type_hints(annotated, None, {"Unpack": type}, include_extras=True)  # which Python 3.10 lacks


def _converted(value: Any, kind: Any) -> Any:
    """Returns the value as ``kind``. Raises TypeError where it is none."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        value = _converted(value, args[0])
        if value is not None and not all(_in_range(value, meta) for meta in args[1:]):
            raise TypeError
        return value
    if origin in (Union, types.UnionType):
        for option in args:
            with contextlib.suppress(TypeError):
                return _converted(value, option)
        raise TypeError
    if kind in (bool, int, float):
        return _number(value, kind)
    if origin is collections.abc.Sequence:
        return _items(value, args[0])
    if origin is collections.abc.Mapping and isinstance(value, collections.abc.Mapping):
        return {_converted(key, args[0]): _converted(item, args[1]) for key, item in value.items()}
    if kind is not Any and not isinstance(value, origin or kind):
        raise TypeError
    return value


def _number(value: Any, kind: type) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    is_kind = isinstance(value, (int, float) if kind is float else kind)
    if not is_kind or isinstance(value, bool) != (kind is bool):
        raise TypeError
    if kind is float and not (abs(value) < MAX_INT64 if isinstance(value, int) else math.isfinite(value)):
        raise TypeError
    return value


def _items(value: Any, kind: Any) -> Any:
    value = value.tolist() if isinstance(value, np.ndarray) and value.ndim == 1 else value
    if isinstance(value, (str, bytes)) or not isinstance(value, collections.abc.Sequence):
        raise TypeError
    kinds = () if get_origin(kind) is Annotated else get_args(kind) or (kind,)
    plain = {x for x in kinds if x in (int, str) or dataclasses.is_dataclass(x)}
    return value if set(map(type, value)) <= plain else [_converted(x, kind) for x in value]


def _in_range(value: Any, meta: Meta) -> bool:
    if meta.pattern is not None:
        return re.search(meta.pattern, os.fspath(value)) is not None
    low = (meta.ge is None or value >= meta.ge) and (meta.min_length is None or len(value) >= meta.min_length)
    return low and (meta.le is None or value <= meta.le) and (meta.lt is None or value < meta.lt)


def _accepted(kind: Any) -> str:
    """Describes an annotation in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return next((meta.description for meta in args[1:] if meta.description), _accepted(args[0]))
    if origin in (Union, types.UnionType):
        *others, last = dict.fromkeys(map(_accepted, args))
        return f"{', '.join(others)} or {last}"
    if origin is collections.abc.Sequence:
        return f"a list, each of it {_accepted(args[0])}"
    name = getattr(kind, "__name__", str(kind))
    return WORDS.get(origin or kind) or f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def read_fields(
    raw: Mapping[str, Any],
    kind: type[T],
    where: str,
    hint: str = "correct it, or give the model's own",
    error_class: type[EdgeKVError] = ConfigError,
) -> T:
    """Converts JSON to ``kind``, a `msgspec.Struct`. Errors name the field, value and what is accepted."""
    plain = {key: _whole(value) for key, value in raw.items() if value is not None}
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise error_class(_reason(str(error), raw, where, hint)) from None
    except UnicodeEncodeError as error:  # JSON can hold half of a surrogate pair
        raise error_class(f"{where}: holds {error.object!r:.60}, which is no text; {hint}") from None


def _whole(value: Any) -> Any:
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT_INT
    return int(value) if is_whole else value


def _reason(reason: str, raw: Mapping[str, Any], where: str, hint: str) -> str:
    """Returns msgspec's reason in our words."""
    if missing := re.search(r"missing required field `(.*?)`", reason):
        return f"{where}: {missing[1]!r} is missing; {hint}"
    accepted, _, path = reason.partition(" - at `")
    name = re.sub(r"^\$\.?", "", path.rstrip("`"))
    value = raw.get(re.split(r"[.\[]", name)[0])
    accepted = in_words(re.sub(r"^Expected (.*?)(, got .*)?$", r"\1", accepted))
    return f"{where}: {name} is {short_repr(value)}; accepted: {accepted}: {hint}"


def in_words(expected: str) -> str:
    """Returns what msgspec expects ("`float | null`") in our words: "a number or null"."""
    text = expected.replace("`", "").replace(" | ", " or ")
    return re.sub(r"\w+", lambda word: JSON_WORDS.get(word[0], word[0]), text)
