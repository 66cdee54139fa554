"""Options of how tokens are chosen and when a text ends."""

from __future__ import annotations

import argparse

from edgekv.cli.options import positive_int
from edgekv.session.sampling_params import SamplingParams

DEFAULTS = SamplingParams()


def add_sampling_options(parser: argparse.ArgumentParser, *, temperature: float, max_new_tokens: int) -> None:
    """With a command's own defaults."""
    parser.add_argument(
        "--max-new-tokens",
        type=positive_int,
        default=max_new_tokens,
        metavar="N",
        help="stop after N tokens (default %(default)s)",
    )
    parser.add_argument("--temperature", type=float, default=temperature, help="0 is greedy (default %(default)g)")
    parser.add_argument("--top-k", type=int, default=DEFAULTS.top_k, help="0 is off (default %(default)s)")
    parser.add_argument("--top-p", type=float, default=DEFAULTS.top_p, help="1 is off (default %(default)s)")
    parser.add_argument("--min-p", type=float, default=DEFAULTS.min_p, help="0 is off (default %(default)s)")
    parser.add_argument(
        "--repetition-penalty", type=float, default=DEFAULTS.repetition_penalty, help="1 is off (default)"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the sampler (default: drawn, and reported)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)"
    )


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Raises ConfigError for a value out of its range."""
    return SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
    )
