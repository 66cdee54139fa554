"""The demonstration: a long text with facts hidden in it, read, asked and continued by scheme after scheme."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from edgekv.decoder.decoder import Decoder
from edgekv.errors import ContextError
from edgekv.kernels.memory import to_host
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.layer_state import LayerState
from edgekv.kvcache.recurrent import attending
from edgekv.machine import blas_threads
from edgekv.power.phases import EnergyMeter, NoMeter
from edgekv.quality.needles import Haystack, Prose, make_haystack
from edgekv.quality.retrieval import answer, copy_caches, is_right, read
from edgekv.session.caches import open_caches
from edgekv.session.opening import warm_up
from edgekv.tokenizer import Tokenizer
from edgekv.types import TaskProgress

FACTS = 5  # a pass key and the codes of four things
LEAST_CTX = 1024
WRITTEN = 96  # tokens of prose after the text, on which speed and agreement are measured


@dataclasses.dataclass
class Trial:
    """What one scheme did; None: not yet.

    doing: what it is at, for people. cache_bytes: once the text is read. first_token_s: the time of reading it.
    tokens_per_s: of the WRITTEN tokens. agreement: the share of them for which its likeliest token is that of the
    first scheme. answers: what it said to each question, and whether that is right.
    """

    kv: str
    doing: str = "waits"
    cache_bytes: int | None = None
    first_token_s: float | None = None
    tokens_per_s: float | None = None
    agreement: float | None = None
    answers: list[tuple[str, bool]] = dataclasses.field(default_factory=list)
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
        if most < LEAST_CTX:
            raise ContextError(
                f"the text has {len(tokens)} tokens, the model {positions} positions; give {LEAST_CTX + WRITTEN} "
                "or more of both"
            )
        if not LEAST_CTX <= ctx <= most:
            raise ContextError(
                f"ctx={ctx}: the text has {len(tokens)} tokens, the model {positions} positions; "
                f"accepted: {LEAST_CTX} to {most}",
                field="ctx",
                value=ctx,
                accepted=[f"{LEAST_CTX} to {most}"],
            )
        self.decoder, self.tokenizer, self.ctx = decoder, tokenizer, ctx
        self.capacity = ctx + WRITTEN
        rest = tokens[:-WRITTEN]
        self.haystack: Haystack = make_haystack(np.random.default_rng(seed), Prose(rest, tokenizer), ctx, FACTS)
        self.after = [int(token) for token in tokens[-WRITTEN:]]
        self._exact: list[int] = []  # the first scheme's likeliest token after each of them

    def warm_up(self, spec: CacheSpec, progress: TaskProgress | None = None) -> None:
        """Compiles what the scheme needs, so that no time has it in it."""
        warm_up(self.decoder, spec, self.capacity, progress)

    def run(self, spec: CacheSpec, trial: Trial, update: Callable[[], None], meter: EnergyMeter | NoMeter) -> None:
        """Fills the trial, step by step; ``update`` is called when it has changed."""

        def doing(what: str) -> None:
            trial.doing = what
            update()

        doing("reads")
        caches = open_caches(self.decoder, spec, self.capacity)
        begin = time.perf_counter()
        read(self.decoder, self.haystack.ids, caches, lambda i, n: doing(f"reads {100 * i // n}%"))
        trial.first_token_s = time.perf_counter() - begin
        trial.cache_bytes = sum(cache.nbytes for cache in attending(caches))
        doing("answers")
        for question in self.haystack.questions:
            said = answer(self.decoder, self.tokenizer, question, self._copy(spec, caches))
            trial.answers.append((said, is_right(question, said)))
            update()
        with meter.phase(trial.kv, WRITTEN):
            likeliest = self._write(caches, trial, doing)
        self._exact = self._exact or likeliest
        trial.agreement = float(np.mean(np.equal(likeliest, self._exact)))
        doing("done")

    def _write(self, caches: Sequence[LayerState], trial: Trial, doing: Callable[[str], None]) -> list[int]:
        """The likeliest token after each of `after`, as that is written."""
        likeliest, seconds = [], []
        with blas_threads(1):
            for n, token in enumerate(self.after, 1):
                begin = time.perf_counter()
                likeliest.append(int(to_host(self.decoder.step(token, caches)).argmax()))
                seconds.append(time.perf_counter() - begin)
                trial.tokens_per_s = n / sum(seconds)
                if n % 8 == 0:
                    doing(f"writes {n}")
        return likeliest

    def _copy(self, spec: CacheSpec, caches: Sequence[LayerState]) -> list[LayerState]:
        own = open_caches(self.decoder, spec, self.capacity)
        copy_caches(caches, own)
        return own
