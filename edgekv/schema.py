"""JSON objects of files that others wrote, as typed structs: types and ranges are declared once, in the fields.

Null is as good as absent; whole numbers may be written as 64.0; unknown fields are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from edgekv.errors import ConfigError, EdgeKVError

T = TypeVar("T")
LARGEST_EXACT = 1 << 53  # of the floats that stand for whole numbers
SHOWN = 60  # characters of a wrong value


def read(
    raw: Mapping[str, Any],
    kind: type[T],
    where: str,
    hint: str = "correct it, or give the model's own",
    error_class: type[EdgeKVError] = ConfigError,
) -> T:
    """The object as ``kind``, a `msgspec.Struct`. The error names the field, its value and what is accepted."""
    plain = {key: _whole(value) for key, value in raw.items() if value is not None}
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise error_class(_told(str(error), raw, where, hint)) from None
    except UnicodeEncodeError as error:  # JSON can hold half of a surrogate pair
        raise error_class(f"{where}: holds {error.object!r:.60}, which is no text; {hint}") from None


def shown(value: object) -> str:
    """A value in an error message: on one line, cut if it is long."""
    try:
        text = re.sub(r"\s*\n\s*", " ", repr(value))
    except ValueError:  # of a whole number with thousands of digits
        text = f"a long {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _whole(value: Any) -> Any:
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < LARGEST_EXACT
    return int(value) if is_whole else value


def _told(reason: str, raw: Mapping[str, Any], where: str, hint: str) -> str:
    """msgspec's reason in our words."""
    if missing := re.search(r"missing required field `(.*?)`", reason):
        return f"{where}: {missing[1]!r} is missing; {hint}"
    accepted, _, path = reason.partition(" - at `")
    name = re.sub(r"^\$\.?", "", path.rstrip("`"))
    value = raw.get(re.split(r"[.\[]", name)[0])
    accepted = re.sub(r"^Expected (.*?)(, got .*)?$", r"\1", accepted).replace("`", "")
    return f"{where}: {name} is {shown(value)}; accepted: {accepted}: {hint}"
