"""`edgekv info`, `edgekv budget`, `edgekv caches`: shapes, exact bytes and schemes, before anything is loaded."""

from __future__ import annotations

import argparse
import json

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
    schemes_text,
    wants_list,
)
from edgekv.kvcache import scheme_facts, schemes
from edgekv.linear.formats import WEIGHTS
from edgekv.machine import available_memory_bytes
from edgekv.session.model import Model
from edgekv.session.plan import Plan


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _info(arguments: argparse.Namespace) -> int:
    model = Model.open(model_path(arguments), config=arguments.config)
    c = model.config
    own = model.weight_format("auto")
    forms = [own] if model.is_store else list(dict.fromkeys([own, *WEIGHTS.values()]))
    facts = {
        "model": str(model.path),
        "model_type": c.model_type,
        "parameters": model.n_parameters,
        "layers": c.n_layers,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "heads": c.n_heads,
        "kv_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "max_positions": c.max_positions,
        "rope": ", ".join(dict.fromkeys(rope.kind for rope in c.ropes)) or None,
        "sliding_window": next((w for w in c.layer_windows if w), None),
        "tied_embeddings": c.tied_embeddings,
        "quantized": ", ".join(model.quantized) or None,
        "tokenizer": str(model.tokenizer_path) if model.tokenizer_path else None,
        "image_token": model.image_token,
        "weights_bytes": {form.name: model.weights_bytes(form) for form in forms},
        "auto_weights": model.weight_format("auto").name,
        "identity": model.identity,
    }
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {bytes_text(v)}" for k, v in value.items())
        print(f"{name:<18}{'none' if value is None else value}")
    return 0


def _budget_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    add_weights_option(parser)
    add_kv_options(parser)
    parser.add_argument(
        "--ctx", type=positive_int, metavar="N", help="context in tokens (default 8192 or the model's)"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _budget(arguments: argparse.Namespace) -> int:
    if wants_list(arguments):
        return 0
    options = load_options(arguments)
    model = Model.open(model_path(arguments), config=arguments.config)
    plan = Plan.make(model, kv=options.kv, ctx=options.ctx, weights=options.weights, kv_budget=options.kv_budget)
    total, free = sum(plan.parts().values()), available_memory_bytes()
    facts = {
        "ctx": plan.ctx,
        "kv": str(plan.kv),
        "weights": plan.weights,
        "weights_bytes": plan.weights_bytes,
        "cache_bytes": plan.cache_bytes,
        "cache_bytes_per_token": plan.cache_bytes / plan.ctx,
        "scratch_bytes": plan.scratch_bytes,
        "total_bytes": total,
        "available_bytes": free,
        "fits": total <= free,
        "notes": plan.notes,
    }
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    print(f"{'kv':<10}{facts['kv']} at --ctx {plan.ctx}, {facts['cache_bytes_per_token']:.1f} bytes per token")
    print(f"{'weights':<10}{bytes_text(plan.weights_bytes)} as {plan.weights}")
    print(f"{'cache':<10}{bytes_text(plan.cache_bytes)}")
    print(f"{'scratch':<10}{bytes_text(plan.scratch_bytes)}, an upper estimate, while a full prompt is read")
    verdict = "fits in" if total <= free else "does not fit in"
    print(f"{'total':<10}{bytes_text(total)}; {verdict} {bytes_text(free)} available")
    for note in plan.notes:
        print(f"{'note':<10}{in_flags(note)}")
    return 0


def _caches_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print as JSON, with knobs and bytes")


def _caches(arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(json.dumps([scheme_facts(name) for name in schemes()], indent=2))
    else:
        print(schemes_text())
    return 0


INFO = Command("print a model's shapes and the bytes of its weights, without reading them", _info_arguments, _info)
BUDGET = Command("print the exact bytes of weights and KV cache for a context", _budget_arguments, _budget)
LIST = Command("list the KV cache schemes", _caches_arguments, _caches)
