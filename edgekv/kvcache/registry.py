"""The registry of KV schemes, ours and those of other packages; and `CacheSpec`, a scheme with its options."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from edgekv.errors import CacheError, nearest
from edgekv.kvcache.cache import EXAMPLE, Geometry, KVCache
from edgekv.kvcache.config import accepted_by, accepts, bad_option
from edgekv.kvcache.planes import OneBit, Planes
from edgekv.kvcache.policies import Dense, RollingCache
from edgekv.models.config import ModelConfig

ENTRY_POINTS = "edgekv.schemes"
"""The entry points by which packages name their schemes: NAME = "module:Class"."""
CACHES: dict[str, type[KVCache]] = {scheme.name: scheme for scheme in (Dense, Planes, OneBit)}
PRESETS = {
    "f16": "dense",
    "q8": "dense:dtype=q8",
    "q4": "planes:k_bits=4,v_bits=4",
    "q3": "planes:k_bits=3,v_bits=3,mixed_bits=true",
    "q2": "planes:mixed_bits=true",
    "q1.5": "planes:k_bits=1.5,v_bits=1.5",
}
"""What users type -> the scheme with its options; most bytes and least loss first."""
OF_BITS = re.compile(r"(?:[a-z]?int|fp|bf|i?q|nf|turbo|kv)_?(\d|16|32)(?:[_b].*)?", re.IGNORECASE)
"""What others call caches of so many bits: int8, q5_1, fp8_e4m3, turbo3."""
FACTS_TOKENS = 8192  # over which `CacheSpec.bytes_per_token` is averaged


def register(scheme: type[KVCache]) -> type[KVCache]:
    """Adds a scheme to CACHES under its ``name``, and returns it: a class decorator.

    Raises CacheError for what is no scheme and for a name that another class has. A class may be registered again.
    """
    if not (isinstance(scheme, type) and issubclass(scheme, KVCache)):
        raise CacheError(f"{scheme!r} is no KV scheme: register a subclass of edgekv.plugin.KVCache")
    missing = [name for name in ("name", "paper", "summary", "tradeoff", "Config") if not hasattr(scheme, name)]
    if missing:
        raise CacheError(f"{scheme.__name__} has no {missing[0]}: a KV scheme needs it as a class attribute")
    if not dataclasses.is_dataclass(scheme.Config):
        raise CacheError(f"{scheme.__name__}.Config is no dataclass: its fields are what users can set")
    known = CACHES.setdefault(scheme.name, scheme)
    if known is not scheme:
        raise CacheError(
            f"the name {scheme.name!r} is taken by {known.__module__}.{known.__qualname__}: give "
            f"{scheme.__module__}.{scheme.__qualname__} another"
        )
    return scheme


def find_scheme(name: str) -> type[KVCache]:
    """Returns the scheme called ``name``, ours or another package's. Raises CacheError (field kv)."""
    if name in CACHES:
        return CACHES[name]
    for entry in _entry_points(name):
        scheme = _load(entry)
        if isinstance(scheme, str):
            raise CacheError(_refusal(entry, scheme), field="kv", value=name)
        return scheme
    raise _unknown(name)


def _unknown(name: str) -> CacheError:
    known = sorted({*CACHES, *(entry.name for entry in _entry_points())})
    advice = "" if find_spec("edgekv.papers") else "the papers' schemes are missing here: pip install edgekv"
    if bits := OF_BITS.fullmatch(name):
        advice = f"did you mean {min(PRESETS, key=lambda name: abs(float(name[1:]) - float(bits[1])))}?"
    if re.fullmatch(r"q[1-3]\.[0-9]{1,3}", name):
        advice = f"of fractions only q1.5 is a name; did you mean planes:k_bits={name[1:]},v_bits={name[1:]}?"
    return CacheError("unknown", field="kv", value=name, accepted=(*PRESETS, *known), advice=advice)


def _entry_points(name: str | None = None) -> list[metadata.EntryPoint]:
    """Returns what packages offer as schemes; of edgekv itself nothing where its papers' folder is missing."""
    has_papers = find_spec("edgekv.papers") is not None
    return [
        entry
        for entry in metadata.entry_points(group=ENTRY_POINTS)
        if name in (None, entry.name) and (has_papers or not entry.value.startswith("edgekv.papers"))
    ]


def schemes() -> dict[str, type[KVCache]]:
    """Returns all schemes by name, with those of other packages that can be used."""
    for entry in _entry_points():
        _load(entry)
    return dict(CACHES)


def broken_schemes() -> list[str]:
    """Returns why each scheme of another package that can't be used can't be, in a line."""
    loaded = ((entry, _load(entry)) for entry in _entry_points())
    return [_refusal(entry, error) for entry, error in loaded if isinstance(error, str)]


def scheme_facts(name: str) -> dict[str, object]:
    """Returns a scheme's paper, options with defaults, and bytes per token and KV head of 128 channels.

    Raises CacheError (field kv).
    """
    scheme = find_scheme(name)
    config = scheme.Config()
    return {
        "name": scheme.name,
        "paper": scheme.paper,
        "summary": scheme.summary,
        "tradeoff": scheme.tradeoff,
        "options": dataclasses.asdict(config),
        "bytes_per_token_per_kv_head": CacheSpec(scheme, config).bytes_per_token(n_heads=1),
    }


def _refusal(entry: metadata.EntryPoint, error: str) -> str:
    package = entry.dist.name if entry.dist else entry.value
    return (
        f"the KV scheme {entry.name!r} of the package {package} can't be loaded ({error:.200}); correct or "
        "uninstall that package"
    )


@functools.cache
def _load(entry: metadata.EntryPoint) -> type[KVCache] | str:
    """Registers another package's scheme and returns it, or the reason why it can't be used."""
    before = dict(CACHES)
    try:
        scheme = register(entry.load())
        scheme_facts(scheme.name)
    except (Exception, SystemExit) as error:
        CACHES.clear()
        CACHES.update(before)
        return " ".join(f"{type(error).__name__}: {error}".split())
    return scheme


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """A scheme with its options, an instance of its `Config`; written ``NAME[:option=value,...]``."""

    scheme: type[KVCache]
    config: Any

    @classmethod
    def parse(cls, text: str) -> CacheSpec:
        """Parses ``name`` or ``name:option=value,...``, where the name is a preset's or a scheme's.

        Raises CacheError (field kv), which says what is accepted.
        """
        name, colon, rest = text.partition(":")
        if colon and not rest:
            raise CacheError("no option after the colon", field="kv", value=text, advice=f"did you mean {name}?")
        scheme_name, _, preset = PRESETS.get(name, name).partition(":")
        scheme = find_scheme(scheme_name)
        fields = {field.name: field for field in dataclasses.fields(scheme.Config)}
        values: dict[str, Any] = {}
        for item in filter(None, f"{preset},{rest}".split(",")):
            option, equals, value = item.partition("=")
            if option not in fields or not equals:
                raise _no_option(name, item, dataclasses.asdict(cls.parse(name).config))
            values[option] = _read(name, fields[option], value)
        config: Any = scheme.Config
        return cls(scheme, config(**values))

    @classmethod
    def parse_list(cls, text: str) -> list[CacheSpec]:
        """Parses a comma-separated list of schemes, whose options are separated by commas too, or ``all``.

        Raises CacheError (field kv).
        """
        if text == "all":
            return [cls.parse(name) for name in schemes()]
        items: list[str] = []
        for item in text.split(","):
            if items and "=" in item and ":" not in item:
                items[-1] += f",{item}"
            else:
                items.append(item)
        return [cls.parse(item) for item in items]

    def __str__(self) -> str:
        return self._text({k: v for k, v in dataclasses.asdict(self.config).items() if v != ""})

    def _text(self, options: dict[str, Any]) -> str:
        return f"{self.scheme.name}:{','.join(f'{k}={v}' for k, v in options.items())}".removesuffix(":")

    @property
    def short(self) -> str:
        """The spec as a person writes it: a preset, or a scheme with the options that are not defaults."""
        requested = self.without_fit
        if name := next((name for name in PRESETS if CacheSpec.parse(name) == requested), None):
            return name
        options, fields = dataclasses.asdict(requested.config), dataclasses.fields(requested.config)
        return self._text({f.name: options[f.name] for f in fields if options[f.name] != f.default})

    @property
    def without_fit(self) -> CacheSpec:
        """The spec without the options that a fit on the model gave, which its `Config` names as ``derived``."""
        derived = getattr(self.config, "derived", ())
        defaults = {f.name: f.default for f in dataclasses.fields(self.config) if f.name in derived}
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **defaults)) if derived else self

    def layers(self, model: ModelConfig, capacity: int) -> list[KVCache]:
        """Returns a cache for ``capacity`` tokens, not allocated yet, of each layer that attends.

        Raises CacheError (field kv) for options that the model can't have.
        """
        attending = [i for i, recurrence in enumerate(model.layer_recurrences) if recurrence is None]
        return [
            self.layer(
                Geometry(
                    n_heads=model.n_heads,
                    n_kv_heads=model.n_kv_heads,
                    head_dim=model.head_dim,
                    capacity=capacity,
                    layer=k,
                    n_layers=len(attending),
                    sliding_window=model.layer_windows[i],
                    score_cap=model.score_cap,
                )
            )
            for k, i in enumerate(attending)
        ]

    def layer(self, geometry: Geometry) -> KVCache:
        """Returns a layer's cache: a `RollingCache` where the layer slides and that is allowed and smaller."""
        cache = self.scheme(geometry, self.config)
        codecs = self.scheme.window_codecs(self.config)
        if codecs is None or geometry.sliding_window is None:
            return cache
        rolling = RollingCache(geometry, self.config, codecs)
        return rolling if rolling.planned_bytes() < cache.planned_bytes() else cache

    def planned_bytes(self, model: ModelConfig, capacity: int) -> int:
        """Returns the bytes of all layers' caches for ``capacity`` tokens."""
        return sum(cache.planned_bytes() for cache in self.layers(model, capacity))

    def bytes_per_token(self, n_heads: int = 4) -> float:
        """Returns the mean bytes per token and KV head of 128 channels, over FACTS_TOKENS tokens."""
        shape = dataclasses.replace(EXAMPLE, n_heads=n_heads, n_kv_heads=n_heads, capacity=FACTS_TOKENS)
        return self.scheme(shape, self.config).planned_bytes() / n_heads / FACTS_TOKENS


def select_specs(
    specs: Sequence[CacheSpec], model: ModelConfig, capacity: int, named: bool
) -> tuple[list[CacheSpec], list[str]]:
    """Returns the schemes that this model can run with, and a line on each of the others.

    named: whether the user named the schemes: then one of the others raises CacheError.
    """
    fitting, reasons = [], [] if named else broken_schemes()
    for spec in specs:
        try:
            spec.layers(model, capacity)
            fitting.append(spec)
        except CacheError as error:  # noqa: PERF203
            if named:
                raise
            reasons.append(f"{spec.short}: {error.problem}")
    return fitting, [reason.partition(";")[0] for reason in reasons]


def _no_option(name: str, item: str, options: dict[str, Any]) -> CacheError:
    accepted = [f"{key}={default}" for key, default in options.items() if default != ""]
    option = item.partition("=")[0]
    others = [scheme for scheme, kind in schemes().items() if hasattr(kind.Config, option)]
    hint = f"{option} applies to: {', '.join(others)}" if others and option not in options else ""
    if not hint and (close := nearest(option, options)):
        hint = f"did you mean {close}?"
    problem = f"{option!r} is not one of its options (here with their defaults)" if accepted else "has no options"
    return CacheError(problem, field="kv", value=f"{name}:{item}", accepted=accepted, advice=hint)


def _read(name: str, field: dataclasses.Field[Any], text: str) -> Any:
    """Returns an option's value. Raises CacheError for a text that the option does not accept."""
    kind: Any = type(field.default)
    try:
        value = {"0": False, "1": True, "false": False, "true": True}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        value = None
    if not accepts(field, value):
        raise bad_option(name, field.name, text, *accepted_by(field).phrases)
    return value
