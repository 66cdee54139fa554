"""`edgekv demo`: facts hidden in a long text, which scheme after scheme reads, is asked for and goes on with."""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgekv.checkpoint.shipped import shipped
from edgekv.cli.options import Command, add_device_option, positive_int, read_text
from edgekv.cli.terminal import Bars, fitted, output_file, write_json
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import give_heads_bits, load_model, open_caches, open_model, open_tokenizer, warm_up
from edgekv.engine.options import Options
from edgekv.errors import ContextError, EdgeKVError, PowerError
from edgekv.eval.needles import Prose, answer, make_haystack, open_copy, read
from edgekv.kernels.arrays import to_host
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import LayerState
from edgekv.kvcache.choice import DEFAULT
from edgekv.kvcache.recurrent import attending
from edgekv.machine import blas_threads, format_bytes, machine_info
from edgekv.power import EnergyMeter, PowerSampler, find_meter
from edgekv.power.energy import NoMeter
from edgekv.text import Tokenizer
from edgekv.types import TaskProgress

MODEL, PROSE = "demo", "demo/prose.txt"
SCHEMES = "kivi2,planes"
FACTS = 5  # a pass key and the codes of four things
LEAST_CTX = 1024
WRITTEN = 96  # tokens of prose after the text, on which speed and agreement are measured


@dataclasses.dataclass(frozen=True)
class Trial:
    """What one scheme did with a text.

    first_token_s: the time of reading it. tokens_per_s: of the WRITTEN tokens. agreement: the share of them for
    which its likeliest token is that of the first scheme. answers: what it said to each question, and whether that
    is right.
    """

    kv: str
    cache_bytes: int
    first_token_s: float
    tokens_per_s: float
    agreement: float
    answers: list[tuple[str, bool]]
    mj_per_token: float | None = None

    @property
    def n_found(self) -> int:
        """Questions that it answered."""
        return sum(right for _, right in self.answers)


class Demo:
    """A text of ``ctx`` tokens with room for the questions, and what follows it.

    Raises ContextError where the prose is too short for it.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, text: str, ctx: int, seed: int) -> None:
        tokens = np.asarray(tokenizer.encode(text, bos=False))
        positions = decoder.config.max_positions
        most = min(len(tokens), positions) - WRITTEN
        has = f"the text has {len(tokens)} tokens, the model {positions} positions"
        if most < LEAST_CTX:
            raise ContextError(f"{has}; give {LEAST_CTX + WRITTEN} or more of both")
        if not LEAST_CTX <= ctx <= most:
            accepted = f"{LEAST_CTX} to {most}"
            raise ContextError(
                f"ctx={ctx}: {has}; accepted: {accepted}", field="ctx", value=ctx, accepted=[accepted]
            )
        self.decoder, self.tokenizer, self.capacity = decoder, tokenizer, ctx + WRITTEN
        self.haystack = make_haystack(np.random.default_rng(seed), Prose(tokens[:-WRITTEN], tokenizer), ctx, FACTS)
        self.after = [int(token) for token in tokens[-WRITTEN:]]
        self._exact: list[int] = []  # the first scheme's likeliest token after each of them

    def run(self, spec: CacheSpec, name: str, progress: TaskProgress, meter: EnergyMeter | NoMeter) -> Trial:
        """Read the text, ask for each fact, and go on with the prose; kernels are compiled before any clock."""
        warm_up(self.decoder, spec, self.capacity, progress)
        caches = open_caches(self.decoder, spec, self.capacity)
        begin = time.perf_counter()
        read(self.decoder, self.haystack.ids, caches, lambda i, n: progress(f"{name} reads", i, n))
        first_token_s = time.perf_counter() - begin
        cache_bytes = sum(cache.nbytes for cache in attending(caches))
        answers = []
        for question in self.haystack.questions:
            own = open_copy(caches, self.decoder, spec, self.capacity)
            said = answer(self.decoder, self.tokenizer, question, own)
            answers.append((said, question.is_answered(said)))
        with meter.phase(name, WRITTEN):
            begin = time.perf_counter()
            likeliest = self._write(caches)
            seconds = time.perf_counter() - begin
        self._exact = self._exact or likeliest
        agreement = float(np.mean(np.equal(likeliest, self._exact)))
        return Trial(name, cache_bytes, first_token_s, WRITTEN / seconds, agreement, answers)

    def _write(self, caches: Sequence[LayerState]) -> list[int]:
        """Return the likeliest token after each of `after`, as that is written."""
        with blas_threads(1):
            return [int(to_host(self.decoder.step(token, caches)).argmax()) for token in self.after]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv", default=SCHEMES, metavar="LIST", help="schemes beside f16, comma-separated (default %(default)s)"
    )
    parser.add_argument(
        "--ctx", type=positive_int, default=4096, metavar="N", help="tokens of text (default %(default)s)"
    )
    parser.add_argument(
        "--text", metavar="FILE", help="prose to hide the facts in (default: the demo model's own)"
    )
    parser.add_argument("--seed", type=int, help="which facts, and where (default: others each time)")
    parser.add_argument("--threads", type=positive_int, metavar="N", help="cores to use (default: all)")
    add_device_option(parser)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write what was measured as JSON")


def _execute(arguments: argparse.Namespace) -> int:
    specs = [CacheSpec.parse(DEFAULT), *CacheSpec.parse_list(arguments.kv)]
    text = _prose() if arguments.text is None else read_text(arguments.text, "--text")
    meter = _meter()
    options = Options(threads=arguments.threads, device=arguments.device)
    with Bars() as bars:
        loaded = load_model(options, open_model(MODEL, options), bars.update)
        decoder, tokenizer = loaded.decoders[None], open_tokenizer(loaded.model)
        seed = secrets.randbits(16) if arguments.seed is None else arguments.seed
        demo = Demo(decoder, tokenizer, text, arguments.ctx, seed)
        model = loaded.model, loaded.plan.weights, decoder, tokenizer
        specs = [give_heads_bits(spec, *model, bars.update) for spec in specs]
        print(
            f"{len(demo.haystack.ids):,} tokens of prose; a pass key and four codes are hidden in them.\n"
            "Each KV scheme reads them, is asked for the five numbers, and goes on with the prose.\n"
        )
        with meter:
            names = ["f16", *(spec.short for spec in specs[1:])]
            trials = [demo.run(spec, name, bars.update, meter) for spec, name in zip(specs, names, strict=True)]
    report = meter.report()
    if report:
        trials = [dataclasses.replace(t, mj_per_token=report.phases[t.kv].mj_per_token) for t in trials]
    print("\n".join(_table(demo, trials)))
    kv = trials[1].kv if len(trials) > 1 else DEFAULT
    print(
        "\nnext\n"
        f"  edgekv chat --model Qwen/Qwen3-0.6B --kv {kv}          a model that answers (1.5 GB)\n"
        f"  edgekv budget --shape llama3.1-8b --ctx 32768 --kv auto --memory 8G\n"
        "  edgekv eval --gate --model PATH --text YOUR-TEXT         which scheme is good enough for yours"
    )
    if arguments.json:
        facts = {
            "trials": [dataclasses.asdict(trial) for trial in trials],
            "ctx": arguments.ctx,
            "seed": seed,
            "facts": [question.value for question in demo.haystack.questions],
            "machine": machine_info(),
        }
        write_json(arguments.json, facts)
    return 0


def _prose() -> str:
    path = shipped(PROSE)
    if path is None:
        raise EdgeKVError(f"{PROSE} did not come with this installation; give a text with --text FILE")
    return read_text(str(path), "--text")


def _meter() -> EnergyMeter | NoMeter:
    """Return a meter where something can be measured; the demonstration is none of energy alone."""
    try:
        meter, notes = find_meter("auto")
        return EnergyMeter(PowerSampler(meter, notes=notes), idle_s=0)
    except PowerError:
        return NoMeter()


def _table(demo: Demo, trials: Sequence[Trial]) -> list[str]:
    """Write a row per figure and a column per scheme."""
    questions, largest = demo.haystack.questions, max(trial.cache_bytes for trial in trials)
    rows: list[tuple[str, Callable[[Trial], Any]]] = [
        ("", lambda t: t.kv),
        ("cache of this text", lambda t: format_bytes(t.cache_bytes)),
        ("times smaller", lambda t: f"{largest / t.cache_bytes:.1f}"),
        ("first token", lambda t: f"{t.first_token_s:.2f} s"),
        ("writes", lambda t: f"{t.tokens_per_s:.0f} tokens/s"),
        ("agrees with f16", lambda t: f"{t.agreement:.0%}"),
        *((q.name or "pass key", _answer_of(i, q.value)) for i, q in enumerate(questions)),
        ("found", lambda t: f"{t.n_found} of {len(questions)}"),
    ]
    if any(trial.mj_per_token is not None for trial in trials):
        rows.append(("energy per token", lambda t: f"{t.mj_per_token:.1f} mJ, gross" if t.mj_per_token else "n/a"))
    return fitted([[label, *map(show, trials)] for label, show in rows], left=range(1 + len(trials)))


def _answer_of(i: int, value: str) -> Callable[[Trial], str]:
    def show(trial: Trial) -> str:
        said, right = trial.answers[i]
        return f"{value} found" if right else f"{said[:5].strip()}, not {value}"

    return show


DEMO = Command(
    "see what packed caches keep and save, on the model that ships, in half a minute", _arguments, _execute
)
