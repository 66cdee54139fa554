"""What the gate found of KV schemes on a model: remembered per model and scheme."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shlex
from typing import Any

from edgekv.checkpoint.hub import name_of
from edgekv.engine.model import Model
from edgekv.files import Memo, cache_root
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.spec import PRESETS

FORMAT = 2  # of remembered verdicts


def needs_gate(spec: CacheSpec) -> bool:
    """Whether the scheme loses more of a text than f16 rounds off."""
    return not spec.scheme.is_lossless_on_text(spec.knobs)


class Verdicts:
    """The verdicts on one model, with its adapter if it has one.

    A verdict holds until the scheme's `version` changes.
    """

    def __init__(self, model: Model, root: pathlib.Path | None = None) -> None:
        self.model, self._gates = model, root or cache_root() / "gates"

    @functools.cached_property
    def folder(self) -> pathlib.Path:
        """Where they are: by the model's identity, for which all of its files are hashed once."""
        return self._gates / self.model.adapted_identity

    def _file(self, spec: CacheSpec, kind: str) -> pathlib.Path:
        return self.folder / f"{spec.as_asked}.{kind}"

    def remember(self, spec: CacheSpec, verdict: Any, measured: dict[str, Any]) -> None:
        """Write a verdict, a dataclass with ``failures``, and what it was measured on. Raises CheckpointError."""
        facts = {"scheme_version": spec.scheme.version, "passed": not verdict.failures, "measured": measured}
        Memo(self._file(spec, "json"), FORMAT).write(facts | dataclasses.asdict(verdict))
        self._file(spec, "warned").unlink(missing_ok=True)

    def verdict(self, spec: CacheSpec) -> dict[str, Any] | None:
        """Return the facts of the last verdict on this very scheme with its knobs."""
        facts = Memo(self._file(spec, "json"), FORMAT).read()
        return facts if facts and facts["scheme_version"] == spec.scheme.version else None

    def warning(self, spec: CacheSpec) -> str | None:
        """Return what a user should know before using the scheme, in a line."""
        if not needs_gate(spec):
            return None
        name, verdict = spec.short, self.verdict(spec)
        if verdict is None:
            kv = shlex.quote(name)
            return f"kv={name!r} was never gated for this model; measure it: {self.command} --kv {kv}"
        if not verdict["failures"]:
            return None
        return (
            f"kv={name!r} failed its gate for this model on {verdict['measured'].get('text', 'a text')}: "
            f"{'; '.join(verdict['failures'])}; find a scheme that passes: {self.command}"
        )

    def passed(self) -> list[str]:
        """Return the presets that passed. Where nothing was ever gated, the model is not even identified."""
        if not self._gates.exists():
            return []
        verdicts = {name: self.verdict(CacheSpec.parse(name)) for name in PRESETS}
        return [name for name, verdict in verdicts.items() if verdict and not verdict["failures"]]

    @property
    def command(self) -> str:
        """What gates the model's schemes."""
        words = ["edgekv", "eval", "--gate", "--model", name_of(self.model.path) or str(self.model.path)]
        if self.model.adapter:
            words += ["--adapter", str(self.model.adapter.path)]
        if self.model.lora:
            words += ["--lora", f"{self.model.lora.folder}:{self.model.lora.scale}"]
        return shlex.join([*words, "--text", "YOUR-TEXT"])

    def warn_once(self, spec: CacheSpec) -> str | None:
        """Return `warning`, unless it was given before and the scheme has not been gated since."""
        warning = self.warning(spec)
        if warning is not None:
            marker = self._file(spec, "warned")
            try:
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch(exist_ok=False)
            except FileExistsError:
                return None
            except OSError:  # a folder that can't be written: better twice than never
                pass
        return warning
