"""The options of what `edgekv eval` measures: a model, a text and schemes."""

from __future__ import annotations

import argparse
import pathlib

from edgekv.cli.options import (
    add_adapter_option,
    add_lora_option,
    add_source_options,
    add_weights_option,
    load_options,
    model_path,
    positive_int,
)
from edgekv.cli.prompt import read_text
from edgekv.quality.eval_input import EvalInput
from edgekv.quality.evaluate import FIT_TOKENS


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """Which model, text and schemes, and how much of the text."""
    add_source_options(parser)
    add_lora_option(parser)
    add_adapter_option(parser)
    add_weights_option(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text to predict; - is standard input")
    parser.add_argument(
        "--kv",
        metavar="LIST",
        help="schemes, comma-separated, or all (default: all; with --gate those of --kv auto)",
    )
    parser.add_argument(
        "--ctx",
        type=positive_int,
        metavar="N",
        help="window (default 8192 or the model's; with --gate no more than the text)",
    )
    parser.add_argument("--windows", type=positive_int, default=1, metavar="N", help="windows of text (default 1)")
    parser.add_argument(
        "--fit", type=int, default=FIT_TOKENS, metavar="N", help="tokens that schemes fit on (default %(default)s)"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="a tokenizer file or folder, if not beside the model")
    parser.add_argument("--threads", type=positive_int, metavar="N", help="cores to use (default: all)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or numpy")


def open_input(arguments: argparse.Namespace) -> EvalInput:
    """The model and the text of the options."""
    options = load_options(arguments)
    text = read_text(arguments.text, "--text")
    return EvalInput(model_path(arguments), options, text, pathlib.Path(arguments.text).name)
