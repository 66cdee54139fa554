"""`edgekv eval --gate`: which lossy KV schemes may be used with a model; and the warning where none was asked."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from collections.abc import Callable, Sequence
from typing import Any

from edgekv.cli.bars import Bars
from edgekv.cli.caches import is_named, without_left_out
from edgekv.cli.eval_input import open_input
from edgekv.cli.flags import in_flags
from edgekv.cli.output import write_json
from edgekv.cli.tables import fitted
from edgekv.errors import ConfigError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import DEFAULT
from edgekv.machine import format_bytes
from edgekv.quality.gate import DEFAULT_SCHEMES, GateLimits, Verdict, default_ctx, gate, needs_gate, recommended
from edgekv.quality.retrieval import NEEDLES, NeedleTest
from edgekv.quality.verdicts import Verdicts
from edgekv.session.model import Model


def add_gate_options(parser: argparse.ArgumentParser) -> None:
    """--gate and its limits."""
    limits = GateLimits()
    group = parser.add_argument_group(
        "gate", "with --gate; exit status 0 when a scheme passed, 1 when none did (docs/gate.md)"
    )
    group.add_argument(
        "--gate", action="store_true", help="a verdict per lossy scheme, remembered, and the --kv to use"
    )
    group.add_argument(
        "--max-kl",
        type=_limit,
        default=limits.max_kl,
        metavar="NATS",
        help="mean KL divergence from dense, over all positions and the later half (default %(default)s)",
    )
    group.add_argument(
        "--min-top1",
        type=_share,
        default=limits.min_top1,
        metavar="SHARE",
        help="positions whose likeliest token is dense's, likewise (default %(default)s)",
    )
    group.add_argument(
        "--min-needles",
        type=_share,
        default=limits.min_needles,
        metavar="SHARE",
        help="of the needles that dense finds (default %(default)s)",
    )
    group.add_argument(
        "--needles",
        type=_count,
        default=NEEDLES,
        metavar="N",
        help="pass keys and codes hidden in the text (default %(default)s; 0: none)",
    )


def run_gate(arguments: argparse.Namespace) -> int:
    """Prints the verdicts and the recommendation, remembers the verdicts; 1 when no scheme passed."""
    if arguments.plot:
        raise ConfigError("--plot does not go with --gate; leave one of them out")
    specs = _specs(arguments.kv)
    measured = open_input(arguments)
    specs = without_left_out(measured.schemes(specs, is_named(arguments.kv)))
    limits = GateLimits(arguments.max_kl, arguments.min_top1, arguments.min_needles)
    ctx = arguments.ctx or default_ctx(len(measured.tokens), measured.model.config.max_positions)
    with Bars() as bars:
        decoder, ctx = measured.load(ctx, bars.update)
        specs = measured.fitted(specs, decoder, bars.update)
        verdicts, needles = gate(
            decoder,
            measured.tokenizer,
            measured.tokens,
            specs,
            ctx,
            windows=arguments.windows,
            limits=limits,
            n_needles=arguments.needles,
            fit_tokens=arguments.fit,
            adapter=measured.model.adapter,
            progress=bars.update,
        )
    facts = measured.facts(ctx, arguments.windows, arguments.fit)
    best = recommended(verdicts)
    print(_report(verdicts, needles, best, len(measured.tokens), facts["settings"], arguments.wide))
    if arguments.json:
        content = {
            "verdicts": [{"passed": verdict.passed, **dataclasses.asdict(verdict)} for verdict in verdicts],
            "recommended": _recommended_kv(best),
            "needles": {
                "hidden": needles.n_hidden,
                "dense": needles.n_known,
                "applicable": needles.applies,
            },
            "limits": dataclasses.asdict(limits),
            **facts,
        }
        write_json(arguments.json, content)
    _remember(measured.model, specs, verdicts, limits, facts)
    return 1 if best is None else 0


def warn_ungated(model: Model, spec: CacheSpec) -> None:
    """One line on standard error, once, for a lossy scheme that was never gated or has failed."""
    warning = Verdicts(model).warn_once(spec)
    if warning:
        print(f"edgekv: {in_flags(warning)}", file=sys.stderr)


def _specs(kv: str | None) -> list[CacheSpec]:
    asked = [CacheSpec.parse(text) for text in DEFAULT_SCHEMES] if kv is None else CacheSpec.parse_list(kv)
    specs = [spec for spec in asked if needs_gate(spec)]
    if not specs:
        raise ConfigError(
            f"--kv {kv} loses nothing on a text and needs no gate; name a lossy scheme (edgekv caches)"
        )
    return specs


def _remember(
    model: Model,
    specs: Sequence[CacheSpec],
    verdicts: Sequence[Verdict],
    limits: GateLimits,
    facts: dict[str, Any],
) -> None:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    machine = {name: facts["machine"][name] for name in ("cpu", "versions")}
    measured = {**facts["settings"], "limits": dataclasses.asdict(limits), "machine": machine, "time": now}
    memory = Verdicts(model)
    for spec, verdict in zip(specs, verdicts, strict=True):
        memory.remember(spec, verdict, measured)


def _recommended_kv(best: Verdict | None) -> str:
    return DEFAULT if best is None else _short(best)


def _short(verdict: Verdict) -> str:
    return CacheSpec.parse(verdict.kv).short


def _report(
    verdicts: Sequence[Verdict],
    needles: NeedleTest,
    best: Verdict | None,
    n_tokens: int,
    settings: dict[str, Any],
    wide: bool,
) -> str:
    windows, ctx = settings["windows"], settings["ctx"]
    lines = [
        table(verdicts, wide),
        f"needles: {needles.note}",
        f"measured on {windows} window{'s' * (windows > 1)} of {ctx} tokens ({settings['text']} has {n_tokens}), "
        f"weights {settings['weights']}; longer contexts were not measured",
    ]
    why = "no scheme passed"
    if best:
        why = f"the smallest cache that passed, {format_bytes(best.quality.cache_bytes)}"
    return "\n".join([*lines, f"recommended: --kv {_recommended_kv(best)} ({why})"])


def table(verdicts: Sequence[Verdict], wide: bool = False) -> str:
    """A line per scheme, and one for each that failed, with every limit that it missed."""
    columns: dict[str, Callable[[Verdict], str]] = {
        "kv": _short,
        "KL": lambda v: f"{v.quality.kl:.4f}",
        "KL late": lambda v: f"{v.quality.kl_second_half:.4f}",
        "top1": lambda v: f"{v.quality.top1:.3f}",
        "late": lambda v: f"{v.quality.top1_second_half:.3f}",
        "needles": lambda v: "n/a" if v.needles is None else "{}/{}".format(*v.needles),
        "cache": lambda v: format_bytes(v.quality.cache_bytes),
        "verdict": lambda v: "passed" if v.passed else "failed",
    }
    if wide:
        columns["x dense"] = lambda v: f"{v.quality.perplexity_ratio:.4f}"
        columns["read/token"] = lambda v: format_bytes(v.quality.bytes_read_per_token)
    rows = [[show(verdict) for show in columns.values()] for verdict in verdicts]
    failed = [f"{_short(v)} failed: {'; '.join(v.failures)}" for v in verdicts if not v.passed]
    return "\n".join([*fitted([list(columns), *rows], wide=wide), *failed])


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _limit(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
