"""Options of how tokens are chosen and when a text ends."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from edgekv.cli.options import positive_int
from edgekv.errors import ConfigError
from edgekv.session.sampling_params import SamplingParams

NUMBERS: dict[str, tuple[str, type, str]] = {
    "top_k": ("K", int, "keep the K likeliest tokens; 0 is off"),
    "top_p": ("P", float, "keep the likeliest tokens that have P of the probability; 1 is off"),
    "min_p": ("P", float, "keep tokens at least P times as likely as the likeliest; 0 is off"),
    "repetition_penalty": ("R", float, "divides the logits of tokens in prompt and text; 1 is off"),
    "repetition_window": ("N", int, "how many of the last tokens that counts; 0: all"),
    "frequency_penalty": ("F", float, "subtracted for each time that a token was written, -2 to 2; 0 is off"),
    "presence_penalty": ("F", float, "subtracted once from tokens that were written, -2 to 2; 0 is off"),
}
"""The fields of `SamplingParams` that are options: what their values are called, their type, their help."""


def token_bias(text: str) -> tuple[int, float]:
    """ID=BIAS. Raises ConfigError (field logit_bias)."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        accepted = "ID=BIAS, a token's id and a number from -100 to 100"
        raise ConfigError(
            f"logit_bias={text!r}: give {accepted}", field="logit_bias", value=text, accepted=[accepted]
        ) from None


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
    for name, (metavar, kind, text) in NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID=BIAS",
        help="added to the logit of the token with this id, -100 to 100 (repeatable)",
    )
    parser.add_argument("--seed", type=int, default=None, help="of the sampler (default: drawn, and reported)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)"
    )


def sampling_params(arguments: argparse.Namespace, defaults: SamplingParams | None = None) -> SamplingParams:
    """The options; what is not given is of ``defaults``. Raises ConfigError for a value out of its range."""
    given: dict[str, Any] = {name: getattr(arguments, name) for name in ("temperature", *NUMBERS, "seed")}
    if arguments.greedy:
        given["temperature"] = 0.0
    if arguments.logit_bias:
        given["logit_bias"] = dict(map(token_bias, arguments.logit_bias))
    known = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(defaults or SamplingParams(), **known)
