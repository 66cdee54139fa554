"""Table III of the H1B-KV paper, measured on the machine at hand.

    python power/table3.py --model MODEL --ctx 8192

A row per scheme: milliseconds and millijoules per decoded token at a full context, the part of it that attention
takes, and the time of a plain streaming read of exactly the bytes that the scheme's cache makes a token read; each
with its spread over the runs. Then the paper's figures and the least time that the memory allows.

The context is filled with random keys and values, which needs no prefill; schemes that choose tokens by their
content (bitplane, fier, quest) read more of them in a real text.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence

import measure
import paper
from measure import Row, Spread

from edgekv.cli.bars import Bars
from edgekv.cli.metering import add_power_options, energy_meter
from edgekv.cli.options import add_source_options, add_weights_option, model_path, positive_int
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.files import atomic_write
from edgekv.kvcache import CacheSpec
from edgekv.machine import format_bytes, machine_info
from edgekv.power.boards import find_board
from edgekv.power.report import EnergyReport
from edgekv.session.devices import find_device
from edgekv.session.model import Model
from edgekv.session.opening import WARM_UP_TOKENS
from edgekv.session.plan import SessionPlan

SCHEMES = "dense,int4,h1b,onebit,bitplane"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="table3.py",
        description="Table III of the H1B-KV paper, measured on this machine.",
        allow_abbrev=False,
    )
    add_source_options(parser)
    add_weights_option(parser)
    parser.add_argument(
        "--ctx", type=positive_int, default=8192, metavar="N", help="context (default %(default)s)"
    )
    parser.add_argument("--kv", default=SCHEMES, metavar="LIST", help="schemes (default %(default)s)")
    parser.add_argument("--layers", type=positive_int, metavar="N", help="only the model's first N layers")
    parser.add_argument(
        "--tokens", type=positive_int, default=32, metavar="N", help="per run (default %(default)s)"
    )
    parser.add_argument(
        "--runs", type=positive_int, default=5, metavar="N", help="per scheme (default %(default)s)"
    )
    parser.add_argument("--threads", type=positive_int, metavar="N", help="cores to use (default: all)")
    parser.add_argument("--device", default="cpu", help="cpu or numpy (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    add_power_options(parser)
    parser.set_defaults(power="auto")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    specs = CacheSpec.parse_list(args.kv)
    meter = energy_meter(args)
    model = Model.open(model_path(args), config=args.config)
    if args.layers:
        model = measure.first_layers(model, args.layers)
    if args.ctx <= args.runs * args.tokens + 1:
        raise ConfigError(f"--ctx {args.ctx}: {args.runs} runs of {args.tokens} tokens do not fit; give more")
    for spec in specs:
        measure.check_memory(model, SessionPlan.make(model, kv=spec, ctx=args.ctx, weights=args.weights))
    form, threads = model.weight_format(args.weights), args.threads or len(os.sched_getaffinity(0))
    with Bars() as bars:
        decoder = find_device(args.device).decoder(model, form, args.ctx, threads, bars.update)
    for spec in specs:
        for step in decoder.warm_up(spec.layers(model.config, min(WARM_UP_TOKENS, args.ctx))):
            step()
    rows = []
    with meter:
        for spec in specs:
            rows.append(measure.measure(spec, decoder, args.ctx, args.runs, args.tokens, meter))
            print(f"measured {spec}", file=sys.stderr, flush=True)
    report = meter.report()
    rows = [measure.with_energy(row, spec, args.runs, report) for row, spec in zip(rows, specs, strict=True)]
    setting = f"{model.path.name}, {model.config.n_layers} layers, {form.name} weights, context {args.ctx}, "
    setting += f"{threads} threads; the median of {args.runs} runs of {args.tokens} tokens ± half their range"
    print(table(rows, setting, report))
    if args.json:
        atomic_write(args.json, as_json(rows, args, report).encode())
    return 0


def as_json(rows: list[Row], args: argparse.Namespace, report: EnergyReport | None) -> str:
    facts = {
        "rows": [dataclasses.asdict(row) for row in rows],
        "settings": vars(args),
        "energy": report and dataclasses.asdict(report),
        "paper": {name: dataclasses.asdict(row) for name, row in paper.ROWS.items()},
        "machine": machine_info(),
    }
    return json.dumps(facts, indent=1) + "\n"


def bandwidth(rows: list[Row]) -> tuple[float, str]:
    """GB/s for the lower bound: the board's peak where it is known, else the longest streaming read seen here."""
    board = find_board()
    if board:
        return board.peak_gb_s, f"peak of the {board.name}"
    reads = [(row.bytes_read, row.load_ms.median) for row in rows if row.load_ms]
    if not reads:
        return float("nan"), "nothing could be read"
    n_bytes, milliseconds = max(reads)  # the processor's caches help the shorter ones
    return n_bytes / milliseconds / 1e6, f"a streaming read of {format_bytes(n_bytes)} here"


def table(rows: list[Row], setting: str, report: EnergyReport | None) -> str:
    gb_s, source = bandwidth(rows)
    times = f"{'ms/token':>16}{'attention ms':>16}{'cache load ms':>16}"
    lines = [setting, "", f"{'kv':<12}{times}{'mJ/token':>18}{'above idle':>18}{'bound ms':>10}"]
    for row in rows:
        bound = row.token_bytes / gb_s / 1e6
        lines.append(
            f"{row.kv.partition(':')[0]:<12}{show(row.latency_ms):>16}{show(row.attention_ms):>16}"
            f"{show(row.load_ms):>16}{show(row.gross_mj):>18}{show(row.net_mj):>18}{bound:>10.2f}"
        )
    lines += ["", f"cache load: a streaming read of the bytes that a token must read of the cache, {loads(rows)}"]
    lines.append(f"bound: weights and cache of one token at {gb_s:.1f} GB/s, {source}")
    lines += [f"{topic}: {text}" for topic, text in (report.source_rows() if report else ())]
    lines += ["", "The paper (7B, 8,192 tokens; Raspberry Pi 5, Jetson Nano):"]
    for figures in paper.ROWS.values():
        parts = f"load {figures.load_ms:g} ms, attention {figures.attention_ms:g} ms" if figures.load_ms else ""
        lines.append(
            f"{figures.name:<12}{figures.pi_ms:>8g} ms {figures.pi_mj:>6g} mJ  {figures.nano_ms:>8g} ms "
            f"{figures.nano_mj:>6g} mJ  {parts}".rstrip()
        )
    return "\n".join([*lines, "", paper.verdict()])


def loads(rows: list[Row]) -> str:
    return ", ".join(f"{row.kv.partition(':')[0]} {format_bytes(row.bytes_read)}" for row in rows)


def show(value: Spread | None) -> str:
    return "n/a" if value is None else f"{value.median:.4g} ± {value.half_range:.2g}"


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(parse_arguments(argv))
    except EdgeKVError as error:
        print(f"table3.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
