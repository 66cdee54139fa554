"""The quality and speed of KV schemes: `edgekv schemes`, `edgekv eval` with the gate, and `edgekv bench`."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import textwrap
from collections.abc import Callable
from typing import Any

from edgekv.cli.options import (
    SOURCE,
    add_options,
    count,
    load_options,
    model_path,
    natural_int,
    number,
    option,
    read_text_option,
    switch,
    token_counts,
)
from edgekv.cli.terminal import Bars, align_columns, plot, require_matplotlib, say, table, write_json
from edgekv.engine.loading import find_device
from edgekv.engine.model import Model
from edgekv.engine.verdicts import Verdicts, needs_gate
from edgekv.errors import ConfigError
from edgekv.eval.bench import Timing, bench, bench_prefill, shape_model
from edgekv.eval.evaluate import EvalInput, Quality, evaluate
from edgekv.eval.gate import (
    DEFAULT_SCHEMES,
    NEEDLES,
    GateLimits,
    Verdict,
    gate,
    gate_ctx,
    recommended,
)
from edgekv.kvcache import CacheSpec, scheme_facts, schemes
from edgekv.kvcache.choice import COMPARED, default_scheme, published_results
from edgekv.kvcache.registry import PRESETS, broken_schemes, select_specs
from edgekv.machine import available_memory_bytes, format_bytes, machine_info, require_memory

KEPT_WIDTH = 58  # of the column that says what a scheme keeps, in characters
MIN_KL = 1e-7  # smaller ones, and 0, are drawn here: the axis is logarithmic

# edgekv schemes


def schemes_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", **switch("print as JSON, with options"))


def schemes_command(arguments: argparse.Namespace) -> int:
    report_left_out(([], broken_schemes()))
    if arguments.json:
        print(json.dumps([{**scheme_facts(name), **_published(name)} for name in schemes()], indent=2))
    else:
        print(schemes_text())
    return 0


def is_list_of_names(kv: str | None) -> bool:
    """Returns whether --kv lists schemes by name."""
    return kv not in (None, "all")


def report_left_out(suited_and_reasons: tuple[list[CacheSpec], list[str]]) -> list[CacheSpec]:
    """Returns the schemes that `select_specs` found, and prints why others were left out."""
    for reason in suited_and_reasons[1]:
        say(f"left out: {reason}")
    return suited_and_reasons[0]


def _published(name: str) -> dict[str, float | None]:
    results, short = published_results(), CacheSpec.parse(name).short
    return {"kl": results["kl"].get(short), "attention": results["attention"].get(short)}


def schemes_text() -> str:
    """Returns a line per scheme: name, bytes, KL, speed and what it keeps; then what to take."""

    def show(value: Any, style: str, unit: str = "") -> str:
        return "-" if value is None else f"{value:{style}}{unit}"

    rows = [["kv", "bytes", "KL", "speed", "what is kept"]]
    for name in (*PRESETS, *schemes()):
        spec = CacheSpec.parse(name)
        published = _published(name)
        row = [
            name,
            f"{spec.bytes_per_token():.1f}",
            show(published["kl"], ".5f"),
            show(published["attention"], ".1f", "x"),
        ]
        mixed = " on average, by each head's need" * getattr(spec.config, "needs_fit", False)
        preset = f"{name[1:]} bits per number{mixed} ({spec.scheme.name})"
        first, *others = textwrap.wrap(spec.scheme.summary if name in schemes() else preset, KEPT_WIDTH)
        rows += [[*row, first], *([""] * 4 + [other] for other in others)]
    results = published_results()
    notes = [
        "bytes: per token and KV head of 128 channels, at 8,192 tokens",
        "KL: how far the next token's probabilities are from those with dense, in nats; measured on",
        f"    {results['quality_on']}",
        f"speed: of attention, dense is 1; {results['speed_on']}; -: not measured",
        f"recommended: to name none. --kv auto takes {default_scheme()} for long contexts; once you ran the gate,",
        "the smallest that passed on your model: edgekv eval --gate --model PATH --text YOUR-TEXT",
    ]
    return "\n".join([align_columns(rows, left=(0, 4)), "", *notes])


# edgekv eval


def eval_arguments(parser: argparse.ArgumentParser) -> None:
    kv = f"schemes, comma-separated, or all (default: all; with --gate {', '.join(DEFAULT_SCHEMES)})"
    add_options(
        parser,
        f"{SOURCE} lora adapter weights kv ctx tokenizer threads device json plot",
        text=option("FILE", "UTF-8 text to predict; - is standard input", required=True),
        windows=count("windows of text (default 1)", default=1),
        kv=option("LIST", kv),
        ctx="window (default 8192 or the model's; with --gate no more than the text)",
        device={"default": "cpu"},
        plot="KL against bytes per token: PNG or SVG (needs edgekv[plot])",
    )
    positive_number = number("a number above 0", lambda value: value > 0)
    share = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
    limits = {
        "max_kl": ("NATS", positive_number, "mean KL divergence from dense, of all positions and of the later"),
        "min_top1": ("SHARE", share, "positions whose likeliest token is dense's, likewise"),
        "min_needles": ("SHARE", share, "of the needles that dense finds"),
    }
    add_options(
        parser.add_argument_group(
            "gate", "with --gate; exit status 0 when a scheme passed, 1 when none did (docs/gate.md)"
        ),
        "",
        gate=switch("a verdict per lossy scheme, remembered, and the --kv to use"),
        needles=option(
            "N", f"pass keys and codes to hide (default {NEEDLES}; 0: none)", type=natural_int, default=NEEDLES
        ),
        **{
            name: option(metavar, f"{text} (default %(default)s)", type=kind, default=getattr(GateLimits, name))
            for name, (metavar, kind, text) in limits.items()
        },
    )


def eval_command(arguments: argparse.Namespace) -> int:
    if arguments.plot and arguments.gate:
        raise ConfigError("--plot does not go with --gate; leave one of them out")
    if arguments.plot:
        require_matplotlib()
    requested = _lossy_schemes(arguments.kv) if arguments.gate else CacheSpec.parse_list(arguments.kv or "all")
    options, text = load_options(arguments), read_text_option(arguments.text, "--text")
    measured = EvalInput(model_path(arguments), options, text, pathlib.Path(arguments.text).name)
    specs = report_left_out(measured.schemes(requested, is_list_of_names(arguments.kv)))
    return (_gate if arguments.gate else _evaluate)(arguments, measured, specs)


def quality_columns(ctx: int) -> dict[str, Callable[[Quality], str]]:
    """Returns the columns of the table of results at ``ctx`` tokens."""
    return {
        "kv": lambda r: CacheSpec.parse(r.kv).short,
        "KL": lambda r: f"{r.kl:.4f}",
        "KL late": lambda r: f"{r.kl_second_half:.4f}",
        "top1": lambda r: f"{r.top1:.3f}",
        "x dense": lambda r: f"{r.perplexity_ratio:.4f}",
        "ppl": lambda r: f"{r.perplexity:.3f}",
        "cache": lambda r: format_bytes(r.cache_bytes),
        "B/token": lambda r: f"{r.cache_bytes / ctx:.0f}",
    }


def _evaluate(arguments: argparse.Namespace, measured: EvalInput, specs: list[CacheSpec]) -> int:
    with Bars() as bars:
        decoder, ctx = measured.load(arguments.ctx, bars.update)
        results = evaluate(
            decoder,
            measured.tokens[: ctx * arguments.windows],
            ctx,
            measured.with_head_bits(specs, decoder, bars.update),
            adapter=measured.model.adapter,
            progress=bars.update,
        )
    print(table(quality_columns(ctx), results))
    if arguments.json:
        facts = measured.facts(ctx, arguments.windows)
        write_json(arguments.json, {"results": results, **facts})
    if arguments.plot:
        lines = [(CacheSpec.parse(r.kv).short, [r.cache_bytes / ctx], [max(r.kl, MIN_KL)]) for r in results]
        names = {"xlabel": "bytes of cache per token", "ylabel": "KL from dense, nats"}
        plot(arguments.plot, lines, xscale="log", yscale="log", **names)
    return 0


# edgekv eval --gate

GATE_COLUMNS: dict[str, Callable[[Verdict], str]] = {
    "kv": lambda v: CacheSpec.parse(v.kv).short,
    "KL": lambda v: f"{v.quality.kl:.4f}",
    "KL late": lambda v: f"{v.quality.kl_second_half:.4f}",
    "top1": lambda v: f"{v.quality.top1:.3f}",
    "late": lambda v: f"{v.quality.top1_second_half:.3f}",
    "needles": lambda v: "n/a" if v.needles is None else "{}/{}".format(*v.needles),
    "cache": lambda v: format_bytes(v.quality.cache_bytes),
    "verdict": lambda v: "passed" if v.passed else "failed",
}


def _lossy_schemes(kv: str | None) -> list[CacheSpec]:
    requested = [CacheSpec.parse(text) for text in DEFAULT_SCHEMES] if kv is None else CacheSpec.parse_list(kv)
    specs = [spec for spec in requested if needs_gate(spec)]
    if not specs:
        raise ConfigError(
            f"--kv {kv} loses nothing on a text and needs no gate; name a lossy scheme (edgekv schemes)"
        )
    return specs


def _gate(arguments: argparse.Namespace, measured: EvalInput, specs: list[CacheSpec]) -> int:
    """Prints and remembers the verdicts; returns 1 if no scheme passed."""
    limits = GateLimits(arguments.max_kl, arguments.min_top1, arguments.min_needles)
    ctx = arguments.ctx or gate_ctx(len(measured.tokens), measured.model.config.max_positions)
    with Bars() as bars:
        decoder, ctx = measured.load(ctx, bars.update)
        specs = measured.with_head_bits(specs, decoder, bars.update)
        verdicts, needles = gate(
            decoder,
            measured.tokenizer,
            measured.tokens,
            specs,
            ctx,
            windows=arguments.windows,
            limits=limits,
            n_needles=arguments.needles,
            adapter=measured.model.adapter,
            progress=bars.update,
        )
    facts, best = measured.facts(ctx, arguments.windows), recommended(verdicts)
    settings, windows, kv, why = facts["settings"], facts["settings"]["windows"], "f16", "no scheme passed"
    if best is not None:
        kv, size = CacheSpec.parse(best.kv).short, format_bytes(best.quality.cache_bytes)
        why = f"the smallest cache that passed, {size}" + f"; auto takes it up to {ctx} tokens" * (kv in PRESETS)
    print(table(GATE_COLUMNS, verdicts))
    for verdict in verdicts:
        if not verdict.passed:
            print(f"{CacheSpec.parse(verdict.kv).short} failed: {'; '.join(verdict.failures)}")
    print(
        f"needles: {needles.note}\n"
        f"measured on {windows} window{'s' * (windows > 1)} of {ctx} tokens ({settings['text']} has "
        f"{len(measured.tokens)}), weights {settings['weights']}; longer contexts were not measured\n"
        f"recommended: --kv {kv} ({why})"
    )
    if arguments.json:
        results = {
            "verdicts": [{"passed": verdict.passed, **dataclasses.asdict(verdict)} for verdict in verdicts],
            "recommended": kv,
            "needles": {"hidden": needles.n_hidden, "dense": needles.n_known, "applicable": needles.applies},
            "limits": limits,
        }
        write_json(arguments.json, results | facts)
    measured_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    machine = {name: facts["machine"][name] for name in ("cpu", "versions")}
    record = {**settings, "limits": dataclasses.asdict(limits), "machine": machine, "time": measured_at}
    memory = Verdicts(measured.model)
    for spec, verdict in zip(specs, verdicts, strict=True):
        memory.remember(spec, verdict, record)
    return 1 if best is None else 0


# edgekv bench

TIME_COLUMNS: dict[str, Callable[[Timing], str]] = {
    "kv": lambda t: CacheSpec.parse(t.kv).short,
    "depth": lambda t: str(t.depth),
    "ms/tok": lambda t: f"{t.token_ms:.2f}",
    "matmul": lambda t: f"{t.matmul_ms:.2f}",
    "att/layer": lambda t: f"{t.attention_ms_layer:.3f}",
    "GB/s": lambda t: f"{t.gb_per_s:.1f}",
    "cache": lambda t: format_bytes(t.cache_bytes),
}
"""The columns of the table of times, which has a line per scheme and depth."""


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    shape = "random weights in a shape (see `edgekv budget`)"
    depths = {"type": token_counts(0), "default": "8192"}
    add_options(parser.add_mutually_exclusive_group(), "model shape", shape=shape)
    add_options(
        parser,
        "config weights kv threads json",
        layers=count("layers of the shape (default: its own)"),
        kv=option("LIST", f"schemes, comma-separated (default f16,{COMPARED})"),
        depth=option("LIST", "tokens in the cache when decoding is timed (default %(default)s)", **depths),
        prefill=option("LIST", "also time prompts of so many tokens", type=token_counts(1), default=""),
        tokens=count("per scheme (default %(default)s)", default=32),
    )


def bench_command(arguments: argparse.Namespace) -> int:
    requested = CacheSpec.parse_list(arguments.kv or f"f16,{COMPARED}")
    depths, lengths = arguments.depth, arguments.prefill
    if arguments.shape is None and arguments.layers:
        raise ConfigError(
            "only a --shape can have other layers than its own", field="layers", value=arguments.layers
        )
    with Bars() as bars:
        spare = arguments.tokens + 64
        capacity = max([*depths, *lengths]) + spare
        if arguments.shape is None:
            model = Model.open(model_path(arguments), config=arguments.config)
        else:
            model = shape_model(arguments.shape, arguments.layers, capacity, arguments.weights, bars.update)
        form, n_layers = model.weight_format(arguments.weights), model.config.n_layers
        if capacity > model.config.max_positions and not arguments.shape:
            most = f"numbers up to {model.config.max_positions - spare}, as its positions go"
            raise ConfigError(field="depth", value=max([*depths, *lengths]), accepted=[most])
        specs = report_left_out(select_specs(requested, model.config, capacity, is_list_of_names(arguments.kv)))
        needed = {f"{spec.short} cache": spec.planned_bytes(model.config, max(depths) + spare) for spec in specs}
        require_memory({"weights": model.weights_bytes(form), **needed}, available_memory_bytes())
        decoder = find_device("cpu").decoder(model, form, capacity, arguments.threads, bars.update)
        timings = bench(decoder, specs, depths, tokens=arguments.tokens, progress=bars.update)
        prefills = bench_prefill(decoder, specs, lengths)
    shape = f"{arguments.shape}, {n_layers} layers" if arguments.shape else model.name
    print(f"{shape}, {form.name} weights, {decoder.threads} threads")
    print(table(TIME_COLUMNS, timings))
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
