"""A KV scheme with its knobs, as text and as one cache per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from edgekv.errors import CacheError
from edgekv.kvcache.cache import Geometry, KVCache
from edgekv.kvcache.knobs import bad_knob, declared
from edgekv.kvcache.registry import broken_schemes, find_scheme, removed, schemes
from edgekv.kvcache.sliding import SlidingCache
from edgekv.models.config import ModelConfig

PRESETS = {
    "f16": "dense",
    "q8": "dense:dtype=q8",
    "q4": "planes:k_bits=4,v_bits=4",
    "q3": "planes:k_bits=3,v_bits=3,by_need=true",
    "q2": "planes:by_need=true",
    "q1.5": "planes:k_bits=1.5,v_bits=1.5",
}
"""What users type -> the scheme with its knobs; most bytes and least loss first."""


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """A scheme, and ``knobs``: an instance of its `Knobs`. Written ``NAME[:knob=value,...]``."""

    scheme: type[KVCache]
    knobs: Any

    @classmethod
    def parse(cls, text: str) -> CacheSpec:
        """From ``name`` or ``name:knob=value,...``: a preset, or a scheme; earlier names are understood.

        Raises CacheError (field kv): it says what is accepted.
        """
        name, colon, rest = text.partition(":")
        if name in PRESETS:
            preset = PRESETS[name]
            return cls.parse(f"{preset}{',' if ':' in preset else ':'}{rest}" if colon else preset)
        scheme = find_scheme(name, PRESETS)
        fields = {field.name: field for field in dataclasses.fields(scheme.Knobs)}
        aliases = getattr(scheme.Knobs, "aliases", {})
        values: dict[str, Any] = {}
        for item in filter(None, rest.split(",")):
            knob, equals, value = item.partition("=")
            knob = aliases.get(knob, knob)
            if equals and knob in getattr(scheme.Knobs, "retired", ()):  # changes nothing any more
                continue
            if equals and knob in (gone := getattr(scheme.Knobs, "removed", {})):
                if value.strip("0."):
                    raise removed(text, gone[knob])
                continue
            if knob not in fields or not equals:
                raise _no_knob(name, item, fields)
            values[knob] = _convert(name, fields[knob], value)
        knobs: Any = scheme.Knobs
        return cls(scheme, knobs(**values))

    @classmethod
    def parse_list(cls, text: str) -> list[CacheSpec]:
        """Schemes of a comma-separated list in which the knobs are separated by commas too, or of ``all``.

        Raises CacheError (field kv).
        """
        if text == "all":
            return [cls.parse(name) for name in schemes()]
        items: list[str] = []
        for item in text.split(","):
            if items and "=" in item and ":" not in item and item not in schemes():
                items[-1] += f",{item}"
            else:
                items.append(item)
        return [cls.parse(item) for item in items]

    def __str__(self) -> str:
        knobs = ",".join(f"{k}={v}" for k, v in dataclasses.asdict(self.knobs).items() if v != "")
        return f"{self.scheme.name}:{knobs}" if knobs else self.scheme.name

    @property
    def short(self) -> str:
        """As a person writes it: a preset, or only the knobs that are not at their defaults or were found."""
        asked = self.as_asked
        if name := next((name for name in PRESETS if CacheSpec.parse(name) == asked), None):
            return name
        knobs = asked.knobs
        values = [(f.name, getattr(knobs, f.name), f.default) for f in dataclasses.fields(knobs)]
        own = ",".join(f"{name}={value}" for name, value, default in values if value != default)
        return f"{self.scheme.name}:{own}" if own else self.scheme.name

    @property
    def as_asked(self) -> CacheSpec:
        """Without the knobs that a fit on the model found: those that its `Knobs` name as ``found``."""
        found = getattr(self.knobs, "found", ())
        defaults = {f.name: f.default for f in dataclasses.fields(self.knobs) if f.name in found}
        return dataclasses.replace(self, knobs=dataclasses.replace(self.knobs, **defaults)) if found else self

    def layers(self, config: ModelConfig, capacity: int) -> list[KVCache]:
        """One cache per layer that attends, for ``capacity`` tokens, not allocated yet.

        Raises CacheError (field kv) for a bad config.
        """
        attending = [i for i, each in enumerate(config.layer_recurrences) if each is None]
        return [
            self.layer(
                Geometry(
                    n_heads=config.n_heads,
                    n_kv_heads=config.n_kv_heads,
                    head_dim=config.head_dim,
                    capacity=capacity,
                    layer=k,
                    n_layers=len(attending),
                    sliding_window=config.layer_windows[i],
                    score_cap=config.score_cap,
                ),
            )
            for k, i in enumerate(attending)
        ]

    def layer(self, geometry: Geometry) -> KVCache:
        """One layer's cache; of one that slides its window alone, if the scheme allows that and it takes less."""
        own = self.scheme(geometry, self.knobs)
        codecs = self.scheme.window_codecs(self.knobs)
        if codecs is None or geometry.sliding_window is None:
            return own
        rolling = SlidingCache(geometry, self.knobs, codecs)
        return rolling if rolling.planned_bytes() < own.planned_bytes() else own

    def planned_bytes(self, config: ModelConfig, capacity: int) -> int:
        """Bytes of all caches' arrays for ``capacity`` tokens."""
        return sum(cache.planned_bytes() for cache in self.layers(config, capacity))


def suited(
    specs: Sequence[CacheSpec], config: ModelConfig, capacity: int, named: bool
) -> tuple[list[CacheSpec], list[str]]:
    """The schemes that can have this model, and of each of the others why not.

    Raises CacheError for one of these where they are ``named``, and not a list that nobody chose.
    """
    fitting, reasons = [], [] if named else broken_schemes()
    for spec in specs:
        try:
            spec.layers(config, capacity)
            fitting.append(spec)
        except CacheError as error:  # noqa: PERF203
            if named:
                raise
            reasons.append(str(error))
    return fitting, [reason.partition(";")[0] for reason in reasons]


def _no_knob(name: str, item: str, fields: dict[str, dataclasses.Field[Any]]) -> CacheError:
    accepted = [f"{field.name}={field.default}" for field in fields.values()]
    knob = item.partition("=")[0]
    others = [scheme for scheme, each in schemes().items() if hasattr(each.Knobs, knob)]
    hint = f"; {knob} applies to: {', '.join(others)}" if others and knob not in fields else ""
    takes = f"{name}:{','.join(accepted)}" if accepted else "no knobs"
    return CacheError(
        f"kv={f'{name}:{item}'!r}: {knob!r} is not one of its knobs; accepted (defaults): {takes}{hint}",
        field="kv",
        value=item,
        accepted=accepted,
    )


def _convert(name: str, field: dataclasses.Field[Any], text: str) -> Any:
    kind: Any = type(field.default)
    try:
        value = {"0": False, "1": True, "false": False, "true": True}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise bad_knob(name, field.name, text, *declared(field).phrases) from None
    if not declared(field).takes(value):
        raise bad_knob(name, field.name, text, *declared(field).phrases)
    return value
