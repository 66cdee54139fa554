"""Which scheme is meant: by name, by a number of bytes, or none at all."""

from __future__ import annotations

from collections.abc import Callable

from edgekv.errors import CacheError
from edgekv.kvcache.spec import AttentionShape, CacheSpec
from edgekv.machine import format_bytes

# Least measured loss first (docs/lab/quality.md); all keep every token, none needs training.
AUTO = (
    "dense",
    "dense:dtype=q8",
    "planes:k_bits=4,v_bits=4",
    "planes:k_bits=3,v_bits=3,by_need=true",
    "planes:by_need=true",
    "planes:k_bits=1.5,v_bits=1.5",
    "planes:k_bits=1,v_bits=1",
)
DEFAULT, WITHIN_BUDGET = "dense", "steps"  # where no scheme is named: without a budget, and with one


def resolve(
    kv: str | CacheSpec | None,
    shape: AttentionShape,
    ctx: int,
    budget: int | None,
    auto_bytes: Callable[[], int],
) -> tuple[CacheSpec, list[str]]:
    """The scheme for ``ctx`` tokens that is meant, and a line on it where it was chosen for the user.

    kv: a spec, ``name:knob=value,...``, None (DEFAULT, or with a ``budget`` in bytes WITHIN_BUDGET), or "auto":
    the best of AUTO within ``budget``, by default auto_bytes(). Raises CacheError (field kv, or
    kv_budget) for an unknown name, and for a scheme that takes more than the budget.
    """
    if kv == "auto":
        spec, reason = choose(shape, ctx, auto_bytes() if budget is None else budget)
        return spec, [reason]
    if kv is None:
        kv = DEFAULT if budget is None else WITHIN_BUDGET
    spec = CacheSpec.asked(kv, budget) if isinstance(kv, str) else kv
    if budget is not None:
        check_budget(spec, shape, ctx, budget)
    return spec, []


def choose(shape: AttentionShape, ctx: int, budget: int) -> tuple[CacheSpec, str]:
    """The first of AUTO whose cache for ``ctx`` tokens takes at most ``budget`` bytes, and one line that says why.

    Raises CacheError (field kv_budget) naming the least bytes possible when none fits.
    """
    sizes = {text: CacheSpec.parse(text).planned_bytes(shape, ctx) for text in AUTO}
    fitting = [text for text, size in sizes.items() if size <= budget]
    if not fitting:
        least = min(sizes, key=sizes.__getitem__)
        raise CacheError(
            f"kv_budget={budget} ({format_bytes(budget)}): no scheme fits {ctx} tokens of this model; the least "
            f"is {format_bytes(sizes[least])} ({sizes[least]} bytes) with kv={least!r}; raise it or lower `ctx`",
            field="kv_budget",
            value=budget,
            accepted=[f"{sizes[least]} or more"],
        )
    chosen = fitting[0]
    better = AUTO[: AUTO.index(chosen)]
    reason = f"kv auto: {chosen} takes {format_bytes(sizes[chosen])} of the budget of {format_bytes(budget)}"
    if better:
        reason += f"; {better[-1]}, the next better, would take {format_bytes(sizes[better[-1]])}"
    return CacheSpec.parse(chosen), reason


def check_budget(spec: CacheSpec, shape: AttentionShape, ctx: int, budget: int) -> None:
    """Raises CacheError (field kv_budget) when a scheme that was asked for by name does not fit the budget."""
    size = spec.planned_bytes(shape, ctx)
    if size > budget:
        raise CacheError(
            f"kv={spec.scheme.name!r} takes {format_bytes(size)} for {ctx} tokens, more than kv_budget={budget} "
            f"({format_bytes(budget)}); use kv='auto', lower `ctx` or raise the budget",
            field="kv_budget",
            value=budget,
            accepted=[f"{size} or more"],
        )
