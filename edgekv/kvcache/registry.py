"""The KV schemes by name: ours in CACHES, and those that other packages bring."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Iterable
from importlib import metadata

from edgekv.errors import CacheError, unknown
from edgekv.kvcache.cache import Geometry, KVCache
from edgekv.kvcache.full import Dense
from edgekv.kvcache.planes import NO_SECOND_STAGE, OneBit, Planes

ENTRY_POINTS = "edgekv.schemes"
"""The entry points by which packages name their schemes: NAME = "module:Class", an alias likewise.

Where a scheme's name has "=", that of its entry point has "_".
"""
PAPERS = "edgekv.papers"

CACHES: dict[str, type[KVCache]] = {scheme.name: scheme for scheme in (Dense, Planes, OneBit)}

REMOVED = {
    "bitplane": NO_SECOND_STAGE,
    "steps": "a bound in bytes now chooses the bits; give kv_budget=BYTES (--kv-budget) alone",
}
"""Schemes that there were -> what to do instead."""


def removed(kv: str, why: str) -> CacheError:
    """Returns the refusal of a scheme or knob that there was; ``why`` says what to do, too."""
    return CacheError(f"kv={kv!r} was removed: {why}", field="kv", value=kv)


def register(scheme: type[KVCache]) -> type[KVCache]:
    """Adds a scheme to CACHES under its ``name``; returns it, so that it can be a decorator.

    Raises CacheError for what is no scheme and for a name that another class has. A class may be registered again.
    """
    if not (isinstance(scheme, type) and issubclass(scheme, KVCache)):
        raise CacheError(f"{scheme!r} is no KV scheme: register a subclass of edgekv.KVCache")
    missing = [name for name in ("name", "paper", "summary", "tradeoff", "Knobs") if not hasattr(scheme, name)]
    if missing:
        raise CacheError(f"{scheme.__name__} has no {missing[0]}: a KV scheme needs it as a class attribute")
    if not dataclasses.is_dataclass(scheme.Knobs):
        raise CacheError(f"{scheme.__name__}.Knobs is no dataclass: its fields are what users can set")
    known = next(
        (CACHES[name] for name in map(_present, (scheme.name, *scheme.aliases)) if name in CACHES), scheme
    )
    if known is not scheme:
        raise CacheError(
            f"the name {scheme.name!r} is taken by {known.__module__}.{known.__qualname__}: give "
            f"{scheme.__module__}.{scheme.__qualname__} another"
        )
    CACHES[scheme.name] = scheme
    return scheme


def _present(name: str) -> str:
    """The name under which a scheme is in CACHES, of one that it may have had before."""
    return next((scheme.name for scheme in CACHES.values() if name in scheme.aliases), name)


def find_scheme(name: str, others: Iterable[str] = ()) -> type[KVCache]:
    """The scheme of that name or alias, ours or another package's.

    Raises CacheError (field kv), which names ``others`` as accepted too.
    """
    if name in REMOVED:
        raise removed(name, REMOVED[name])
    if _present(name) not in CACHES:
        entries = metadata.entry_points(group=ENTRY_POINTS, name=name.replace("=", "_"))
        for entry in entries:
            if error := _load(entry):
                raise CacheError(_refusal(entry, error), field="kv", value=name)
    if _present(name) not in CACHES:
        known = sorted({*CACHES, *(entry.name for entry in _entries())})
        raise unknown(CacheError, "kv", name, (*others, *known))
    return CACHES[_present(name)]


def schemes() -> dict[str, type[KVCache]]:
    """All schemes by name, with those of other packages that can be used."""
    for entry in _entries():
        _load(entry)
    return dict(CACHES)


def broken_schemes() -> list[str]:
    """Why each scheme of another package that can't be used can't."""
    return [_refusal(entry, error) for entry in _entries() if (error := _load(entry))]


def _entries() -> list[metadata.EntryPoint]:
    """Those of all installed packages; without the papers' where edgekv was installed without them."""
    has_papers = importlib.util.find_spec(PAPERS) is not None
    return [
        entry
        for entry in metadata.entry_points(group=ENTRY_POINTS)
        if has_papers or not entry.value.startswith(PAPERS)
    ]


def scheme_facts(name: str) -> dict[str, object]:
    """A scheme's paper, knobs with defaults, and bytes per token per KV head at head_dim 128 and 8,192 tokens.

    Raises CacheError (field kv).
    """
    scheme, tokens = find_scheme(name), 8192
    knobs = scheme.Knobs()
    cache = scheme(Geometry(n_heads=1, n_kv_heads=1, head_dim=128, capacity=tokens), knobs)
    return {
        "name": scheme.name,
        "aliases": list(scheme.aliases),
        "paper": scheme.paper,
        "summary": scheme.summary,
        "tradeoff": scheme.tradeoff,
        "knobs": dataclasses.asdict(knobs),
        "bytes_per_token_per_kv_head": cache.planned_bytes() / tokens,
    }


def _refusal(entry: metadata.EntryPoint, error: str) -> str:
    if entry.value.startswith(PAPERS) and importlib.util.find_spec(PAPERS) is None:
        return f"kv={entry.name!r}: edgekv without its papers; install the full package: pip install edgekv"
    package = entry.dist.name if entry.dist else entry.value
    return (
        f"the KV scheme {entry.name!r} of the package {package} can't be loaded ({error:.200}); correct or "
        "uninstall that package"
    )


@functools.cache
def _load(entry: metadata.EntryPoint) -> str | None:
    """Registers a scheme that says all that lists show; else, whatever it did, why not."""
    before = dict(CACHES)
    try:
        scheme_facts(register(entry.load()).name)
    except (Exception, SystemExit) as error:
        CACHES.clear()
        CACHES.update(before)
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None
