"""`edgekv bench`: milliseconds per token at a depth, part by part, for KV schemes on a model or a shape."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from edgekv.checkpoint.shapes import names
from edgekv.cli.bars import Bars
from edgekv.cli.caches import is_named, without_left_out
from edgekv.cli.options import Command, add_source_options, add_weights_option, model_path, positive_int
from edgekv.cli.output import output_file, picture_file, write_json
from edgekv.cli.plots import plot_times, require_matplotlib
from edgekv.cli.tables import fitted
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.kernels.cpu.stream import Bandwidth
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.spec import suited
from edgekv.machine import available_memory_bytes, format_bytes, machine_info, require_memory
from edgekv.quality.bench import Prefill, Timing, bench, bench_prefill
from edgekv.quality.shape_model import shape_model
from edgekv.session.devices import find_device
from edgekv.session.model import Model

SCHEMES = "dense,h1b,onebit,bitplane"


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    parser.add_argument(
        "--shape", metavar="NAME", help=f"random weights in a shape, not --model: {', '.join(names())}"
    )
    parser.add_argument("--layers", type=positive_int, metavar="N", help="layers of the shape (default: its own)")
    add_weights_option(parser)
    parser.add_argument("--kv", metavar="LIST", help=f"schemes, comma-separated (default {SCHEMES})")
    parser.add_argument("--ctx", default="8192", metavar="LIST", help="tokens in the cache (default %(default)s)")
    parser.add_argument("--prefill", metavar="LIST", help="also time prompts of so many tokens")
    parser.add_argument(
        "--tokens", type=positive_int, default=32, metavar="N", help="per scheme (default %(default)s)"
    )
    parser.add_argument("--threads", type=positive_int, metavar="N", help="cores to use (default: all)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the timings as JSON")
    parser.add_argument("--wide", action="store_true", help="every part's column")
    parser.add_argument(
        "--plot", type=picture_file, metavar="FILE", help="milliseconds by part: PNG or SVG (needs edgekv[plot])"
    )


def _execute(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        require_matplotlib()
    asked = CacheSpec.parse_list(arguments.kv or SCHEMES)
    depths, lengths = lengths_of("--ctx", arguments.ctx, 0), lengths_of("--prefill", arguments.prefill, 1)
    with Bars() as bars:
        model = _model(arguments, max([*depths, *lengths]) + 1, bars)
        form = model.weight_format(arguments.weights)
        room = arguments.tokens * 3 + 64
        capacity = max([*depths, *lengths]) + room
        if capacity > model.config.max_positions and not arguments.shape:
            raise ConfigError(f"--ctx {max(depths)}: the model has {model.config.max_positions} positions")
        specs = without_left_out(suited(asked, model.config, capacity, is_named(arguments.kv)))
        needed = {"weights": model.weights_bytes(form)}
        for spec in specs:
            needed[f"{spec.short} cache"] = spec.planned_bytes(model.config, max(depths) + room)
        require_memory(needed, available_memory_bytes())
        decoder = find_device("cpu").decoder(model, form, capacity, arguments.threads, bars.update)
        bandwidth = Bandwidth()
        timings = bench(decoder, specs, depths, tokens=arguments.tokens, bandwidth=bandwidth, progress=bars.update)
        prefills = bench_prefill(decoder, specs, lengths)
    shape = f"{arguments.shape}, {model.config.n_layers} layers" if arguments.shape else model.name
    print(
        f"{shape}, {form.name} weights, {decoder.threads} threads; memory read at {bandwidth.best / 1e9:.1f} GB/s"
    )
    print(table(timings, arguments.wide))
    if prefills:
        print(prefill_table(prefills))
    if arguments.json:
        facts = {
            "timings": [dataclasses.asdict(timing) for timing in timings],
            "prefill": [dataclasses.asdict(prefill) for prefill in prefills],
            "bandwidth": bandwidth.best,
            "settings": {
                "model": arguments.shape or model.name,
                "layers": model.config.n_layers,
                "weights": form.name,
                "threads": decoder.threads,
                "products": decoder.linear.threads and decoder.linear.threads._asdict(),
            },
            "machine": machine_info(),
        }
        write_json(arguments.json, facts)
    if arguments.plot:
        plot_times(timings, arguments.plot)
    return 0


def _model(arguments: argparse.Namespace, positions: int, bars: Bars) -> Model:
    if arguments.shape is None:
        if arguments.layers:
            raise ConfigError(
                f"layers={arguments.layers}: only a `shape` can have other layers than its own", field="layers"
            )
        return Model.open(model_path(arguments), config=arguments.config)
    if arguments.model is not None:
        raise ConfigError(f"shape={arguments.shape} and model={arguments.model}: give one of them", field="shape")
    return shape_model(arguments.shape, arguments.layers, positions, arguments.weights, bars.update)


def lengths_of(option: str, text: str | None, least: int) -> list[int]:
    """Numbers of tokens of a comma-separated list."""
    try:
        lengths = [int(item) for item in (text or "").split(",") if item]
    except ValueError:
        lengths = [-1]
    if any(length < least for length in lengths):
        raise EdgeKVError(f"{option} {text}: accepted are numbers of tokens from {least} on, separated by commas")
    return lengths


def table(timings: list[Timing], wide: bool = False) -> str:
    """A line per scheme and depth: time per token, a layer's attention against memory; ``wide``: every part."""
    columns: dict[str, Callable[[Timing], str]] = {
        "kv": lambda t: CacheSpec.parse(t.kv).short,
        "depth": lambda t: str(t.depth),
        "ms/tok": lambda t: f"{t.token_ms:.2f}",
        "p95": lambda t: f"{t.token_ms_p95:.2f}",
        "att/layer": lambda t: f"{t.attention_ms_layer:.3f}",
        "read/layer": lambda t: format_bytes(t.bytes_read_layer),
        "GB/s": lambda t: f"{t.gb_per_s:.1f}",
        "x floor": lambda t: f"{t.times_floor:.2f}",
    }
    for name in timings[0].parts if wide else ("matmul", "python"):
        columns[name] = _part(name)
    return "\n".join(
        fitted([list(columns), *([show(t) for show in columns.values()] for t in timings)], wide=wide)
    )


def _part(name: str) -> Callable[[Timing], str]:
    return lambda t: f"{t.parts[name]:.3f}"


def prefill_table(prefills: list[Prefill]) -> str:
    """A line per scheme and length: tokens per second, and the time against the least that it could be."""
    rows = [
        f"{CacheSpec.parse(p.kv).short:<26}{p.tokens:>7} tokens {p.tokens_per_s:>9.1f} tokens/s, "
        f"matmuls {p.matmul_s / p.seconds:.0%}, x {p.times_floor:.2f} of matmuls + attention at half of BLAS"
        for p in prefills
    ]
    return "\n".join(["prefill", *rows])


BENCH = Command("time decoding at a depth, part by part, on a model or a shape", _arguments, _execute)
