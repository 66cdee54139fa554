"""`edgekv eval`: perplexity, KL and top-1 agreement of KV schemes against the dense cache, on your own text."""

from __future__ import annotations

import argparse
import dataclasses
import json

from edgekv.checkpoint.writer import atomic_write
from edgekv.cli.eval_input import add_input_options, open_input
from edgekv.cli.gate import add_gate_options, run_gate
from edgekv.cli.options import Bars, Command
from edgekv.errors import EdgeKVError
from edgekv.machine import format_bytes
from edgekv.quality.evaluate import Quality, evaluate


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_input_options(parser)
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON")
    parser.add_argument("--plot", metavar="FILE", help="perplexity against bytes: PNG or SVG (needs matplotlib)")
    add_gate_options(parser)


def _execute(arguments: argparse.Namespace) -> int:
    return run_gate(arguments) if arguments.gate else _evaluate(arguments)


def _evaluate(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        require_matplotlib()
    measured = open_input(arguments)
    specs = measured.schemes(arguments.kv)
    with Bars() as bars:
        decoder, ctx = measured.load(arguments.ctx, bars.update)
        results = evaluate(
            decoder,
            measured.tokens[: ctx * arguments.windows],
            ctx,
            specs,
            fit_tokens=arguments.fit,
            adapter=measured.model.adapter,
            progress=bars.update,
        )
    print(table(results))
    if arguments.json:
        settings = measured.facts(ctx, arguments.windows, arguments.fit)
        facts = {"results": [dataclasses.asdict(result) for result in results], **settings}
        atomic_write(arguments.json, (json.dumps(facts, indent=1) + "\n").encode())
    if arguments.plot:
        plot(results, arguments.plot)
    return 0


def table(results: list[Quality]) -> str:
    """A line per scheme."""
    head = f"{'kv':<34}{'ppl':>9}{'x dense':>9}{'KL':>9}{'KL late':>9}{'top1':>7}{'cache':>11}{'read/token':>12}"
    rows = [
        f"{r.kv[:33]:<34}{r.perplexity:>9.3f}{r.perplexity_ratio:>9.4f}{r.kl:>9.4f}{r.kl_second_half:>9.4f}"
        f"{r.top1:>7.3f}{format_bytes(r.cache_bytes):>11}{format_bytes(r.bytes_read_per_token):>12}"
        for r in results
    ]
    return "\n".join([head, *rows])


def require_matplotlib() -> None:
    """EdgeKVError where it is missing: to be called before the work."""
    try:
        import matplotlib
    except ImportError:
        raise EdgeKVError("--plot needs matplotlib: pip install 'edgekv[plot]'") from None
    matplotlib.use("Agg")


def plot(results: list[Quality], path: str) -> None:
    """Perplexity against the cache's bytes, both logarithmic."""
    require_matplotlib()
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    for result in results:
        axes.plot(result.cache_bytes, result.perplexity, "o")
        axes.annotate(result.kv.partition(":")[0], (result.cache_bytes, result.perplexity), fontsize=8)
    axes.set(xlabel="cache bytes", ylabel="perplexity", xscale="log", yscale="log")
    axes.grid(visible=True, which="both", alpha=0.3)
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise EdgeKVError(f"--plot {path}: can't be written ({error}); give a .png or .svg file") from None
    finally:
        pyplot.close(figure)


EVAL = Command("measure the quality of KV schemes on a text against the dense cache", _arguments, _execute)
