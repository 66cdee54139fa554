"""The gate: whether a lossy KV scheme may be used with a model, measured on a user's text, and remembered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from edgekv.checkpoint.adapter import Adapter
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import DEFAULT_CTX
from edgekv.engine.model import needs_gate
from edgekv.errors import ContextError
from edgekv.eval.evaluate import Quality, evaluate
from edgekv.eval.needles import NEEDLES, NeedleTest, Prose, Reader
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.registry import PRESETS
from edgekv.text import Tokenizer
from edgekv.types import TaskProgress

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
        """The scheme with its options."""
        return self.quality.kv


DEFAULT_SCHEMES = tuple(name for name in PRESETS if needs_gate(CacheSpec.parse(name)))


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
    adapter: Adapter | None = None,
    progress: TaskProgress | None = None,
) -> tuple[list[Verdict], NeedleTest]:
    """A verdict per scheme over the first ``windows`` of a tokenised text, and the needles hidden anywhere in it.

    Raises ContextError when the text does not fill a window.
    """
    read = tokens[: ctx * windows]
    qualities = evaluate(decoder, read, ctx, specs, adapter=adapter, progress=progress)
    text = np.asarray(tokens[len(tokenizer.encode("")) :])
    reader = Reader(decoder, tokenizer, ctx, adapter)
    needle_test = NeedleTest(reader, Prose(text, tokenizer), n_needles, progress)
    verdicts = []
    for spec, quality in zip(specs, qualities, strict=True):
        needles = None
        if needle_test.applies:
            needles = needle_test.score(spec, progress), needle_test.n_known
        verdicts.append(judge(quality, needles, limits or GateLimits()))
    return verdicts, needle_test
