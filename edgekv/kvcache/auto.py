"""`--kv auto`: the scheme with the best measured quality that fits a number of bytes."""

from __future__ import annotations

from edgekv.errors import CacheError
from edgekv.kvcache import CacheSpec
from edgekv.machine import format_bytes
from edgekv.models.config import ModelConfig

# Least measured loss first (docs/quality.md); all keep every token, none needs training.
AUTO = ("dense", "dense:dtype=q8", "kivi2:bits=4", "bitplane", "kivi2", "onebit", "onebit:v=1")


def choose(config: ModelConfig, ctx: int, budget: int) -> tuple[CacheSpec, str]:
    """The first of AUTO whose cache for ``ctx`` tokens takes at most ``budget`` bytes, and one line that says why.

    Raises CacheError naming the least bytes possible when none fits.
    """
    sizes = {text: planned_bytes(CacheSpec.parse(text), config, ctx) for text in AUTO}
    fitting = [text for text, size in sizes.items() if size <= budget]
    if not fitting:
        least = min(sizes, key=sizes.__getitem__)
        raise CacheError(
            f"--kv-budget {format_bytes(budget)}: no scheme fits {ctx} tokens of this model; the least is "
            f"{format_bytes(sizes[least])} ({sizes[least]} bytes) with --kv {least}; raise it or lower --ctx"
        )
    chosen = fitting[0]
    better = AUTO[: AUTO.index(chosen)]
    reason = f"kv auto: {chosen} takes {format_bytes(sizes[chosen])} of the budget of {format_bytes(budget)}"
    if better:
        reason += f"; {better[-1]}, the next better, would take {format_bytes(sizes[better[-1]])}"
    return CacheSpec.parse(chosen), reason


def planned_bytes(spec: CacheSpec, config: ModelConfig, ctx: int) -> int:
    """Bytes of all layers' arrays."""
    return sum(cache.planned_bytes for cache in spec.layers(config, ctx))


def check_budget(spec: CacheSpec, config: ModelConfig, ctx: int, budget: int) -> None:
    """CacheError when a scheme that was asked for by name does not fit the budget."""
    size = planned_bytes(spec, config, ctx)
    if size > budget:
        raise CacheError(
            f"--kv {spec.scheme.name} takes {format_bytes(size)} for {ctx} tokens, more than --kv-budget "
            f"{format_bytes(budget)}; use --kv auto, lower --ctx or raise the budget"
        )
