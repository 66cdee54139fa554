"""`edgekv caches`: the KV schemes, with what was measured of them, and which to take."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from typing import Any

from edgekv.cli.flags import in_flags
from edgekv.cli.options import Command
from edgekv.cli.tables import fitted
from edgekv.kvcache import CacheSpec, scheme_facts, schemes
from edgekv.kvcache.registry import load_entry_points
from edgekv.quality.figures import QUALITY, SPEED, figures, recommended


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wide", action="store_true", help="with papers, aliases and what each gives up")
    parser.add_argument("--json", action="store_true", help="print as JSON, with knobs")


def _execute(arguments: argparse.Namespace) -> int:
    tell_left_out(load_entry_points().values())
    if arguments.json:
        measured = {name: dataclasses.asdict(found) for name, found in figures(list(schemes())).items()}
        print(json.dumps([{**scheme_facts(name), **measured[name]} for name in schemes()], indent=2))
    else:
        print(schemes_text(wide=arguments.wide))
    return 0


def wants_list(arguments: argparse.Namespace) -> bool:
    """Whether --kv is ``list``, which is then printed instead of everything else."""
    if arguments.kv != "list":
        return False
    tell_left_out(load_entry_points().values())
    print(schemes_text())
    return True


def is_named(kv: str | None) -> bool:
    """Whether somebody chose the schemes of --kv one by one."""
    return kv not in (None, "all")


def without_left_out(found: tuple[list[CacheSpec], list[str]]) -> list[CacheSpec]:
    """The schemes that `suited` found, once what it left out is told on standard error."""
    tell_left_out(found[1])
    return found[0]


def tell_left_out(reasons: Iterable[str]) -> None:
    """A line for each scheme that a list lacks, on standard error."""
    for reason in reasons:
        print(f"edgekv: left out: {in_flags(reason)}", file=sys.stderr)


def schemes_text(wide: bool = False) -> str:
    """A line per scheme: name, bytes, KL, speed and what it keeps; then what to take."""
    measured = figures(list(schemes()))
    rows = []
    for name, scheme in schemes().items():
        size, found = scheme_facts(name)["bytes_per_token_per_kv_head"], measured[name]
        row = [name, _shown(size, ".1f"), _shown(found.kl, ".2g"), _shown(found.attention, ".1f", "x")]
        row.append(scheme.summary)
        rows.append([*row, scheme.gives_up, "; also ".join((scheme.paper, *scheme.aliases))] if wide else row)
    head = ["kv", "bytes", "KL", "speed", "what is kept", *(("gives up", "from") if wide else ())]
    best = recommended()
    notes = [
        "bytes: per token and KV head of 128 channels, at 8,192 tokens; KL from dense, nats:",
        f"{QUALITY[1]}; speed of attention against dense:",
        f"{SPEED[1]}; -: not measured",
    ]
    if best:
        notes.append(f"recommended: --kv {best}, the smallest that passes the gate on the demo model; for yours:")
        notes.append("edgekv eval --gate --model PATH --text YOUR-TEXT")
    return "\n".join([*fitted([head, *rows], left=(0, 4, 5, 6), wide=wide), "", *notes])


def _shown(value: Any, style: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{style}}{unit}"


CACHES = Command("list the KV schemes: bytes, measured quality and speed, and which to take", _arguments, _execute)
