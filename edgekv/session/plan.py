"""What a session will take, known before anything is loaded."""

from __future__ import annotations

import dataclasses

from edgekv.errors import CacheError, ContextError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.auto import check_budget, choose
from edgekv.kvcache.steps import Steps, StepsKnobs
from edgekv.machine import available_memory_bytes
from edgekv.models.attention import BLOCK_ROWS
from edgekv.models.config import ModelConfig
from edgekv.models.decoder import CHUNK
from edgekv.session.model import Model

DEFAULT_CTX = 8192


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a session will take, known before anything is loaded. Bytes are exact but for ``scratch_bytes``."""

    ctx: int
    kv: CacheSpec
    weights: str
    weights_bytes: int
    cache_bytes: int
    scratch_bytes: int
    notes: tuple[str, ...]

    @classmethod
    def make(
        cls,
        model: Model,
        *,
        kv: str | CacheSpec | None,
        ctx: int | None,
        weights: str,
        kv_budget: int | None = None,
    ) -> Plan:
        """Raises ContextError for a context that the model can't have, CacheError and ConfigError for names.

        kv "auto" is the best scheme within ``kv_budget`` bytes (default: a quarter of the free memory). None is
        dense, or with a ``kv_budget`` what fits it for as long as it does: `Steps`.
        """
        c = model.config
        if ctx is None:
            ctx = min(DEFAULT_CTX, c.max_positions)
        if not 1 <= ctx <= c.max_positions:
            raise ContextError(f"--ctx {ctx}: this model has {c.max_positions} positions; accepted: 1 to that")
        spec, notes = choose_scheme(kv, c, ctx, kv_budget)
        form = model.weight_format(weights)
        caches = spec.layers(c, ctx)
        if weights_note := model.weights_note(form):
            notes.append(weights_note)
        held = ctx if caches[0].sees_queries else min(ctx, CHUNK)
        prompt = ctx * (c.hidden_size + 2 * c.kv_size) + held * c.q_size + BLOCK_ROWS * ctx
        chunk = CHUNK * (3 * c.intermediate_size + 4 * c.hidden_size) + c.vocab_size
        return cls(
            ctx=ctx,
            kv=spec,
            weights=form.name,
            weights_bytes=model.weights_bytes(form),
            cache_bytes=sum(cache.planned_bytes for cache in caches),
            scratch_bytes=4 * (prompt + chunk),
            notes=tuple(notes),
        )

    def parts(self) -> dict[str, int]:
        return {"weights": self.weights_bytes, "kv cache": self.cache_bytes, "scratch": self.scratch_bytes}


def choose_scheme(
    kv: str | CacheSpec | None, config: ModelConfig, ctx: int, budget: int | None
) -> tuple[CacheSpec, list[str]]:
    """The scheme that is meant (see `Plan.make`), and what is to say about it."""
    if kv == "auto":
        spec, reason = choose(config, ctx, budget or available_memory_bytes() // 4)
        return spec, [reason]
    if kv is None:
        kv = "dense" if budget is None else Steps.name
    if kv == Steps.name:
        if budget is None:
            raise CacheError("--kv steps needs a --kv-budget: give the bytes that the cache may take")
        return CacheSpec(Steps, StepsKnobs(budget)), []
    spec = CacheSpec.parse(kv) if isinstance(kv, str) else kv
    if budget is not None:
        check_budget(spec, config, ctx, budget)
    return spec, []
