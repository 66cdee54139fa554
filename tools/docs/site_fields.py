"""Makes a list of the fields that a docstring explains as `name: meaning`, for the reference on the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

FIELD = re.compile(r"^([a-z_]+(?:, [a-z_]+)*(?:\([a-z_, ]+\))?): (?=\S)")


class Fields(griffe.Extension):
    """An extension that rewrites every docstring as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of each module, class, function and attribute that was read."""
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    """Begins an item with each line that begins with a field's name; indented lines behind it belong to it."""
    lines: list[str] = []
    within = False
    for line in text.splitlines():
        field = FIELD.match(line)
        if field:
            lines += ([] if within else [""]) + [f"- `{field[1]}`: {line[field.end() :]}"]
            within = True
        elif within and line and (line.startswith("    ") or not lines[-1].endswith(".")):
            lines.append(f"    {line.strip()}")
        else:
            lines += ["", line] if within and line else [line]
            within = False
    return "\n".join(lines).replace("``", "`")
