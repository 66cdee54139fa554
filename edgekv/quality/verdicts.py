"""What is remembered of gates: a folder per model under the cache folder, a JSON file per scheme in it."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shlex
from typing import Any

from edgekv.cache_folder import Memo, cache_root
from edgekv.checkpoint.hub_name import name_of
from edgekv.kvcache import CacheSpec
from edgekv.quality.gate import Verdict, needs_gate
from edgekv.session.model import Model

FORMAT = 2


@dataclasses.dataclass(frozen=True)
class StoredVerdict:
    """A scheme's last verdict: ``failures`` and ``measured`` as `Verdicts.remember` was given them."""

    failures: tuple[str, ...]
    measured: dict[str, Any]


class Verdicts:
    """The verdicts on one model, with its adapter if it has one.

    A verdict holds until the scheme's `version` changes.
    """

    def __init__(self, model: Model, root: pathlib.Path | None = None) -> None:
        self.model, self._root = model, root

    @functools.cached_property
    def folder(self) -> pathlib.Path:
        """Where they are: by the model's identity, for which all of its files are hashed once."""
        return (self._root or cache_root() / "gates") / self.model.adapted_identity

    def remember(self, spec: CacheSpec, verdict: Verdict, measured: dict[str, Any]) -> None:
        """Writes the verdict, and what it was ``measured`` on. Raises CheckpointError when it can't."""
        facts = {
            "scheme_version": spec.scheme.version,
            "passed": verdict.passed,
            **dataclasses.asdict(verdict),
            "measured": measured,
        }
        Memo(self._file(spec, "json"), FORMAT).write(facts)
        self._file(spec, "warned").unlink(missing_ok=True)

    def verdict(self, spec: CacheSpec) -> StoredVerdict | None:
        """The last one on this very scheme with its knobs."""
        facts = Memo(self._file(spec, "json"), FORMAT).read()
        if facts is None or facts["scheme_version"] != spec.scheme.version:
            return None
        return StoredVerdict(tuple(facts["failures"]), facts["measured"])

    def warning(self, spec: CacheSpec) -> str | None:
        """What a user should know before using the scheme, in a line; for a scheme made of others, of these."""
        parts = [CacheSpec.parse(name) for name in spec.scheme.packs_like] or [spec]
        verdicts = {part.short: self.verdict(part) for part in parts if needs_gate(part)}
        for name, verdict in verdicts.items():
            if verdict and verdict.failures:
                return (
                    f"kv={name!r} failed its gate for this model on {verdict.measured.get('text', 'a text')}: "
                    f"{'; '.join(verdict.failures)}; find a scheme that passes: {self.command}"
                )
        never = ",".join(name for name, verdict in verdicts.items() if verdict is None)
        if never:
            kv = shlex.quote(never)
            return f"kv={never!r} was never gated for this model; measure it: {self.command} --kv {kv}"
        return None

    @property
    def command(self) -> str:
        """What gates the model's schemes."""
        adapter = f" --adapter {shlex.quote(str(self.model.adapter.path))}" if self.model.adapter else ""
        lora = self.model.lora
        lora_text = f" --lora {shlex.quote(f'{lora.folder}:{lora.scale}')}" if lora else ""
        model = shlex.quote(name_of(self.model.path) or str(self.model.path))
        return f"edgekv eval --gate --model {model}{adapter}{lora_text} --text YOUR-TEXT"

    def warn_once(self, spec: CacheSpec) -> str | None:
        """`warning`, unless it was given before and the scheme has not been gated since."""
        warning = self.warning(spec)
        if warning is None:
            return None
        marker = self._file(spec, "warned")
        try:
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch(exist_ok=False)
        except FileExistsError:
            return None
        except OSError:  # a folder that can't be written: better twice than never
            return warning
        return warning

    def _file(self, spec: CacheSpec, kind: str) -> pathlib.Path:
        return self.folder / f"{spec.as_asked}.{kind}"
