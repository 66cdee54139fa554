"""`edgekv budget`: the exact bytes of weights and cache, and whether they fit, before anything is downloaded."""

from __future__ import annotations

import argparse
import json
from typing import Any

from edgekv.checkpoint.hub import cached, config
from edgekv.checkpoint.hub_name import hub_name
from edgekv.checkpoint.shapes import names, read_shape
from edgekv.cli.caches import wants_list
from edgekv.cli.flags import in_flags
from edgekv.cli.options import (
    Command,
    add_kv_options,
    add_source_options,
    add_weights_option,
    bytes_text,
    load_options,
    model_path,
    positive_int,
)
from edgekv.errors import CacheError, ConfigError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import AUTO
from edgekv.machine import available_memory_bytes, format_bytes, parse_bytes
from edgekv.quality.shape_model import unread_model
from edgekv.session.model import Model
from edgekv.session.options import LoadOptions
from edgekv.session.plan import SessionPlan

GIB = 1 << 30
MACHINES = tuple(n * GIB for n in (1, 2, 4, 8, 16, 32, 64, 128, 256))
SYSTEM_SHARE = 8  # of a machine's memory an eighth is left to the system: an estimate


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    parser.add_argument(
        "--shape",
        metavar="NAME",
        help=f"a known shape, which is not downloaded, in place of --model: {', '.join(names())}",
    )
    add_weights_option(parser)
    add_kv_options(parser)
    parser.add_argument(
        "--ctx", type=positive_int, metavar="N", help="context in tokens (default 8192 or the model's)"
    )
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        help="memory of the machine that it is for, such as 8G, of which an eighth is left to the system "
        "(default: what is free here)",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _execute(arguments: argparse.Namespace) -> int:
    if wants_list(arguments):
        return 0
    options = load_options(arguments)
    if arguments.memory is None:
        free, where = available_memory_bytes(), "available here"
    else:
        memory = parse_bytes(arguments.memory, "memory")
        free, where = _ours(memory), f"of {format_bytes(memory)}, an eighth left to the system"
    model = _model(arguments)
    plan = _plan(model, options, free)
    least = _least_machine(model, options)
    facts = _facts(plan, free, least)
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    print(f"{'model':<10}{model.name}, {model.n_parameters / 1e6:,.0f} M parameters")
    print(f"{'kv':<10}{plan.kv.short} at --ctx {plan.ctx}, {facts['cache_bytes_per_token']:.1f} bytes per token")
    idle = f", {bytes_text(plan.idle_bytes)} of them experts that a token leaves out" if plan.idle_bytes else ""
    print(f"{'weights':<10}{bytes_text(plan.weights_bytes)} as {plan.weights}{idle}")
    print(f"{'cache':<10}{bytes_text(plan.cache_bytes)}")
    if plan.state_bytes:
        print(f"{'state':<10}{bytes_text(plan.state_bytes)}, of layers that do not attend, with snapshots")
    print(f"{'scratch':<10}{bytes_text(plan.scratch_bytes)}, an upper estimate, while a full prompt is read")
    verdict = "fits in" if facts["fits"] else "does not fit in"
    print(f"{'total':<10}{bytes_text(facts['total_bytes'])}; {verdict} {format_bytes(free)} {where}")
    if least is not None:
        size, kv = least
        print(f"{'machine':<10}the least of the usual ones is one with {format_bytes(size)}, there --kv {kv}")
    for note in plan.notes:
        print(f"{'note':<10}{in_flags(note)}")
    return 0


def _model(arguments: argparse.Namespace) -> Model:
    """The model; of one on the Hub that is not here its config alone, of a shape nothing."""
    if arguments.shape is not None and arguments.model is not None:
        raise ConfigError(f"shape={arguments.shape} and model={arguments.model}: give one of them", field="shape")
    if arguments.shape is not None:
        return unread_model(arguments.shape, read_shape(arguments.shape))
    name = hub_name("demo" if arguments.model is None else arguments.model)
    if name and not name.file and cached(name) is None:
        return unread_model(str(name), config(name))
    return Model.open(model_path(arguments), config=arguments.config)


def _plan(model: Model, options: LoadOptions, available: int) -> SessionPlan:
    """As asked; where kv auto finds nothing that fits, with the smallest of its schemes, which does not."""

    def plan(kv: str | CacheSpec | None) -> SessionPlan:
        return SessionPlan.make(
            model,
            kv=kv,
            ctx=options.ctx,
            weights=options.weights,
            kv_budget=options.kv_budget,
            available=available,
        )

    try:
        return plan(options.kv)
    except CacheError as error:
        if options.kv != "auto" or options.kv_budget is not None or error.field != "kv_budget":
            raise
        return plan(AUTO[-1])


def _least_machine(model: Model, options: LoadOptions) -> tuple[int, str] | None:
    """The least of MACHINES that all of it fits in, and the scheme that it would have there."""
    for size in MACHINES:
        plan = _plan(model, options, _ours(size))
        if _total(plan) <= _ours(size):
            return size, plan.kv.short
    return None


def _ours(memory: int) -> int:
    return memory - memory // SYSTEM_SHARE


def _total(plan: SessionPlan) -> int:
    return sum(plan.parts().values())


def _facts(plan: SessionPlan, free: int, least: tuple[int, str] | None) -> dict[str, Any]:
    return {
        "ctx": plan.ctx,
        "kv": str(plan.kv),
        "weights": plan.weights,
        "weights_bytes": plan.weights_bytes,
        "active_weights_bytes": plan.weights_bytes - plan.idle_bytes,
        "cache_bytes": plan.cache_bytes,
        "state_bytes": plan.state_bytes,
        "cache_bytes_per_token": plan.cache_bytes / plan.ctx,
        "scratch_bytes": plan.scratch_bytes,
        "total_bytes": _total(plan),
        "available_bytes": free,
        "fits": _total(plan) <= free,
        "least_machine_bytes": least and least[0],
        "notes": plan.notes,
    }


BUDGET = Command(
    "say whether weights and KV cache fit: exact bytes, before anything is downloaded", _arguments, _execute
)
