"""What is wrong with a knob, or with an adapter, said in one way by all schemes."""

from __future__ import annotations

from collections.abc import Iterable

from edgekv.errors import CacheError


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


def bad_knob(scheme: str, knob: str, value: object, *accepted: object) -> CacheError:
    """A value that a knob does not take. accepted: what it takes, a value or a phrase each."""
    whole, takes = f"{scheme}:{knob}={value}", [str(each) for each in accepted]
    return CacheError(f"kv={whole!r}: accepted: {', '.join(takes)}", field="kv", value=whole, accepted=takes)
