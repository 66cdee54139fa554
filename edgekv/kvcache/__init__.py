"""KV schemes: one entry per scheme; the CLI's choices, the tests and the README's table all read CACHES."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgekv.errors import CacheError
from edgekv.kvcache.base import Geometry, KVCache
from edgekv.kvcache.bitplane import BitPlane
from edgekv.kvcache.dense import Dense
from edgekv.kvcache.onebit import OneBit
from edgekv.kvcache.papers.fier import Fier
from edgekv.kvcache.papers.h1b import H1B
from edgekv.kvcache.papers.h2o import H2O
from edgekv.kvcache.papers.kivi import Kivi
from edgekv.kvcache.papers.kvcomp import KVComp
from edgekv.kvcache.papers.loki import Loki
from edgekv.kvcache.papers.mikv import MiKV
from edgekv.kvcache.papers.minicache import MiniCache
from edgekv.kvcache.papers.quest import Quest
from edgekv.kvcache.papers.snapkv import SnapKV
from edgekv.kvcache.papers.streaming import Streaming
from edgekv.kvcache.papers.tova import Tova
from edgekv.kvcache.papers.visual import Visual1
from edgekv.models.config import ModelConfig

CACHES: dict[str, type[KVCache]] = {
    "dense": Dense,
    "h1b": H1B,
    "loki1": Loki,
    "minicache4": MiniCache,
    "kivi2": Kivi,
    "streaming": Streaming,
    "h2o": H2O,
    "snapkv": SnapKV,
    "tova": Tova,
    "mikv": MiKV,
    "fier": Fier,
    "quest": Quest,
    "visual1": Visual1,
    "kvcomp": KVComp,
    "onebit": OneBit,
    "bitplane": BitPlane,
}


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """A scheme with its knobs, as written in ``--kv NAME[:knob=value,...]``."""

    scheme: type[KVCache]
    knobs: Any

    @classmethod
    def parse(cls, text: str, **overrides: Any) -> CacheSpec:
        """From ``name`` or ``name:knob=value,...``; CacheError names what is accepted.

        ``overrides`` replace knobs that the scheme has.
        """
        name, _, rest = text.partition(":")
        if name not in CACHES:
            raise CacheError(f"--kv {name!r} is unknown; accepted: {', '.join(CACHES)}")
        scheme = CACHES[name]
        fields = {field.name: field for field in dataclasses.fields(scheme.Knobs)}
        values: dict[str, Any] = {}
        for item in filter(None, rest.split(",")):
            knob, equals, value = item.partition("=")
            if knob not in fields or not equals:
                accepted = ", ".join(f"{f.name}={f.default}" for f in fields.values()) or "no knobs"
                raise CacheError(f"--kv {name}: {item!r} is not one of its knobs; accepted (defaults): {accepted}")
            values[knob] = _convert(name, fields[knob], value)
        for knob, value in overrides.items():
            if knob not in fields:
                raise CacheError(f"--kv {name} has no {knob}; it applies to: {', '.join(_with_knob(knob))}")
            values[knob] = value
        knobs: Any = scheme.Knobs
        return cls(scheme, knobs(**values))

    def __str__(self) -> str:
        knobs = ",".join(f"{k}={v}" for k, v in dataclasses.asdict(self.knobs).items())
        return f"{self.scheme.name}:{knobs}" if knobs else self.scheme.name

    @property
    def short(self) -> str:
        """As a person writes it: only the knobs that are not at their defaults."""
        values = [(f.name, getattr(self.knobs, f.name), f.default) for f in dataclasses.fields(self.knobs)]
        own = ",".join(f"{name}={value}" for name, value, default in values if value != default)
        return f"{self.scheme.name}:{own}" if own else self.scheme.name

    def layers(self, config: ModelConfig, capacity: int) -> list[KVCache]:
        """One cache per layer, not allocated yet."""
        return [
            self.scheme(
                Geometry(
                    n_heads=config.n_heads,
                    n_kv_heads=config.n_kv_heads,
                    head_dim=config.head_dim,
                    capacity=capacity,
                    layer=i,
                    n_layers=config.n_layers,
                    window=config.layer_windows[i],
                ),
                self.knobs,
            )
            for i in range(config.n_layers)
        ]


def _convert(name: str, field: dataclasses.Field[Any], text: str) -> Any:
    kind: Any = type(field.default)
    if kind is bool:
        if text.lower() not in ("0", "1", "true", "false"):
            raise CacheError(f"--kv {name}:{field.name}={text}: accepted: true or false")
        return text.lower() in ("1", "true")
    try:
        return kind(text)
    except ValueError:
        raise CacheError(f"--kv {name}:{field.name}={text}: it must be a {kind.__name__}") from None


def _with_knob(knob: str) -> list[str]:
    return [name for name, scheme in CACHES.items() if knob in {f.name for f in dataclasses.fields(scheme.Knobs)}]
