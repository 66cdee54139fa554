"""`edgekv bench`: time of a token behind a context and of prompts, on a model or random weights."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from edgekv.checkpoint.shipped import shape_names
from edgekv.cli.eval import is_named, without_left_out
from edgekv.cli.options import Command, add_source_options, add_weights_option, model_path, positive_int
from edgekv.cli.plots import plot_times, require_matplotlib
from edgekv.cli.terminal import Bars, fitted, output_file, picture_file, write_json
from edgekv.engine.loading import find_device
from edgekv.engine.model import Model
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.eval.bench import Timing, bench, bench_prefill, shape_model
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.spec import suited
from edgekv.machine import available_memory_bytes, format_bytes, machine_info, require_memory

DEFAULT_SCHEMES = "dense,h1b,onebit,planes"


def add_shape_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --shape and --layers: a shape instead of a model."""
    parser.add_argument("--shape", metavar="NAME", help=f"{what}, not --model: {', '.join(shape_names())}")
    parser.add_argument("--layers", type=positive_int, metavar="N", help="layers of the shape (default: its own)")


def require_shape_or_model(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for both of them, and for layers without a shape."""
    if arguments.shape is None and arguments.layers:
        raise ConfigError(
            f"layers={arguments.layers}: only a `shape` can have other layers than its own", field="layers"
        )
    if arguments.shape is not None and arguments.model is not None:
        raise ConfigError(f"shape={arguments.shape} and model={arguments.model}: give one of them", field="shape")


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    add_shape_options(parser, "random weights in a shape")
    add_weights_option(parser)
    parser.add_argument("--kv", metavar="LIST", help=f"schemes, comma-separated (default {DEFAULT_SCHEMES})")
    parser.add_argument("--ctx", default="8192", metavar="LIST", help="tokens in the cache (default %(default)s)")
    parser.add_argument("--prefill", metavar="LIST", help="also time prompts of so many tokens")
    parser.add_argument(
        "--tokens", type=positive_int, default=32, metavar="N", help="per scheme (default %(default)s)"
    )
    parser.add_argument("--threads", type=positive_int, metavar="N", help="cores to use (default: all)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the timings as JSON")
    parser.add_argument("--wide", action="store_true", help="every column")
    parser.add_argument(
        "--plot", type=picture_file, metavar="FILE", help="milliseconds by part: PNG or SVG (needs edgekv[plot])"
    )


def _execute(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        require_matplotlib()
    asked = CacheSpec.parse_list(arguments.kv or DEFAULT_SCHEMES)
    depths, lengths = lengths_of("--ctx", arguments.ctx, 0), lengths_of("--prefill", arguments.prefill, 1)
    require_shape_or_model(arguments)
    with Bars() as bars:
        room = arguments.tokens + 64
        capacity = max([*depths, *lengths]) + room
        if arguments.shape is None:
            model = Model.open(model_path(arguments), config=arguments.config)
        else:
            model = shape_model(arguments.shape, arguments.layers, capacity, arguments.weights, bars.update)
        form = model.weight_format(arguments.weights)
        if capacity > model.config.max_positions and not arguments.shape:
            raise ConfigError(f"--ctx {max(depths)}: the model has {model.config.max_positions} positions")
        specs = without_left_out(suited(asked, model.config, capacity, is_named(arguments.kv)))
        needed = {"weights": model.weights_bytes(form)}
        for spec in specs:
            needed[f"{spec.short} cache"] = spec.planned_bytes(model.config, max(depths) + room)
        require_memory(needed, available_memory_bytes())
        decoder = find_device("cpu").decoder(model, form, capacity, arguments.threads, bars.update)
        timings = bench(decoder, specs, depths, tokens=arguments.tokens, progress=bars.update)
        prefills = bench_prefill(decoder, specs, lengths)
    shape = f"{arguments.shape}, {model.config.n_layers} layers" if arguments.shape else model.name
    print(f"{shape}, {form.name} weights, {decoder.threads} threads")
    print(timing_table(timings, arguments.wide))
    for p in prefills:
        print(
            f"prompt of {p.tokens} tokens, {CacheSpec.parse(p.kv).short}: {p.tokens_per_s:.1f} tokens/s, "
            f"{p.matmul_s / p.seconds:.0%} in weight products"
        )
    if arguments.json:
        facts = {
            "timings": [dataclasses.asdict(timing) for timing in timings],
            "prefill": [dataclasses.asdict(prefill) for prefill in prefills],
            "settings": {
                "model": arguments.shape or model.name,
                "layers": model.config.n_layers,
                "weights": form.name,
                "threads": decoder.threads,
                "products": decoder.ops.threads and decoder.ops.threads._asdict(),
            },
            "machine": machine_info(),
        }
        write_json(arguments.json, facts)
    if arguments.plot:
        plot_times(timings, model.config.n_layers, arguments.plot)
    return 0


def lengths_of(option: str, text: str | None, least: int) -> list[int]:
    """Read a comma-separated list of numbers of tokens."""
    try:
        lengths = [int(item) for item in (text or "").split(",") if item]
    except ValueError:
        lengths = [-1]
    if any(length < least for length in lengths):
        raise EdgeKVError(f"{option} {text}: accepted are numbers of tokens from {least} on, separated by commas")
    return lengths


def timing_table(timings: list[Timing], wide: bool = False) -> str:
    """Write a line per scheme and depth: time per token, a layer's attention and how fast it reads."""
    columns: dict[str, Callable[[Timing], str]] = {
        "kv": lambda t: CacheSpec.parse(t.kv).short,
        "depth": lambda t: str(t.depth),
        "ms/tok": lambda t: f"{t.token_ms:.2f}",
        "matmul": lambda t: f"{t.matmul_ms:.2f}",
        "att/layer": lambda t: f"{t.attention_ms_layer:.3f}",
        "GB/s": lambda t: f"{t.gb_per_s:.1f}",
        "cache": lambda t: format_bytes(t.cache_bytes),
    }
    if wide:
        columns["p95"] = lambda t: f"{t.token_ms_p95:.2f}"
        columns["read/layer"] = lambda t: format_bytes(t.bytes_read_layer)
    return "\n".join(
        fitted([list(columns), *([show(t) for show in columns.values()] for t in timings)], wide=wide)
    )


BENCH = Command("time decoding at a depth, part by part, on a model or a shape", _arguments, _execute)
