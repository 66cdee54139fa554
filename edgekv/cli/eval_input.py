"""What `edgekv eval` measures: a model, a text as its tokens, and the schemes of --kv."""

from __future__ import annotations

import argparse
import os
import pathlib
from typing import Any

from edgekv.cli.options import (
    Bars,
    add_adapter_option,
    add_source_options,
    add_weights_option,
    model_path,
    positive_int,
)
from edgekv.cli.prompt import read_text
from edgekv.errors import TokenizerError
from edgekv.kvcache import CACHES, CacheSpec
from edgekv.machine import machine_info
from edgekv.models.decoder import Decoder
from edgekv.quality.evaluate import FIT_TOKENS
from edgekv.session.model import Model, find_device
from edgekv.session.plan import Plan
from edgekv.tokenizer import load_tokenizer


def add_subject_options(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
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
    parser.add_argument("--device", default="cpu", help="cpu or numpy")


class Subject:
    """The model and the text of the options; `load` then reads the weights."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        text = read_text(arguments.text, "--text")
        self.model = Model.open(
            model_path(arguments),
            config=arguments.config,
            tokenizer=arguments.tokenizer,
            adapter=arguments.adapter,
        )
        if self.model.tokenizer_path is None:
            raise TokenizerError(
                f"{self.model.path} has no tokenizer: copy one beside the weights, or pass --tokenizer PATH"
            )
        self.tokenizer = load_tokenizer(self.model.tokenizer_path, config=self.model.raw_config)
        self.tokens = self.tokenizer.encode(text)
        self.threads = arguments.threads or len(os.sched_getaffinity(0))

    def load(self, ctx: int | None, bars: Bars) -> tuple[Decoder, int]:
        """The decoder, and its window: ``ctx`` or the default of a session."""
        a = self.arguments
        plan = Plan.make(self.model, kv="dense", ctx=ctx, weights=a.weights)
        form = self.model.weight_format(a.weights)
        decoder = find_device(a.device).decoder(self.model, form, plan.ctx, self.threads, bars.update)
        return decoder, plan.ctx

    def facts(self, ctx: int) -> dict[str, Any]:
        """Settings and machine of a measurement, for JSON."""
        a, adapter = self.arguments, self.model.adapter
        settings = {
            "model": self.model.path.name,
            "identity": self.model.identity,
            "adapter": adapter and adapter.path.name,
            "text": pathlib.Path(a.text).name,
            "ctx": ctx,
            "windows": min(a.windows, len(self.tokens) // ctx),
            "weights": self.model.weight_format(a.weights).name,
            "fit_tokens": a.fit,
            "threads": self.threads,
        }
        return {"settings": settings, "machine": machine_info()}


def split_specs(text: str) -> list[CacheSpec]:
    """Schemes of a comma-separated list in which the knobs are separated by commas too."""
    if text == "all":
        return [CacheSpec.parse(name) for name in CACHES]
    items: list[str] = []
    for item in text.split(","):
        if items and "=" in item and ":" not in item:
            items[-1] += f",{item}"
        else:
            items.append(item)
    return [CacheSpec.parse(item) for item in items]
