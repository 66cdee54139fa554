"""`edgekv eval`: perplexity, KL and top-1 agreement of KV schemes against the dense cache, on your own text."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from edgekv.cli.bars import Bars
from edgekv.cli.caches import is_named, without_left_out
from edgekv.cli.eval_input import add_input_options, open_input
from edgekv.cli.gate import add_gate_options, run_gate
from edgekv.cli.options import Command
from edgekv.cli.output import output_file, picture_file, write_json
from edgekv.cli.plots import plot_quality, require_matplotlib
from edgekv.cli.tables import fitted
from edgekv.kvcache import CacheSpec
from edgekv.machine import format_bytes
from edgekv.quality.evaluate import Quality, evaluate


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_input_options(parser)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--wide", action="store_true", help="every column")
    parser.add_argument(
        "--plot",
        type=picture_file,
        metavar="FILE",
        help="KL against bytes per token: PNG or SVG (needs edgekv[plot])",
    )
    add_gate_options(parser)


def _execute(arguments: argparse.Namespace) -> int:
    return run_gate(arguments) if arguments.gate else _evaluate(arguments)


def _evaluate(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        require_matplotlib()
    measured = open_input(arguments)
    asked = CacheSpec.parse_list(arguments.kv or "all")
    specs = without_left_out(measured.schemes(asked, is_named(arguments.kv)))
    with Bars() as bars:
        decoder, ctx = measured.load(arguments.ctx, bars.update)
        specs = measured.fitted(specs, decoder, bars.update)
        results = evaluate(
            decoder,
            measured.tokens[: ctx * arguments.windows],
            ctx,
            specs,
            fit_tokens=arguments.fit,
            adapter=measured.model.adapter,
            progress=bars.update,
        )
    print(table(results, ctx, arguments.wide))
    if arguments.json:
        settings = measured.facts(ctx, arguments.windows, arguments.fit)
        facts = {"results": [dataclasses.asdict(result) for result in results], **settings}
        write_json(arguments.json, facts)
    if arguments.plot:
        plot_quality(results, ctx, arguments.plot)
    return 0


def table(results: list[Quality], ctx: int, wide: bool = False) -> str:
    """A line per scheme; ``wide``: with every column."""
    columns: dict[str, Callable[[Quality], str]] = {
        "kv": lambda r: CacheSpec.parse(r.kv).short,
        "KL": lambda r: f"{r.kl:.4f}",
        "KL late": lambda r: f"{r.kl_second_half:.4f}",
        "top1": lambda r: f"{r.top1:.3f}",
        "x dense": lambda r: f"{r.perplexity_ratio:.4f}",
        "ppl": lambda r: f"{r.perplexity:.3f}",
        "cache": lambda r: format_bytes(r.cache_bytes),
        "B/token": lambda r: f"{r.cache_bytes / ctx:.0f}",
    }
    if wide:
        columns |= {
            "top1 late": lambda r: f"{r.top1_second_half:.3f}",
            "read/token": lambda r: format_bytes(r.bytes_read_per_token),
            "seconds": lambda r: f"{r.seconds:.1f}",
        }
    return "\n".join(
        fitted([list(columns), *([show(r) for show in columns.values()] for r in results)], wide=wide)
    )


EVAL = Command("measure the quality of KV schemes on a text against the dense cache", _arguments, _execute)
