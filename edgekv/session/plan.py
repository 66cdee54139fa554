"""What a session will take, known before anything is loaded."""

from __future__ import annotations

import dataclasses

from edgekv.decoder.cpu import scratch_bytes
from edgekv.errors import ContextError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import resolve
from edgekv.kvcache.recurrent import recurrent_states
from edgekv.machine import available_memory_bytes, format_bytes
from edgekv.models.config import ModelConfig
from edgekv.session.model import Model

DEFAULT_CTX = 8192


def default_ctx(config: ModelConfig) -> int:
    """Tokens of the context where nobody says."""
    return min(DEFAULT_CTX, config.max_positions)


@dataclasses.dataclass(frozen=True)
class SessionPlan:
    """What a session will take. Bytes are exact but for ``scratch_bytes``, an upper estimate.

    ctx: tokens that it can hold. kv: its scheme. weights: the format's name. weights_bytes: what decoding maps.
    idle_bytes: of these, experts that a token leaves out, which need no memory. cache_bytes: of all KV caches.
    state_bytes: of layers that do not attend, with their snapshots. scratch_bytes: while a prompt of ``ctx``
    tokens is read. notes: what was chosen for the user, or lost, a line each.
    """

    ctx: int
    kv: CacheSpec
    weights: str
    weights_bytes: int
    idle_bytes: int
    cache_bytes: int
    state_bytes: int
    scratch_bytes: int
    notes: tuple[str, ...]

    @classmethod
    def make(
        cls,
        model: Model,
        *,
        kv: str | CacheSpec | None = None,
        ctx: int | None = None,
        weights: str = "auto",
        kv_budget: int | None = None,
        available: int | None = None,
    ) -> SessionPlan:
        """Of options as `LoadOptions` has them.

        available: bytes of memory that weights, cache and scratch may take, for kv "auto"; None: what this machine
        has. Raises ContextError for a context that the model can't have, CacheError and ConfigError for unknown
        names and for a scheme that does not fit the budget.
        """
        c = model.config
        ctx = default_ctx(c) if ctx is None else ctx
        if not 1 <= ctx <= c.max_positions:
            raise ContextError(
                f"ctx={ctx}: this model has {c.max_positions} positions; accepted: 1 to that",
                field="ctx",
                value=ctx,
                accepted=[f"1 to {c.max_positions}"],
            )
        form = model.weight_format(weights)
        weights_bytes, idle = model.weights_bytes(form), model.idle_bytes(form)
        held = weights_bytes - idle
        state_bytes = sum(state.planned_bytes() for state in recurrent_states(c, ctx))

        def auto_bytes() -> int:
            free = available_memory_bytes() if available is None else available
            taken = held + state_bytes + scratch_bytes(c, ctx, sees_queries=False)
            return max(0, min(free // 4, free - taken))

        spec, notes = resolve(kv, c, ctx, kv_budget, auto_bytes)
        caches = spec.layers(c, ctx)
        if weights_note := model.weights_note(form):
            notes.append(weights_note)
        if idle and c.experts:
            read = idle * c.experts.per_token // (c.experts.count - c.experts.per_token)
            notes.append(
                f"{format_bytes(idle)} of the weights are experts that a token leaves out: they stay in the file, "
                f"and a machine without memory for them reads up to {format_bytes(read)} for each token"
            )
        return cls(
            ctx=ctx,
            kv=spec,
            weights=form.name,
            weights_bytes=weights_bytes,
            idle_bytes=idle,
            cache_bytes=sum(cache.planned_bytes() for cache in caches),
            state_bytes=state_bytes,
            scratch_bytes=scratch_bytes(c, ctx, sees_queries=caches[0].sees_queries),
            notes=tuple(notes),
        )

    def with_kv(self, kv: CacheSpec, model: Model) -> SessionPlan:
        """With what was found for the scheme's knobs on the model."""
        if kv == self.kv:
            return self
        return dataclasses.replace(self, kv=kv, cache_bytes=kv.planned_bytes(model.config, self.ctx))

    def parts(self, slots: int = 1) -> dict[str, int]:
        """Bytes by what they are for, of so many conversations at once."""
        caches = slots * self.cache_bytes
        held = self.weights_bytes - self.idle_bytes
        states = {"state": slots * self.state_bytes} if self.state_bytes else {}
        return {"weights": held, "kv cache": caches, **states, "scratch": self.scratch_bytes}
