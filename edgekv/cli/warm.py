"""`edgekv warm`: compiles what a first run would compile, for images and installers."""

from __future__ import annotations

import argparse

from edgekv.cli.bars import Bars
from edgekv.cli.options import (
    Command,
    add_lora_option,
    add_source_options,
    add_weights_option,
    load_options,
    model_path,
    positive_int,
)
from edgekv.kvcache import CacheSpec
from edgekv.session.session import Session

DEFAULT_SCHEMES = "dense,planes,onebit,bitplane"


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    add_lora_option(parser)
    add_weights_option(parser)
    parser.add_argument(
        "--kv",
        default=DEFAULT_SCHEMES,
        metavar="LIST",
        help="schemes, comma-separated, or all (default %(default)s)",
    )
    parser.add_argument("--threads", type=positive_int, metavar="N", help="cores to use (default: all)")


def _execute(arguments: argparse.Namespace) -> int:
    specs = CacheSpec.parse_list(arguments.kv)
    arguments.kv = None
    options = load_options(arguments)
    with Bars() as bars:
        for spec in specs:
            with Session.load(model_path(arguments), options, kv=spec, progress=bars.update) as session:
                seconds = session.report().compile_s
            print(f"{spec.short}: " + (f"compiled in {seconds:.1f} s" if seconds else "was compiled already"))
    return 0


WARM = Command(
    "compile kernels, and quantize the model's weights, so that the first run need not", _arguments, _execute
)
