"""Models before and beside a run: `edgekv pull`, `info`, `budget`, `quantize`, `warm`.

What one command alone needs is imported there, so that the others begin sooner.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
from bisect import bisect_right
from functools import partial
from typing import Any

from edgekv.checkpoint.hub import (
    SHIPPED_NOTES,
    CachedEntry,
    cached_models,
    fetch_config,
    find_cached,
    hub_suggestion,
    parse_hub_name,
    parse_model_name,
    published_shape,
    pull,
    read_shape,
    shipped_file,
    shipped_model,
)
from edgekv.cli.options import (
    OPTIONS,
    SOURCE,
    add_options,
    bytes_text,
    load_options,
    model_path,
    option,
    read_text_option,
    size,
    switch,
)
from edgekv.cli.terminal import Bars, align_columns, print_rows, say
from edgekv.engine.loading import Options, SessionPlan, default_ctx, open_model
from edgekv.engine.model import Model
from edgekv.engine.verdicts import Verdicts
from edgekv.errors import CheckpointError
from edgekv.files import cache_root, read_object, require_writable, user_path
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import AUTO, default_scheme, packed_presets, size_text
from edgekv.kvcache.registry import select_specs
from edgekv.machine import available_memory_bytes, format_bytes
from edgekv.weights.checkpoint_weights import CheckpointWeights
from edgekv.weights.formats import OFFERED, ModelFormat, mean_bits
from edgekv.weights.store import WeightStore

MACHINES = tuple(n << 30 for n in (1, 2, 4, 8, 16, 32, 64, 128, 256))
HUB_NAMES = "org/name, org/name@revision, or a GGUF file of it, org/name:Q4_K_M or org/name:file.gguf"
SHIPPED_TEXT = "demo/prose.txt"
SYSTEM_SHARE = 8  # of a machine's memory an eighth is left to the system: an estimate


# edgekv pull


def pull_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME", help=f"{HUB_NAMES}; private ones need HF_TOKEN")


def pull_command(arguments: argparse.Namespace) -> int:
    """Prints where the model lies to standard output."""
    name = parse_hub_name(arguments.model) or parse_model_name(arguments.model)
    if name is None:
        if shipped_model(arguments.model) is not None:
            raise CheckpointError(f"{arguments.model!r} ships with edgekv: there is nothing to download")
        advice = hub_suggestion(arguments.model) or f"give {HUB_NAMES}"
        raise CheckpointError(f"{arguments.model!r} is no name on the Hub", advice=advice)
    print(pull(name, say))
    print(f"next: edgekv chat {name}   or: edgekv budget {name} --ctx 8192", file=sys.stderr)
    return 0


# edgekv list and rm

CACHE_FOLDERS = {
    "kernels": "compiled kernels",
    "prefixes": "caches of prompts that were read",
    "gguf": "tokenizers of GGUF files",
    "gates": "verdicts of the gate",
    "bits": "measured bits of heads",
}
"""The folders of the cache folder beside the stores."""


def list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", **switch("print as JSON"))


def list_command(arguments: argparse.Namespace) -> int:
    found = cached_entries()
    if arguments.json:
        print(json.dumps([dataclasses.asdict(entry) for entry in found], indent=2, default=str))
        return 0
    if found:
        rows = [
            (k.name, k.what, format_bytes(k.bytes), f"{k.last_used:%Y-%m-%d}" if k.bytes else "-") for k in found
        ]
        print(align_columns([("name", "what", "size", "last used"), *rows], left=(0, 1)), end="\n\n")
    total = bytes_text(sum(entry.bytes for entry in found))
    print(f"{total} in all, which `edgekv rm NAME` frees; {' and '.join(SHIPPED_NOTES)} ship with edgekv")
    return 0


def cached_entries() -> list[CachedEntry]:
    """Returns what is on the disk: models of the Hub and stores by their model's name, then CACHE_FOLDERS."""
    found, root = cached_models(), cache_root()
    for folder in root.glob("stores/*-v*"):
        with contextlib.suppress(OSError, ValueError):
            file = read_object(folder / "store.json")
            name, what = str(file.get("name") or folder.name), f"weights as {file.get('weights')}"
            if name.startswith("random-") and isinstance(config := file.get("config"), dict):
                what = f"random {what}, shape {config.get('_name_or_path') or config.get('model_type')}"
            found.append(CachedEntry.of(name, what, folder))
    caches = [
        CachedEntry.of(name, what, root / name)
        for name, what in CACHE_FOLDERS.items()
        if any(root.glob(f"{name}/*"))
    ]
    return sorted(found, key=lambda entry: (entry.name.lower(), entry.what)) + caches


def rm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="+", help="a model, with its stores, or a cache")


def rm_command(arguments: argparse.Namespace) -> int:
    found, chosen = cached_entries(), dict[str, list[CachedEntry]]()
    for name in arguments.names:
        on_hub = parse_hub_name(name)
        place = on_hub and find_cached(on_hub)
        chosen[name] = [k for k in found if name in (k.name, k.name.partition(":")[0]) or k.path == place]
        if not chosen[name]:
            names = dict.fromkeys(entry.name for entry in found)
            raise CheckpointError(f"{name!r}: there is nothing to remove", value=name, accepted=names)
    for name, entries in chosen.items():
        try:
            for entry in entries:
                entry.remove()
        except OSError as error:
            raise CheckpointError(f"{error.filename or name}: can't be removed ({error})") from None
        print(f"{name}: freed {bytes_text(sum(entry.bytes for entry in entries))}")
    return 0


# edgekv info


def info_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, SOURCE)
    parser.add_argument("--json", **switch("print as JSON"))


def info_command(arguments: argparse.Namespace) -> int:
    model = Model.open(model_path(arguments), config=arguments.config)
    c = model.config
    stored_format = model.weight_format("auto")
    forms = [stored_format] if model.is_store else list(dict.fromkeys([stored_format, *map(ModelFormat, OFFERED)]))
    kernels = [layer.kernel for layer in c.recurrences if layer is not None]
    recurrent = [f"{kernels.count(kernel)} {kernel}" for kernel in dict.fromkeys(kernels)]
    facts = {
        "model": str(model.path),
        "model_type": c.model_type,
        "parameters": model.n_parameters,
        "layers": c.n_layers,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "experts": c.experts
        and f"{c.experts.count} of {c.experts.size} channels in {sum(c.experts.layers)} of {c.n_layers} layers, "
        f"{c.experts.per_token} for each token",
        "heads": c.n_heads,
        "kv_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "max_positions": c.max_positions,
        "rope": ", ".join(dict.fromkeys(rope.kind for rope in c.ropes)) or None,
        "recurrent_layers": ", ".join(recurrent) or None,
        "sliding_window": next((w for w in c.layer_windows if w), None),
        "tied_embeddings": c.tied_embeddings,
        "quantized": ", ".join(model.quantized) or None,
        "calibrated": model.calibration,
        "tokenizer": str(model.tokenizer_path) if model.tokenizer_path else None,
        "image_token": model.image_token,
        "weights_bytes": {form.name: model.weights_bytes(form) for form in forms},
        "auto_weights": stored_format.name,
    }
    if arguments.json:
        if isinstance(model.weights, CheckpointWeights):
            with Bars() as bars:
                model.weights.source.identify(bars.update)  # reads all of it, once
        print(json.dumps({**facts, "identity": model.identity}, indent=2))
        return 0
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {bytes_text(v)}" for k, v in value.items())
        print(f"{name:<18}{'none' if value is None else value}")
    return 0


# edgekv budget


def budget_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser.add_mutually_exclusive_group(), "model shape")
    add_options(parser, "config weights kv kv_budget ctx")
    text = "of the machine that it is for, such as 8G, an eighth left to the system (default: what is free here)"
    parser.add_argument("--memory", **size("memory", f"{text}; exit status 1 if it does not fit"))
    parser.add_argument("--json", **switch("print as JSON"))


def budget_command(arguments: argparse.Namespace) -> int:
    options = load_options(arguments)
    free, where = available_memory_bytes(), "available here"
    if arguments.memory is not None:
        free = _usable_memory(arguments.memory)
        where = f"of {format_bytes(arguments.memory)}, an eighth left to the system"
    model = _budget_model(arguments)
    plan = _plan(model, options, options.kv)
    total, per_token = sum(plan.parts().values()), plan.cache_bytes / plan.ctx
    fitting = ((size, _scheme_that_fits(model, options, _usable_memory(size))) for size in MACHINES)
    smallest = next(((size, kv) for size, kv in fitting if kv), None)
    most, least = ("at most ", "at least ") if mean_bits(plan.weights) and not model.is_store else ("", "")
    idle = f", {least}{bytes_text(n)} of them experts that a token leaves out" if (n := plan.idle_bytes) else ""
    state = f"{bytes_text(plan.state_bytes)}, of layers that do not attend, with snapshots"
    verdict = f"{'fits' if total <= free else 'does not fit'} in {format_bytes(free)} {where}"
    longest = _contexts_that_fit(model, options, plan, free) if total > free else {}
    way = ", or ".join(f"--ctx {n} with --kv {kv}" for kv, n in longest.items()) or "no context"
    rows: list[tuple[str, Any, str | None]] = [
        ("model", model.name, f"{model.name}, {model.n_parameters / 1e6:,.0f} M parameters"),
        ("ctx", plan.ctx, None),
        ("kv", str(plan.kv), f"{plan.kv.short} at --ctx {plan.ctx}, {per_token:.1f} bytes per token"),
        ("weights", plan.weights, None),
        ("weights_bytes", plan.weights_bytes, f"{most}{bytes_text(plan.weights_bytes)} as {plan.weights}{idle}"),
        ("active_weights_bytes", plan.weights_bytes - plan.idle_bytes, None),
        ("cache_bytes", plan.cache_bytes, size_text(str(plan.kv), plan.cache_bytes, plan.f16_bytes)),
        ("f16_cache_bytes", plan.f16_bytes, None),
        ("cache_bytes_per_token", per_token, None),
        ("state_bytes", plan.state_bytes, state if plan.state_bytes else None),
        (
            "scratch_bytes",
            plan.scratch_bytes,
            f"{bytes_text(plan.scratch_bytes)}, an upper estimate, while a full prompt is read",
        ),
        ("total_bytes", total, f"{bytes_text(total)}; {verdict}"),
        ("available_bytes", free, None),
        ("fits", total <= free, None),
        ("longest_ctx", longest, way if total > free else None),
        (
            "least_machine_bytes",
            smallest and smallest[0],
            smallest and f"smallest usual machine: {format_bytes(smallest[0])}, with --kv {smallest[1]}",
        ),
        ("notes", plan.notes, "; ".join(plan.notes) or None),
    ]
    if arguments.json:
        print(json.dumps({name: value for name, value, _ in rows}, indent=2))
    else:
        print_rows([(name.partition("_")[0], text) for name, _, text in rows if text])
    return 0 if total <= free else 1


def _contexts_that_fit(model: Model, options: Options, plan: SessionPlan, available: int) -> dict[str, int]:
    """Returns the longest contexts up to the plan's that fit the memory, by scheme, but those of no token.

    With the plan's scheme, and with the most exact preset that fits the whole context, else the smallest.
    """

    def total(kv: str, ctx: int) -> int:
        return sum(_plan(model, dataclasses.replace(options, ctx=ctx, kv_budget=None), kv).parts().values())

    whole = dataclasses.replace(options, kv=AUTO, kv_budget=None, ctx=plan.ctx)
    other = _scheme_that_fits(model, whole, available) or packed_presets()[-1]
    contexts = range(1, plan.ctx + 1)
    longest = {kv: bisect_right(contexts, available, key=partial(total, kv)) for kv in (plan.kv.short, other)}
    return {kv: n for kv, n in longest.items() if n}


def _budget_model(arguments: argparse.Namespace) -> Model:
    """Opens the model; of one on the Hub that is not here read its config alone, of a known shape nothing."""
    from edgekv.eval.bench import unread_model

    if arguments.shape is not None:
        return unread_model(arguments.shape, read_shape(arguments.shape))
    name = parse_model_name("demo" if arguments.model is None else arguments.model)
    if name and not name.file and find_cached(name) is None:
        shape = published_shape(str(name))
        return unread_model(str(name), read_shape(shape) if shape else fetch_config(name))
    return Model.open(model_path(arguments), config=arguments.config)


def _plan(model: Model, options: Options, kv: str | CacheSpec | None) -> SessionPlan:
    """Plans a session; of weights of 3.6 bits in the mean it takes most bytes, and least of idle experts."""
    plan = partial(SessionPlan.make, model, kv=kv, ctx=options.ctx, kv_budget=options.kv_budget)
    if (mean := mean_bits(options.weights)) is None or model.is_store:
        return plan(weights=options.weights)
    low, high, q5 = (ModelFormat(f"q{bits}") for bits in (math.floor(mean), math.ceil(mean), 5))
    whole = round(model.weights_bytes(low) * (1 - mean % 1) + model.weights_bytes(high) * (mean % 1))
    share = 1 - experts.per_token / experts.count if (experts := model.config.experts) else 0
    idle = max(0, model.idle_bytes(q5) - math.ceil((model.weights_bytes(q5) - whole) * share))  # all else as q5
    return dataclasses.replace(plan(weights=high.name, sizes=(whole, idle)), weights=options.weights)


def _scheme_that_fits(model: Model, options: Options, available: int) -> str | None:
    """Returns the requested scheme, or for auto its choice or a smaller preset, that fits; None if none does."""
    is_auto = options.kv in (None, AUTO) and options.kv_budget is None
    for kv in (options.kv, *packed_presets() * is_auto):
        plan = _plan(model, options, kv)
        if sum(plan.parts().values()) <= available:
            return plan.kv.short
    return None


def _usable_memory(memory: int) -> int:
    return memory - memory // SYSTEM_SHARE


# edgekv quantize


def quantize_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a UTF-8 text like those the model is for, best 200 kB or more: q2 to q5 are rounded so that the model "
    text += "predicts this text as before; with --weights q3.6 it also decides each matrix's bits (without FILE: "
    calibrate = option("FILE", text + "a short text that ships with edgekv)", nargs="?", const=SHIPPED_TEXT)
    output = option("FOLDER", "a new folder; --calibrate needs one (default: the cache folder that run looks in)")
    weights = f"{OPTIONS['weights']['help']}; with --calibrate also q2.1 to q4.9, the mean of all matrices' bits"
    add_options(parser, f"{SOURCE} lora adapter", weights=weights, output=output, calibrate=calibrate)


def quantize_command(arguments: argparse.Namespace) -> int:
    from edgekv.engine.calibration import Calibration
    from edgekv.vision.model import copy_vision
    from edgekv.weights.store import build

    folder = user_path(arguments.output or "")
    if arguments.output is not None and os.path.lexists(folder):
        raise CheckpointError(f"--output {arguments.output!r} exists; give a new folder or remove it")
    model = Model.open(
        model_path(arguments), config=arguments.config, adapter=arguments.adapter, lora=arguments.lora
    )
    source = arguments.calibrate
    if source is not None and arguments.output is None:
        raise CheckpointError("weights that are rounded with a text need a folder; give --output FOLDER")
    with Bars() as bars:
        if source is SHIPPED_TEXT and (source := shipped_file(SHIPPED_TEXT)) is None:
            raise CheckpointError(f"{SHIPPED_TEXT} does not lie with edgekv; give --calibrate a text")
        text = source and read_text_option(str(source), "--calibrate", "; MODEL stands before --calibrate")
        if text is not None and (mean := mean_bits(arguments.weights)):  # before minutes of work
            there = next(parent for parent in folder.parents if parent.is_dir())
            require_writable(there / folder.name, model.weights_bytes(ModelFormat(f"q{int(mean)}")))
        rounding = None if text is None else Calibration.choose(model, arguments.weights, text, bars.update)
        form = rounding.form if rounding else model.weight_format(arguments.weights)
        if arguments.output is None:
            store = model.store(form, bars.update)
        elif isinstance(model.weights, WeightStore):
            raise CheckpointError(f"{model.path} is a store already; copy it, or give the original checkpoint")
        else:
            weights = rounding.weights if rounding else model.weights
            build(weights, form, folder, bars.update, lambda store: copy_vision(model, store), rounding)
            store = WeightStore(folder)
    print(f"{store.folder}: {store.form.name}, {bytes_text(store.nbytes)}")
    if note := model.weights_note(form):
        say(note)
    return 0


# edgekv warm


def warm_arguments(parser: argparse.ArgumentParser) -> None:
    kv = {"metavar": "LIST", "help": "schemes, comma-separated, all, or auto (default): those that auto may take"}
    add_options(parser, f"{SOURCE} lora weights kv threads", kv=kv)


def warm_command(arguments: argparse.Namespace) -> int:
    from edgekv.cli.eval import is_list_of_names, report_left_out
    from edgekv.engine.session import Session

    kv, arguments.kv = None if arguments.kv == AUTO else arguments.kv, None
    requested = CacheSpec.parse_list(kv) if kv else []
    options = load_options(arguments)
    model = open_model(model_path(arguments), options)
    config, autos = model.config, dict.fromkeys(["f16", default_scheme(), *Verdicts(model).passed()])
    requested = requested or [CacheSpec.parse(name) for name in autos]
    specs = report_left_out(select_specs(requested, config, default_ctx(config), is_list_of_names(kv)))
    with Bars() as bars:
        for spec in specs:
            settings = vars(options) | {"kv": spec}
            with Session.load(model_path(arguments), progress=bars.update, **settings) as session:
                seconds = session.report().compile_s
            print(f"{spec.short}: " + (f"compiled in {seconds:.1f} s" if seconds else "was compiled already"))
    return 0
