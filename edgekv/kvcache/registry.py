"""The KV schemes by name: ours in CACHES, and those that other packages bring."""

from __future__ import annotations

import dataclasses
import functools
from importlib import metadata

from edgekv.errors import CacheError, unknown
from edgekv.kvcache.cache import Geometry, KVCache
from edgekv.kvcache.full import Dense
from edgekv.kvcache.onebit import OneBit
from edgekv.kvcache.papers.fier import Fier
from edgekv.kvcache.papers.h1b import H1B
from edgekv.kvcache.papers.h2o import H2O
from edgekv.kvcache.papers.int4_cache import Int4Cache
from edgekv.kvcache.papers.kivi import Kivi
from edgekv.kvcache.papers.kvcomp import KVComp
from edgekv.kvcache.papers.mikv import MiKV
from edgekv.kvcache.papers.quest import Quest
from edgekv.kvcache.papers.sign_keys import SignKeys
from edgekv.kvcache.papers.snapkv import SnapKV
from edgekv.kvcache.papers.streaming import Streaming
from edgekv.kvcache.papers.tova import Tova
from edgekv.kvcache.papers.visual import Visual1
from edgekv.kvcache.planes import NO_SECOND_STAGE, Planes
from edgekv.kvcache.tiered import Steps
from edgekv.kvcache.visual_planes import VisualPlanes

ENTRY_POINTS = "edgekv.schemes"
"""The entry points by which packages name their schemes: NAME = "module:Class"."""

CACHES: dict[str, type[KVCache]] = {
    scheme.name: scheme
    for scheme in (
        Dense,
        H1B,
        SignKeys,
        Int4Cache,
        Kivi,
        Streaming,
        H2O,
        SnapKV,
        Tova,
        MiKV,
        Fier,
        Quest,
        Visual1,
        VisualPlanes,
        KVComp,
        Planes,
        OneBit,
        Steps,
    )
}


def removed(kv: str, why: str) -> CacheError:
    """Returns the refusal of a scheme or knob that there was; ``why`` says what to do, too."""
    return CacheError(f"kv={kv!r} was removed: {why}", field="kv", value=kv)


def register(scheme: type[KVCache]) -> type[KVCache]:
    """Adds a scheme to CACHES under its ``name``; returns it, so that it can be a decorator.

    Raises CacheError for what is no scheme and for a name that another class has. A class may be registered again.
    """
    if not (isinstance(scheme, type) and issubclass(scheme, KVCache)):
        raise CacheError(f"{scheme!r} is no KV scheme: register a subclass of edgekv.KVCache")
    missing = [name for name in ("name", "paper", "summary", "gives_up", "Knobs") if not hasattr(scheme, name)]
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


def find_scheme(name: str) -> type[KVCache]:
    """The scheme of that name or alias, ours or another package's. Raises CacheError (field kv)."""
    if name == "bitplane":
        raise removed(name, NO_SECOND_STAGE)
    broken = {} if _present(name) in CACHES else load_entry_points()
    if name in broken:
        raise CacheError(broken[name], field="kv", value=name)
    if _present(name) not in CACHES:
        raise unknown(CacheError, "kv", name, CACHES)
    return CACHES[_present(name)]


def schemes() -> dict[str, type[KVCache]]:
    """All schemes by name, with those of other packages that can be used."""
    load_entry_points()
    return dict(CACHES)


def scheme_facts(name: str) -> dict[str, object]:
    """A scheme's paper, knobs with defaults, and bytes per token per KV head at head_dim 128 and 8,192 tokens.

    Bytes are None for a scheme that keeps to the bytes that it is given.
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
        "gives_up": scheme.gives_up,
        "knobs": dataclasses.asdict(knobs),
        "bytes_per_token_per_kv_head": None if scheme.bytes_knob else cache.planned_bytes() / tokens,
    }


@functools.cache
def load_entry_points() -> dict[str, str]:
    """Registers the schemes of installed packages, once; of those that can't be used the entry's name, and why."""
    broken = {}
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        if error := _load(entry):
            package = entry.dist.name if entry.dist else entry.value
            broken[entry.name] = (
                f"the KV scheme {entry.name!r} of the package {package} can't be loaded ({error:.200}); correct "
                "or uninstall that package"
            )
    return broken


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
