"""Verdicts of the gate (`edgekv eval --gate`) that are kept on disk, for each model and scheme."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shlex
from typing import Any

from edgekv.checkpoint.hub import cached_model_name
from edgekv.engine.model import Model
from edgekv.files import Memo, cache_root
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.registry import PRESETS

VERDICT_FORMAT = 2  # of the remembered verdicts


def needs_gate(spec: CacheSpec) -> bool:
    """Returns whether the scheme loses more of a text than f16 rounds off."""
    return not spec.scheme.is_lossless_on_text(spec.config)


class Verdicts:
    """The gate's remembered verdicts on a model with its adapter, each until its scheme's `version` changes."""

    def __init__(self, model: Model, root: pathlib.Path | None = None) -> None:
        self.model, self._gates = model, root or cache_root() / "gates"

    @functools.cached_property
    def folder(self) -> pathlib.Path:
        """The folder of the verdicts, named by the model's identity, for which its files are hashed once."""
        return self._gates / self.model.adapted_identity

    def _file(self, spec: CacheSpec, kind: str) -> pathlib.Path:
        return self.folder / f"{spec.without_fit}.{kind}"

    def remember(self, spec: CacheSpec, verdict: Any, measured: dict[str, Any]) -> None:
        """Writes a verdict (a dataclass with ``failures``) and what was measured. Raises CheckpointError."""
        facts = {"scheme_version": spec.scheme.version, "passed": not verdict.failures, "measured": measured}
        Memo(self._file(spec, "json"), VERDICT_FORMAT).write(facts | dataclasses.asdict(verdict))
        self._file(spec, "warned").unlink(missing_ok=True)

    def verdict(self, spec: CacheSpec) -> dict[str, Any] | None:
        """Returns the facts of the last verdict on a scheme with these options."""
        facts = Memo(self._file(spec, "json"), VERDICT_FORMAT).read()
        return facts if facts and facts["scheme_version"] == spec.scheme.version else None

    def warning(self, spec: CacheSpec) -> str | None:
        """Returns a line for users of a scheme that failed or was never gated."""
        if not needs_gate(spec):
            return None
        name, verdict = spec.short, self.verdict(spec)
        if verdict is None:
            kv = shlex.quote(name)
            return f"the scheme {name} was never gated for this model; measure it: {self.command} --kv {kv}"
        if not verdict["failures"]:
            return None
        return (
            f"the scheme {name} failed its gate for this model on {verdict['measured'].get('text', 'a text')}: "
            f"{'; '.join(verdict['failures'])}; find a scheme that passes: {self.command}"
        )

    def passed(self, ctx: int = 1) -> list[str]:
        """Returns the presets that passed on contexts of ``ctx`` tokens or more.

        Where nothing was ever gated, the model's files are not hashed.
        """
        if not self._gates.exists():
            return []
        verdicts = {name: self.verdict(CacheSpec.parse(name)) for name in PRESETS}
        passed = {name: verdict for name, verdict in verdicts.items() if verdict and not verdict["failures"]}
        return [name for name, verdict in passed.items() if verdict["measured"].get("ctx", 0) >= ctx]

    @property
    def command(self) -> str:
        """The command that gates schemes for this model."""
        words = ["edgekv", "eval", "--gate", "--model", cached_model_name(self.model.path) or str(self.model.path)]
        if self.model.adapter:
            words += ["--adapter", str(self.model.adapter.path)]
        if self.model.lora:
            words += ["--lora", f"{self.model.lora.folder}:{self.model.lora.scale}"]
        return shlex.join([*words, "--text", "YOUR-TEXT"])

    def warn_once(self, spec: CacheSpec) -> str | None:
        """Returns `warning`, or None where it was returned before and the scheme was not gated since."""
        if (warning := self.warning(spec)) is not None:
            marker = self._file(spec, "warned")
            try:
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch(exist_ok=False)
            except FileExistsError:
                return None
            except OSError:  # a folder that can't be written: the warning may come twice
                pass
        return warning
