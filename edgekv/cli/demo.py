"""`edgekv demo`: what packed caches keep and save, on the shipped model, in half a minute."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import secrets
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from edgekv.checkpoint.shipped import shipped
from edgekv.cli.bars import Bars
from edgekv.cli.options import Command, add_device_option, positive_int
from edgekv.cli.output import output_file, redraw, write_json
from edgekv.cli.prompt import read_text
from edgekv.errors import EdgeKVError, PowerError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import DEFAULT
from edgekv.machine import format_bytes, machine_info
from edgekv.power import EnergyMeter, PowerSampler, find_meter
from edgekv.power.phases import NoMeter
from edgekv.quality.demo import Demo, Trial
from edgekv.session.head_bits import give_heads_bits
from edgekv.session.session import Session

MODEL, PROSE = "demo", "demo/prose.txt"
SCHEMES = "kivi2,planes"
LABEL, COLUMN = 17, 20  # widths, in characters


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv", default=SCHEMES, metavar="LIST", help="schemes beside f16, comma-separated (default %(default)s)"
    )
    parser.add_argument(
        "--ctx", type=positive_int, default=4096, metavar="N", help="tokens of text (default %(default)s)"
    )
    parser.add_argument(
        "--text", metavar="FILE", help="prose to hide the facts in (default: the demo model's own)"
    )
    parser.add_argument("--seed", type=int, help="which facts, and where (default: others each time)")
    parser.add_argument("--threads", type=positive_int, metavar="N", help="cores to use (default: all)")
    add_device_option(parser)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write what was measured as JSON")


def _execute(arguments: argparse.Namespace) -> int:
    specs = [CacheSpec.parse(DEFAULT), *CacheSpec.parse_list(arguments.kv)]
    text = _prose() if arguments.text is None else read_text(arguments.text, "--text")
    meter = _meter()
    with Bars() as bars, contextlib.closing(_session(arguments, bars)) as session:
        seed = secrets.randbits(16) if arguments.seed is None else arguments.seed
        demo = Demo(session.decoder, session.require_tokenizer(), text, arguments.ctx, seed)
        model = session.model, session.plan.weights, session.decoder, session.tokenizer
        specs = [give_heads_bits(spec, *model, bars.update) for spec in specs]
        for spec in specs:
            demo.warm_up(spec, bars.update)
    trials = [Trial(spec.short) for spec in specs]
    trials[0].kv = "f16"
    print(_introduction(demo))
    screen = _Screen(lambda: _table(demo, trials))
    with meter:
        for spec, trial in zip(specs, trials, strict=True):
            demo.run(spec, trial, screen.update, meter)
    _take_energy(trials, meter)
    screen.finish()
    print(_picture(trials))
    print(_next(trials))
    if arguments.json:
        facts = {
            "trials": [dataclasses.asdict(trial) for trial in trials],
            "ctx": arguments.ctx,
            "seed": seed,
            "facts": [question.value for question in demo.haystack.questions],
            "machine": machine_info(),
        }
        write_json(arguments.json, facts)
    return 0


def _session(arguments: argparse.Namespace, bars: Bars) -> Session:
    return Session.load(MODEL, ctx=None, threads=arguments.threads, device=arguments.device, progress=bars.update)


def _prose() -> str:
    path = shipped(PROSE)
    if path is None:
        raise EdgeKVError(f"{PROSE} did not come with this installation; give a text with --text FILE")
    return read_text(str(path), "--text")


def _meter() -> EnergyMeter | NoMeter:
    """Where something can be measured, that; the demonstration is none of energy alone."""
    try:
        meter, notes = find_meter("auto")
        return EnergyMeter(PowerSampler(meter, notes=notes), idle_s=0)
    except PowerError:
        return NoMeter()


def _take_energy(trials: Sequence[Trial], meter: EnergyMeter | NoMeter) -> None:
    report = meter.report()
    if report:
        for trial in trials:
            trial.mj_per_token = report.phases[trial.kv].mj_per_token


def _introduction(demo: Demo) -> str:
    return (
        f"{len(demo.haystack.ids):,} tokens of prose; a pass key and four codes are hidden in them.\n"
        "Each KV scheme reads them, is asked for the five numbers, and goes on with the prose.\n"
    )


class _Screen:
    """A block of lines: on a terminal redrawn in place, elsewhere printed once, at the end."""

    def __init__(self, lines: Callable[[], list[str]]) -> None:
        self._lines, self._height = lines, 0

    def update(self) -> None:
        """Draws it again."""
        if sys.stdout.isatty():
            self._draw()

    def finish(self) -> None:
        """Draws it for the last time."""
        self._draw()

    def _draw(self) -> None:
        self._height = redraw(self._lines(), self._height)


def _table(demo: Demo, trials: Sequence[Trial]) -> list[str]:
    """A column per scheme, as far as it is known."""
    questions = demo.haystack.questions
    rows: list[tuple[str, Callable[[Trial], str]]] = [
        ("", lambda t: t.doing),
        ("cache", lambda t: _shown(t.cache_bytes, format_bytes)),
        ("first token", lambda t: _shown(t.first_token_s, "{:.2f} s".format)),
        ("writes", lambda t: _shown(t.tokens_per_s, "{:.0f} tokens/s".format)),
        ("agrees with f16", lambda t: _shown(t.agreement, "{:.0%}".format)),
        *((q.name or "pass key", _answer_of(i, q.value)) for i, q in enumerate(questions)),
        ("found", lambda t: f"{t.n_found} of {len(questions)}" if len(t.answers) == len(questions) else ""),
    ]
    if any(trial.mj_per_token is not None for trial in trials):
        rows.append(("energy per token", lambda t: _shown(t.mj_per_token, "{:.1f} mJ, gross".format)))
    head = " " * LABEL + "".join(f"{trial.kv[: COLUMN - 1]:<{COLUMN}}" for trial in trials)
    return [head.rstrip(), *((f"{label:<{LABEL}}" + _cells(trials, show)).rstrip() for label, show in rows)]


def _cells(trials: Sequence[Trial], show: Callable[[Trial], str]) -> str:
    return "".join(f"{show(trial):<{COLUMN}}" for trial in trials)


def _answer_of(i: int, value: str) -> Callable[[Trial], str]:
    def show(trial: Trial) -> str:
        if i >= len(trial.answers):
            return ""
        said, right = trial.answers[i]
        return f"{value} found" if right else f"{said[:5].strip()}, not {value}"

    return show


def _shown(value: Any, form: Callable[[Any], str]) -> str:
    return "" if value is None else form(value)


def _picture(trials: Sequence[Trial]) -> str:
    """Bars of the caches' bytes."""
    width = max(len(trial.kv) for trial in trials) + 2
    room = max(10, min(shutil.get_terminal_size().columns, 100) - width - 32)
    largest = max(trial.cache_bytes or 0 for trial in trials)
    lines = ["", "the cache of this text"]
    for trial in trials:
        size = trial.cache_bytes or 0
        bar = "█" * max(1, round(room * size / largest))
        saved = "" if size == largest else f", {largest / size:.1f} times smaller"
        lines.append(f"  {trial.kv:<{width}}{bar} {format_bytes(size)}{saved}")
    return "\n".join(lines)


def _next(trials: Sequence[Trial]) -> str:
    kv = trials[1].kv if len(trials) > 1 else DEFAULT
    return (
        "\nnext\n"
        f"  edgekv chat --model Qwen/Qwen3-0.6B --kv {kv}          a model that answers (1.5 GB)\n"
        f"  edgekv budget --shape llama3.1-8b --ctx 32768 --kv auto --memory 8G\n"
        "  edgekv eval --gate --model PATH --text YOUR-TEXT         which scheme is good enough for yours"
    )


DEMO = Command(
    "see what packed caches keep and save, on the model that ships, in half a minute", _arguments, _execute
)
