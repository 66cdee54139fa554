"""Chooses the KV scheme, for all of edgekv: by its name, a budget of bytes, or what was measured on the model."""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Callable, Collection
from typing import Any

from edgekv.errors import CacheError
from edgekv.kvcache.registry import PRESETS, CacheSpec
from edgekv.machine import format_bytes, size_to_write
from edgekv.models.config import ModelConfig

PUBLISHED = pathlib.Path(__file__).parent / "published.json"  # written by tools/docs/tables.py
EXACT = "dense"  # the reference of measurements
AUTO = "auto"
MAX_LOSS = 0.0015
"""Mean KL divergence in nats that `auto` accepts without a gate, on every model where it was measured."""

MEAN_BITS = [n / 8 for n in range(31, 9, -1)]  # of an element
FINEST_FIRST = (
    "f16",
    "q4",
    *(f"planes:k_bits={mean},v_bits={mean},mixed_bits=true" for mean in MEAN_BITS),
    "planes:k_bits=1,v_bits=1",
)
"""The schemes that a budget chooses from: without q8, which large key biases break."""

MIN_SAVING = 0.1
"""The share of the memory of weights and f16 cache that a preset must save; else `auto` takes f16."""


def default_scheme() -> str:
    """Returns `auto`'s preset for models without a gate: the smallest that lost at most MAX_LOSS anywhere."""
    losses = published_results()["worst_kl"]
    return [name for name in PRESETS if losses[name] <= MAX_LOSS][-1]


def packed_presets() -> list[str]:
    """Returns `default_scheme`, then the presets that take fewer bytes, at which the gate has to look first."""
    return list(PRESETS)[[*PRESETS].index(default_scheme()) :]


@functools.cache
def published_results() -> dict[str, Any]:
    """Reads what was measured of the KV schemes for the documents.

    quality_on, speed_on: model, text and machine, in words. kl: mean KL divergence from dense by scheme with its
    options, nats. worst_kl: the largest on any model, by preset. attention: speed of a layer's attention, as a
    multiple of dense's.
    """
    content: dict[str, Any] = json.loads(PUBLISHED.read_text())
    return content


COMPARED = f"{default_scheme()},q2"
"""What `edgekv demo` and `edgekv bench` set beside f16."""


def resolve(
    kv: str | CacheSpec | None,
    shape: ModelConfig,
    ctx: int,
    budget: int | None,
    model_bytes: int,
    passed: Callable[[], Collection[str]],
    fit: Callable[[CacheSpec], CacheSpec] = lambda spec: spec,
) -> tuple[CacheSpec, list[str]]:
    """Returns the scheme for a context of ``ctx`` tokens, and a line on it where it was chosen for the user.

    kv: a spec, a preset, ``name:option=value,...``, or "auto" or None: with a ``budget`` in bytes `finest_within`
    it, else `choose` with the presets that ``passed`` the gate. fit: gives the heads of a scheme their bits, once
    a model is loaded. Raises CacheError (field kv, or kv_budget) for an unknown name, and for a scheme that takes
    more than the budget.
    """
    if kv in (None, AUTO):
        if budget is not None:
            spec, reason = finest_within(budget, shape, ctx, fit)
        else:
            spec, reason = choose(shape, ctx, model_bytes, passed())
        return fit(spec), [reason]
    spec = fit(CacheSpec.parse(kv) if isinstance(kv, str) else kv)
    if budget is not None and (size := spec.planned_bytes(shape, ctx)) > budget:
        raise CacheError(
            f"{spec.short} takes {format_bytes(size)} for {ctx} tokens, more than {format_bytes(budget)}",
            field="kv_budget",
            value=budget,
            accepted=[f"{size_to_write(size)} or more"],
            advice="or leave {kv} out, or lower {ctx}",
        )
    return spec, []


def finest_within(
    budget: int, shape: ModelConfig, ctx: int, fit: Callable[[CacheSpec], CacheSpec]
) -> tuple[CacheSpec, str]:
    """Returns the first of FINEST_FIRST whose caches for ``ctx`` tokens fit a ``budget`` in bytes, and a line.

    Raises CacheError (field kv_budget) with the least bytes that would do where none fits.
    """
    least = math.inf
    for kv in FINEST_FIRST:
        spec = fit(CacheSpec.parse(kv))
        size = _size(spec, shape, ctx)
        if size is not None and size <= budget:
            return spec, f"kv budget {format_bytes(budget)}: {spec.short}, {format_bytes(size)} for {ctx} tokens"
        least = least if size is None else min(least, size)
    raise CacheError(
        f"{ctx} tokens need at least {format_bytes(int(least))} in this model, more than {format_bytes(budget)}",
        field="kv_budget",
        value=budget,
        accepted=[f"{size_to_write(int(least))} or more"],
        advice="or lower {ctx}",
    )


def choose(shape: ModelConfig, ctx: int, model_bytes: int, passed: Collection[str]) -> tuple[CacheSpec, str]:
    """Returns the smallest preset that ``passed`` the gate on this model, and a line that says why.

    Where none passed, `default_scheme`; f16 where that saves less than MIN_SAVING of the memory, of which the
    model itself takes ``model_bytes``.
    """
    sizes = {name: size for name in PRESETS if (size := _size(CacheSpec.parse(name), shape, ctx)) is not None}
    gated = [name for name in sizes if name in passed]
    name = min(gated, key=sizes.__getitem__, default=default_scheme())
    exact = sizes["f16"]
    if exact - sizes.get(name, exact) < MIN_SAVING * (model_bytes + exact):
        why = f"which is exact; {name} would save less than a tenth of memory"
        return CacheSpec.parse("f16"), f"kv auto took f16, {why}"
    loss = published_results()["worst_kl"][name]
    why = f"nearly exact on every model measured (KL at most {loss:.4f} nats)"
    if gated:
        why = "the smallest that passed your gate on this model at this length (edgekv eval --gate)"
    return CacheSpec.parse(name), f"kv auto took {name}: {why}"


def size_text(kv: str, nbytes: int, f16_bytes: int) -> str:
    """Returns what caches take in a scheme, and what they would take in f16, for people."""
    short = CacheSpec.parse(kv).short
    exact = "" if short == "f16" else f", where f16 would take {format_bytes(f16_bytes)}"
    return f"{format_bytes(nbytes)} as {short}{exact}"


def _size(spec: CacheSpec, shape: ModelConfig, ctx: int) -> int | None:
    """Returns the bytes of a scheme's caches; None where the model can't have the scheme."""
    try:
        return spec.planned_bytes(shape, ctx)
    except CacheError:
        return None
