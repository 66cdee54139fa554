"""The gate: whether a lossy KV scheme may be used with a model, measured on a user's text, and remembered."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgekv.checkpoint.adapter import Adapter
from edgekv.checkpoint.hub import name_of
from edgekv.engine.decoder import Decoder
from edgekv.engine.model import Model
from edgekv.engine.options import DEFAULT_CTX
from edgekv.errors import ContextError
from edgekv.eval.evaluate import FIT_TOKENS, Quality, evaluate
from edgekv.eval.needles import NEEDLES, NeedleTest, Prose
from edgekv.files import Memo, cache_root
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import AUTO
from edgekv.text import Tokenizer
from edgekv.types import TaskProgress

FORMAT = 2  # of remembered verdicts
PUBLISHED = pathlib.Path(__file__).parent / "published.json"  # written by tools/docs/tables.py
LEAST_TOKENS = 512  # most schemes keep the latest 128 tokens exact: a shorter text tells nothing


@dataclasses.dataclass(frozen=True)
class GateLimits:
    """What a scheme must hold against dense: docs/gate.md has the reasons for the defaults.

    ``max_kl``: nats, over all positions and over the later half of each window. ``min_top1``: the share of
    positions, likewise. ``min_needles``: the share of the needles that the dense cache finds.
    """

    max_kl: float = 0.05
    min_top1: float = 0.9
    min_needles: float = 0.9


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was measured, and each limit that was missed, as a phrase.

    ``needles``: how many were found and how many asked for; None where the model can't be asked.
    """

    quality: Quality
    needles: tuple[int, int] | None
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether no limit was missed."""
        return not self.failures

    @property
    def kv(self) -> str:
        """The scheme with its knobs."""
        return self.quality.kv


def needs_gate(spec: CacheSpec) -> bool:
    """Whether the scheme loses more of a text than f16 rounds off."""
    return not spec.scheme.exact_on_text(spec.knobs)


DEFAULT_SCHEMES = tuple(text for text in AUTO if needs_gate(CacheSpec.parse(text)))


def default_ctx(n_tokens: int, max_positions: int) -> int:
    """The window for a text: 8192 tokens, or the model's positions, or the whole text, whichever is least.

    Raises ContextError for a text too short to tell anything.
    """
    if n_tokens < min(LEAST_TOKENS, max_positions):
        raise ContextError(
            f"the text has {n_tokens} tokens, too few to gate a scheme on; give {LEAST_TOKENS} or more, best as "
            "many as your contexts will have"
        )
    return min(DEFAULT_CTX, max_positions, n_tokens)


def judge(quality: Quality, needles: tuple[int, int] | None, limits: GateLimits) -> Verdict:
    """A verdict by all the limits."""
    kl, top1 = max(quality.kl, quality.kl_second_half), min(quality.top1, quality.top1_second_half)
    failures = []
    if not kl <= limits.max_kl:  # so that nan fails
        failures.append(f"KL {kl:.4f}, more than {limits.max_kl:g}")
    if not top1 >= limits.min_top1:
        failures.append(f"top-1 {top1:.3f}, less than {limits.min_top1:g}")
    if needles is not None and needles[0] < limits.min_needles * needles[1]:
        failures.append(f"needles {needles[0]} of {needles[1]}, less than {limits.min_needles:.0%}")
    return Verdict(quality, needles, tuple(failures))


def recommended(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The smallest cache that passed."""
    return min((v for v in verdicts if v.passed), key=lambda v: v.quality.cache_bytes, default=None)


def gate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    specs: Sequence[CacheSpec],
    ctx: int,
    *,
    windows: int = 1,
    limits: GateLimits | None = None,
    n_needles: int = NEEDLES,
    fit_tokens: int = FIT_TOKENS,
    adapter: Adapter | None = None,
    progress: TaskProgress | None = None,
) -> tuple[list[Verdict], NeedleTest]:
    """A verdict per scheme over the first ``windows`` of a tokenised text, and the needles hidden anywhere in it.

    Raises ContextError when the text does not fill a window.
    """
    read = tokens[: ctx * windows]
    qualities = evaluate(decoder, read, ctx, specs, fit_tokens=fit_tokens, adapter=adapter, progress=progress)
    text = np.asarray(tokens[len(tokenizer.encode("")) :])
    needle_test = NeedleTest.make(decoder, tokenizer, Prose(text, tokenizer), ctx, n=n_needles, progress=progress)
    verdicts = []
    for spec, quality in zip(specs, qualities, strict=True):
        needles = None
        if needle_test.applies:
            found = needle_test.score(decoder, tokenizer, spec, adapter, progress)
            needles = found, needle_test.n_known
        verdicts.append(judge(quality, needles, limits or GateLimits()))
    return verdicts, needle_test


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

    def _file(self, spec: CacheSpec, kind: str) -> pathlib.Path:
        return self.folder / f"{spec.as_asked}.{kind}"

    def remember(self, spec: CacheSpec, verdict: Verdict, measured: dict[str, Any]) -> None:
        """Write the verdict, and what it was ``measured`` on. Raises CheckpointError when it can't."""
        facts = {"scheme_version": spec.scheme.version, "passed": verdict.passed, "measured": measured}
        Memo(self._file(spec, "json"), FORMAT).write(facts | dataclasses.asdict(verdict))
        self._file(spec, "warned").unlink(missing_ok=True)

    def verdict(self, spec: CacheSpec) -> dict[str, Any] | None:
        """Return the facts of the last verdict on this very scheme with its knobs."""
        facts = Memo(self._file(spec, "json"), FORMAT).read()
        return facts if facts and facts["scheme_version"] == spec.scheme.version else None

    def warning(self, spec: CacheSpec) -> str | None:
        """Return what a user should know before using the scheme, in a line; for one made of others, of these."""
        parts = [CacheSpec.parse(name) for name in spec.scheme.packs_like] or [spec]
        verdicts = {part.short: self.verdict(part) for part in parts if needs_gate(part)}
        for name, verdict in verdicts.items():
            if verdict and verdict["failures"]:
                return (
                    f"kv={name!r} failed its gate for this model on {verdict['measured'].get('text', 'a text')}: "
                    f"{'; '.join(verdict['failures'])}; find a scheme that passes: {self.command}"
                )
        never = ",".join(name for name, verdict in verdicts.items() if verdict is None)
        if not never:
            return None
        kv = shlex.quote(never)
        return f"kv={never!r} was never gated for this model; measure it: {self.command} --kv {kv}"

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


@functools.cache
def published_results() -> dict[str, Any]:
    """Read what was measured of the KV schemes for the documents.

    quality_on, speed_on: on what, in words. kl: mean KL divergence from dense by scheme with its knobs, nats.
    attention: how many times as fast as dense's a layer's attention is. recommended: the scheme that the gate
    recommends for the demo model, the smallest that passed.
    """
    content: dict[str, Any] = json.loads(PUBLISHED.read_text())
    return content
