"""`edgekv eval`: perplexity, KL and top-1 agreement of KV schemes against the dense cache, on your own text."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib

from edgekv.checkpoint.writer import atomic_write
from edgekv.cli.options import (
    Bars,
    Command,
    add_adapter_option,
    add_source_options,
    add_weights_option,
    model_path,
    positive_int,
)
from edgekv.cli.prompt import read_text
from edgekv.errors import EdgeKVError
from edgekv.evaluate import FIT_TOKENS, Quality, evaluate
from edgekv.kvcache import CACHES, CacheSpec
from edgekv.machine import format_bytes, machine_info
from edgekv.model import Model, find_device
from edgekv.plan import Plan
from edgekv.tokenizer import load_tokenizer


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    add_adapter_option(parser)
    add_weights_option(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text to predict; - is standard input")
    parser.add_argument("--kv", default="all", metavar="LIST", help="schemes, comma-separated (default all)")
    parser.add_argument("--ctx", type=positive_int, metavar="N", help="window (default 8192 or the model's)")
    parser.add_argument("--windows", type=positive_int, default=1, metavar="N", help="windows of text (default 1)")
    parser.add_argument(
        "--fit", type=int, default=FIT_TOKENS, metavar="N", help="tokens that schemes fit on (default %(default)s)"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="a tokenizer file or folder, if not beside the model")
    parser.add_argument("--threads", type=positive_int, metavar="N", help="cores to use (default: all)")
    parser.add_argument("--device", default="cpu", help="cpu or numpy")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON")
    parser.add_argument("--plot", metavar="FILE", help="perplexity against bytes: PNG or SVG (needs matplotlib)")


def _execute(arguments: argparse.Namespace) -> int:
    specs = split_specs(arguments.kv)
    if arguments.plot:
        require_matplotlib()
    text = read_text(arguments.text, "--text")
    model = Model.open(
        model_path(arguments),
        config=arguments.config,
        tokenizer=arguments.tokenizer,
        adapter=arguments.adapter,
    )
    plan = Plan.make(model, kv="dense", ctx=arguments.ctx, weights=arguments.weights)
    if model.tokenizer_path is None:
        raise EdgeKVError(f"{model.path} has no tokenizer: copy one beside the weights, or pass --tokenizer PATH")
    tokens = load_tokenizer(model.tokenizer_path, config=model.raw_config).encode(text)
    threads = arguments.threads or len(os.sched_getaffinity(0))
    with Bars() as bars:
        form = model.weight_format(arguments.weights)
        decoder = find_device(arguments.device).decoder(model, form, plan.ctx, threads, bars.update)
        used = tokens[: plan.ctx * arguments.windows]
        results = evaluate(
            decoder,
            used,
            plan.ctx,
            specs,
            fit_tokens=arguments.fit,
            adapter=model.adapter,
            progress=bars.update,
        )
    print(table(results))
    if arguments.json:
        facts = {
            "results": [dataclasses.asdict(result) for result in results],
            "settings": {
                "model": model.path.name,
                "identity": model.identity,
                "adapter": model.adapter and model.adapter.path.name,
                "text": pathlib.Path(arguments.text).name,
                "ctx": plan.ctx,
                "windows": len(used) // plan.ctx,
                "weights": plan.weights,
                "fit_tokens": arguments.fit,
                "threads": threads,
            },
            "machine": machine_info(),
        }
        atomic_write(arguments.json, (json.dumps(facts, indent=1) + "\n").encode())
    if arguments.plot:
        plot(results, arguments.plot)
    return 0


def split_specs(text: str) -> list[CacheSpec]:
    """Schemes of a comma-separated list in which the knobs are separated by commas too."""
    if text == "all":
        return [CacheSpec.parse(name) for name in CACHES]
    items: list[str] = []
    for item in text.split(","):
        if items and "=" in item and ":" not in item:
            items[-1] += f",{item}"
        else:
            items.append(item)
    return [CacheSpec.parse(item) for item in items]


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
