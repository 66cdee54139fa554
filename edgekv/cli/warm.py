"""`edgekv warm`: compiles what a first run would compile, for images and installers."""

from __future__ import annotations

import argparse

from edgekv.cli.bars import Bars
from edgekv.cli.caches import is_named, without_left_out
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
from edgekv.kvcache.spec import suited
from edgekv.session.opening import open_model
from edgekv.session.plan import default_ctx
from edgekv.session.session import Session

DEFAULT_SCHEMES = "dense,planes,onebit,bitplane"


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    add_lora_option(parser)
    add_weights_option(parser)
    parser.add_argument(
        "--kv",
        metavar="LIST",
        help=f"schemes, comma-separated, or all (default {DEFAULT_SCHEMES})",
    )
    parser.add_argument("--threads", type=positive_int, metavar="N", help="cores to use (default: all)")


def _execute(arguments: argparse.Namespace) -> int:
    asked, named = CacheSpec.parse_list(arguments.kv or DEFAULT_SCHEMES), is_named(arguments.kv)
    arguments.kv = None
    options = load_options(arguments)
    config = open_model(model_path(arguments), options).config
    specs = without_left_out(suited(asked, config, default_ctx(config), named))
    with Bars() as bars:
        for spec in specs:
            with Session.load(model_path(arguments), options, kv=spec, progress=bars.update) as session:
                seconds = session.report().compile_s
            print(f"{spec.short}: " + (f"compiled in {seconds:.1f} s" if seconds else "was compiled already"))
    return 0


WARM = Command(
    "compile kernels, and quantize the model's weights, so that the first run need not", _arguments, _execute
)
