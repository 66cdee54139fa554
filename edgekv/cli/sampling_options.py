"""Options of how tokens are chosen and when a text ends."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from edgekv.cli.options import positive_int
from edgekv.session.sampling_params import SamplingParams

OFF = {"top_k": "0 is off", "top_p": "1 is off", "min_p": "0 is off", "repetition_penalty": "1 is off"}


def add_sampling_options(parser: argparse.ArgumentParser, *, max_new_tokens: str) -> None:
    """max_new_tokens: what its help says of the command's own default."""
    parser.add_argument(
        "--max-new-tokens", type=positive_int, metavar="N", help=f"stop after N tokens (default: {max_new_tokens})"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 is greedy (default, as of the following: what the model's generation_config.json says, else 0.7)",
    )
    how.add_argument("--greedy", action="store_true", help="always the likeliest token: --temperature 0")
    for name, off in OFF.items():
        kind: Any = int if name == "top_k" else float
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=name[0].upper(), help=off)
    parser.add_argument("--seed", type=int, default=None, help="of the sampler (default: drawn, and reported)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)"
    )


def sampling_params(arguments: argparse.Namespace, defaults: SamplingParams | None = None) -> SamplingParams:
    """The options; what is not given is of ``defaults``. Raises ConfigError for a value out of its range."""
    given = {name: getattr(arguments, name) for name in ("temperature", *OFF, "seed")}
    if arguments.greedy:
        given["temperature"] = 0.0
    known = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(defaults or SamplingParams(), **known)
