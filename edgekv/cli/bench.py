"""`edgekv bench`: milliseconds per token at a depth, part by part, for KV schemes on a model or a shape."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from edgekv.checkpoint.shapes import names
from edgekv.checkpoint.writer import atomic_write
from edgekv.cli.bars import Bars
from edgekv.cli.evaluate import require_matplotlib
from edgekv.cli.options import Command, add_source_options, add_weights_option, model_path, positive_int
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.kernels.cpu.stream import Bandwidth
from edgekv.kvcache import CacheSpec
from edgekv.machine import available_memory_bytes, format_bytes, machine_info, require_memory
from edgekv.quality.bench import Prefill, Timing, bench, bench_prefill
from edgekv.quality.shape_model import shape_model
from edgekv.session.devices import find_device
from edgekv.session.model import Model
from edgekv.session.opening import all_cores

SCHEMES = "dense,h1b,onebit,bitplane"


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    parser.add_argument(
        "--shape", metavar="NAME", help=f"random weights in a shape, not --model: {', '.join(names())}"
    )
    parser.add_argument("--layers", type=positive_int, metavar="N", help="layers of the shape (default: its own)")
    add_weights_option(parser)
    parser.add_argument(
        "--kv", default=SCHEMES, metavar="LIST", help="schemes, comma-separated (default %(default)s)"
    )
    parser.add_argument("--ctx", default="8192", metavar="LIST", help="tokens in the cache (default %(default)s)")
    parser.add_argument("--prefill", metavar="LIST", help="also time prompts of so many tokens")
    parser.add_argument(
        "--tokens", type=positive_int, default=32, metavar="N", help="per scheme (default %(default)s)"
    )
    parser.add_argument("--threads", type=positive_int, metavar="N", help="cores to use (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write the timings as JSON")
    parser.add_argument("--plot", metavar="FILE", help="milliseconds by part: PNG or SVG (needs matplotlib)")


def _execute(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        require_matplotlib()
    specs = CacheSpec.parse_list(arguments.kv)
    depths, lengths = lengths_of("--ctx", arguments.ctx, 0), lengths_of("--prefill", arguments.prefill, 1)
    threads = all_cores(arguments.threads)
    with Bars() as bars:
        model = _model(arguments, max([*depths, *lengths]) + 1, bars)
        form = model.weight_format(arguments.weights)
        room = arguments.tokens * 3 + 64
        capacity = max([*depths, *lengths]) + room
        if capacity > model.config.max_positions and not arguments.shape:
            raise ConfigError(f"--ctx {max(depths)}: the model has {model.config.max_positions} positions")
        needed = {"weights": model.weights_bytes(form)}
        for spec in specs:
            needed[f"{spec.scheme.name} cache"] = spec.planned_bytes(model.config, max(depths) + room)
        require_memory(needed, available_memory_bytes())
        decoder = find_device("cpu").decoder(model, form, capacity, threads, bars.update)
        bandwidth = Bandwidth()
        timings = bench(decoder, specs, depths, tokens=arguments.tokens, bandwidth=bandwidth, progress=bars.update)
        prefills = bench_prefill(decoder, specs, lengths)
    shape = f"{arguments.shape}, {model.config.n_layers} layers" if arguments.shape else model.name
    print(f"{shape}, {form.name} weights, {threads} threads; memory read at {bandwidth.best / 1e9:.1f} GB/s")
    print(table(timings, model.config.n_layers))
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
                "threads": threads,
            },
            "machine": machine_info(),
        }
        atomic_write(arguments.json, (json.dumps(facts, indent=1) + "\n").encode())
    if arguments.plot:
        plot(timings, arguments.plot)
    return 0


def _model(arguments: argparse.Namespace, positions: int, bars: Bars) -> Model:
    if not arguments.shape:
        if arguments.layers:
            raise ConfigError(
                f"layers={arguments.layers}: only a `shape` can have other layers than its own", field="layers"
            )
        return Model.open(model_path(arguments), config=arguments.config)
    if arguments.model:
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


def table(timings: list[Timing], n_layers: int) -> str:
    """A line per scheme and depth: milliseconds per token by part, and one layer's attention against memory."""
    columns = ("matmul", "append", "choose", "attend", "rope", "sampling", "python")
    head = f"{'kv':<26}{'depth':>7}{'ms/tok':>8}{'p95':>8}" + "".join(f"{name:>9}" for name in columns)
    head += f"{'att/layer':>11}{'read/layer':>12}{'GB/s':>7}{'x floor':>9}"
    rows = [
        f"{t.kv[:25]:<26}{t.depth:>7}{t.token_ms:>8.2f}{t.token_ms_p95:>8.2f}"
        + "".join(f"{t.parts[name]:>9.3f}" for name in columns)
        + f"{t.attention_ms_layer:>11.3f}{format_bytes(t.bytes_read_layer):>12}"
        + f"{t.gb_per_s:>7.1f}{t.times_floor:>9.2f}"
        for t in timings
    ]
    return "\n".join([head, *rows])


def prefill_table(prefills: list[Prefill]) -> str:
    """A line per scheme and length: tokens per second, and the time against the least that it could be."""
    rows = [
        f"{p.kv[:25]:<26}{p.tokens:>7} tokens {p.tokens_per_s:>9.1f} tokens/s, "
        f"matmuls {p.matmul_s / p.seconds:.0%}, x {p.times_floor:.2f} of matmuls + attention at half of BLAS"
        for p in prefills
    ]
    return "\n".join(["prefill", *rows])


def plot(timings: list[Timing], path: str) -> None:
    """Stacked bars: milliseconds per token by part, a bar per scheme and depth."""
    require_matplotlib()
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    labels = [f"{t.kv.partition(':')[0]}\n{t.depth}" for t in timings]
    bottom: Any = [0.0] * len(timings)
    for part in timings[0].parts:
        heights = [max(t.parts[part], 0.0) for t in timings]
        axes.bar(labels, heights, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set(ylabel="ms per token")
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise EdgeKVError(f"--plot {path}: {error}; give a writable .png or .svg") from error
    pyplot.close(figure)


BENCH = Command("time decoding at a depth, part by part, on a model or a shape", _arguments, _execute)
