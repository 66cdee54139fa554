"""`edgekv demo`: KV schemes read a long text, answer questions about facts hidden in it, and continue it."""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgekv.checkpoint.hub import shipped_file
from edgekv.checks import refusal
from edgekv.cli.options import add_options, option
from edgekv.cli.terminal import Bars, align_columns
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import Options, fit_head_bits, load_model, open_model, open_tokenizer, warm_up
from edgekv.errors import EdgeKVError
from edgekv.eval.gate import NeedleReader, Prose, make_haystack
from edgekv.kernels.arrays import to_host
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import COMPARED
from edgekv.kvcache.recurrent import attending
from edgekv.machine import blas_threads, format_bytes
from edgekv.text import Tokenizer
from edgekv.types import TaskProgress

FACTS = 5  # a pass key and the codes of four things
MIN_CTX = 1024
N_AFTER = 96  # tokens of prose after the text, on which speed and agreement are measured
INTRODUCTION = """\
{:,} tokens of prose; a pass key and four codes are hidden in them.
Each KV scheme reads them, is asked for the five numbers, and goes on with the prose.
"""
NEXT = """
So small a model hardly writes faster with fewer bits; larger ones do in long contexts (docs/speed.md).

next
  edgekv chat Qwen/Qwen3-0.6B                         a model that answers (1.5 GB)
  edgekv budget llama3.1-8b --ctx 32768 --memory 8G   does a larger one fit?
  edgekv eval --gate --model PATH --text YOUR-TEXT    what is good enough for your text"""


@dataclasses.dataclass(frozen=True)
class Trial:
    """The results of one scheme.

    first_token_s: the time it took to read the text. tokens_per_s: the decoding speed over N_AFTER tokens.
    agreement: the share of them at which the likeliest token is that of the first scheme. answers: the text of
    each answer, and whether it is right.
    """

    kv: str
    cache_bytes: int
    first_token_s: float
    tokens_per_s: float
    agreement: float
    answers: list[tuple[str, bool]]


class Demo:
    """A text of ``ctx`` tokens with hidden facts, and the N_AFTER tokens of prose that follow it.

    Raises ContextError if the prose is too short.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, text: str, ctx: int, seed: int) -> None:
        tokens = np.asarray(tokenizer.encode(text, bos=False))
        longest = min(len(tokens), decoder.config.max_positions) - N_AFTER
        if not MIN_CTX <= ctx <= longest:
            raise refusal("ctx", ctx, f"{MIN_CTX} to {longest}, as text and model go")
        self.reader = NeedleReader(decoder, tokenizer, ctx + N_AFTER)
        self.haystack = make_haystack(np.random.default_rng(seed), Prose(tokens[:-N_AFTER], tokenizer), ctx, FACTS)
        self.after = [int(token) for token in tokens[-N_AFTER:]]
        self._exact: list[int] = []  # the first scheme's likeliest token after each of them

    def run(self, spec: CacheSpec, name: str, progress: TaskProgress) -> Trial:
        """Reads the text, asks for each fact, and continues the prose, after kernels are compiled."""
        reader, decoder = self.reader, self.reader.decoder
        warm_up(decoder, spec, reader.ctx, progress)
        caches = reader.open(spec)
        begin = time.perf_counter()
        reader.read(self.haystack.ids, caches, lambda i, n: progress(f"{name} reads", i, n))
        first_token_s = time.perf_counter() - begin
        cache_bytes = sum(cache.nbytes for cache in attending(caches))
        texts = reader.ask(self.haystack, caches, spec)
        questions = self.haystack.questions
        answers = [(text, question.is_answered(text)) for text, question in zip(texts, questions, strict=True)]
        with blas_threads(1):
            begin = time.perf_counter()
            likeliest = [int(to_host(decoder.step(token, caches)).argmax()) for token in self.after]
            seconds = time.perf_counter() - begin
        self._exact = self._exact or likeliest
        agreement = float(np.mean(np.equal(likeliest, self._exact)))
        return Trial(name, cache_bytes, first_token_s, N_AFTER / seconds, agreement, answers)


def demo_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        "kv ctx threads device",
        kv=option("LIST", "schemes beside f16 (default %(default)s)", default=COMPARED),
        ctx={"default": 4096, "help": "tokens of text (default %(default)s)"},
        seed=option("N", "which facts, and where (default: others each time)", type=int),
    )


def demo_command(arguments: argparse.Namespace) -> int:
    specs = CacheSpec.parse_list(f"f16,{arguments.kv}")
    prose = shipped_file("demo/prose.txt")
    if prose is None:
        raise EdgeKVError("demo/prose.txt did not come with this installation: install edgekv again")
    options = Options(threads=arguments.threads, device=arguments.device)
    seed = secrets.randbits(16) if arguments.seed is None else arguments.seed
    with Bars() as bars:
        loaded = load_model(options, open_model("demo", options), bars.update)
        decoder, tokenizer = loaded.decoders[None], open_tokenizer(loaded.model)
        demo = Demo(decoder, tokenizer, prose.read_text(encoding="utf-8"), arguments.ctx, seed)
        fit = fit_head_bits(loaded.model, loaded.plan.weights, decoder, tokenizer, bars.update)
        specs = [fit(spec) for spec in specs]
        print(INTRODUCTION.format(len(demo.haystack.ids)))
        trials = [demo.run(spec, spec.short, bars.update) for spec in specs]
    values = {question.fact.name or "pass key": question.fact.value for question in demo.haystack.questions}
    print(_table(values, trials))
    print(NEXT)
    return 0


def _table(values: dict[str, str], trials: Sequence[Trial]) -> str:
    """Returns the table with a row per figure and a column per scheme. values: the hidden digits by fact."""
    largest = max(trial.cache_bytes for trial in trials)
    rows: dict[str, Callable[[Trial], Any]] = {
        "": lambda t: t.kv,
        "cache of this text": lambda t: format_bytes(t.cache_bytes),
        "times smaller": lambda t: f"{largest / t.cache_bytes:.1f}",
        "first token": lambda t: f"{t.first_token_s:.2f} s",
        "writes": lambda t: f"{t.tokens_per_s:.0f} tokens/s",
        "agrees with f16": lambda t: f"{t.agreement:.0%}",
        "found": lambda t: f"{sum(right for _, right in t.answers)} of {len(values)}",
    }
    cells = [[label, *map(show, trials)] for label, show in rows.items()]
    for i, (name, value) in enumerate(values.items()):
        answers = [trial.answers[i] for trial in trials]
        cells.append([name, *(f"{value} found" if ok else f"{s[:5].strip()}, not {value}" for s, ok in answers)])
    return align_columns(cells, left=range(1 + len(trials)))
