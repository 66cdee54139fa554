"""`edgekv bench`: time of a token behind a context and of prompts, on a model or random weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from edgekv.cli.eval import is_named, without_left_out
from edgekv.cli.options import add, count, counts, model_path, option
from edgekv.cli.terminal import Bars, table, write_json
from edgekv.engine.loading import find_device
from edgekv.engine.model import Model
from edgekv.errors import ConfigError
from edgekv.eval.bench import Timing, bench, bench_prefill, shape_model
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.registry import suited
from edgekv.machine import available_memory_bytes, format_bytes, machine_info, require_memory

DEFAULT_SCHEMES = "dense,onebit,planes"
COLUMNS: dict[str, Callable[[Timing], str]] = {
    "kv": lambda t: CacheSpec.parse(t.kv).short,
    "depth": lambda t: str(t.depth),
    "ms/tok": lambda t: f"{t.token_ms:.2f}",
    "matmul": lambda t: f"{t.matmul_ms:.2f}",
    "att/layer": lambda t: f"{t.attention_ms_layer:.3f}",
    "GB/s": lambda t: f"{t.gb_per_s:.1f}",
    "cache": lambda t: format_bytes(t.cache_bytes),
}
"""A line per scheme and depth: time per token, a layer's attention and how fast it reads."""


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    shape = "random weights in a shape (see `edgekv budget`)"
    add(parser.add_mutually_exclusive_group(), "model shape", shape=shape)
    add(
        parser,
        "config weights kv threads json",
        layers=count("layers of the shape (default: its own)"),
        kv=option("LIST", f"schemes, comma-separated (default {DEFAULT_SCHEMES})"),
        ctx=option("LIST", "tokens in the cache (default %(default)s)", type=counts(0), default="8192"),
        prefill=option("LIST", "also time prompts of so many tokens", type=counts(1), default=""),
        tokens=count("per scheme (default %(default)s)", default=32),
    )


def bench_command(arguments: argparse.Namespace) -> int:
    asked = CacheSpec.parse_list(arguments.kv or DEFAULT_SCHEMES)
    depths, lengths = arguments.ctx, arguments.prefill
    if arguments.shape is None and arguments.layers:
        message = f"layers={arguments.layers}: only a `shape` can have other layers than its own"
        raise ConfigError(message, field="layers")
    with Bars() as bars:
        room = arguments.tokens + 64
        capacity = max([*depths, *lengths]) + room
        if arguments.shape is None:
            model = Model.open(model_path(arguments), config=arguments.config)
        else:
            model = shape_model(arguments.shape, arguments.layers, capacity, arguments.weights, bars.update)
        form, n_layers = model.weight_format(arguments.weights), model.config.n_layers
        if capacity > model.config.max_positions and not arguments.shape:
            raise ConfigError(f"--ctx {max(depths)}: the model has {model.config.max_positions} positions")
        specs = without_left_out(suited(asked, model.config, capacity, is_named(arguments.kv)))
        needed = {f"{spec.short} cache": spec.planned_bytes(model.config, max(depths) + room) for spec in specs}
        require_memory({"weights": model.weights_bytes(form), **needed}, available_memory_bytes())
        decoder = find_device("cpu").decoder(model, form, capacity, arguments.threads, bars.update)
        timings = bench(decoder, specs, depths, tokens=arguments.tokens, progress=bars.update)
        prefills = bench_prefill(decoder, specs, lengths)
    shape = f"{arguments.shape}, {n_layers} layers" if arguments.shape else model.name
    print(f"{shape}, {form.name} weights, {decoder.threads} threads")
    print(table(COLUMNS, timings))
    for p in prefills:
        print(
            f"prompt of {p.tokens} tokens, {CacheSpec.parse(p.kv).short}: {p.tokens_per_s:.1f} tokens/s, "
            f"{p.matmul_s / p.seconds:.0%} in weight products"
        )
    if arguments.json:
        settings = {
            "model": arguments.shape or model.name,
            "layers": n_layers,
            "weights": form.name,
            "threads": decoder.threads,
            "products": decoder.ops.threads and decoder.ops.threads._asdict(),
        }
        facts = {"timings": timings, "prefill": prefills, "settings": settings, "machine": machine_info()}
        write_json(arguments.json, facts)
    return 0
