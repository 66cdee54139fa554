"""What is wrong with a knob, said in one way by all schemes."""

from __future__ import annotations

from edgekv.errors import CacheError


def bad_knob(scheme: str, knob: str, value: object, *accepted: object) -> CacheError:
    """A value that a knob does not take. accepted: what it takes, a value or a phrase each."""
    whole, takes = f"{scheme}:{knob}={value}", [str(each) for each in accepted]
    return CacheError(f"kv={whole!r}: accepted: {', '.join(takes)}", field="kv", value=whole, accepted=takes)
