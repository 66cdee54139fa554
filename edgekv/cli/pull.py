"""`edgekv pull`: a model of the Hugging Face Hub into its usual cache."""

from __future__ import annotations

import argparse
import sys

from edgekv.checkpoint.hub import pull
from edgekv.checkpoint.hub_name import parse_name
from edgekv.cli.options import Command, say
from edgekv.errors import CheckpointError


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="NAME",
        help="org/name, org/name@revision, or a GGUF file of it: org/name:file.gguf; what is private or gated "
        "needs HF_TOKEN",
    )


def _execute(arguments: argparse.Namespace) -> int:
    """Prints where the model lies to standard output."""
    name = parse_name(arguments.model)
    if name is None:
        raise CheckpointError(
            f"{arguments.model!r} is no name on the Hub; give org/name, org/name@revision or org/name:file.gguf",
            field="model",
            value=arguments.model,
            accepted=["org/name"],
        )
    print(pull(name, say))
    print(f"next: edgekv chat --model {name}   or: edgekv budget --model {name} --ctx 8192", file=sys.stderr)
    return 0


PULL = Command("download a model of the Hugging Face Hub: only what is needed, resumable", _arguments, _execute)
