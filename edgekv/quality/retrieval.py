"""Needles in a user's text, asked of a cache: those that the dense cache finds, for the other schemes to find."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from edgekv.checkpoint.adapter import Adapter
from edgekv.decoder.decoder import Decoder
from edgekv.kernels.memory import to_host
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import DEFAULT
from edgekv.kvcache.layer_state import LayerState
from edgekv.machine import blas_threads
from edgekv.quality.needles import Haystack, Prose, Question, make_haystack
from edgekv.session.caches import open_caches
from edgekv.session.file import copy_used
from edgekv.tokenizer import Tokenizer
from edgekv.types import F32, TaskProgress

NEEDLES = 20
PER_HAYSTACK = 10  # needles in one window
SPACING = 100  # tokens of the window for each
KNOWN_SHARE = 0.5  # of the needles that the dense cache must find, or the model can't be tested so


@dataclasses.dataclass(frozen=True)
class NeedleTest:
    """``haystacks`` with the questions that the dense cache answers, of ``n_hidden`` that it was asked."""

    ctx: int
    haystacks: tuple[Haystack, ...]
    n_hidden: int

    @classmethod
    def make(
        cls,
        decoder: Decoder,
        tokenizer: Tokenizer,
        prose: Prose,
        ctx: int,
        *,
        n: int = NEEDLES,
        seed: int = 0,
        progress: TaskProgress | None = None,
    ) -> NeedleTest:
        """``n`` needles, at most `PER_HAYSTACK` in a window of ``ctx`` tokens, and fewer in a short one."""
        per_haystack = min(PER_HAYSTACK, ctx // SPACING)
        sizes = [min(per_haystack, n - a) for a in range(0, n, per_haystack)] if per_haystack else []
        rng = np.random.default_rng([seed, ctx])
        haystacks = tuple(make_haystack(rng, prose, ctx, size) for size in sizes)
        dense, known = CacheSpec.parse(DEFAULT), []
        for i, haystack in enumerate(haystacks):
            right = answers(decoder, tokenizer, dense, haystack, ctx)
            asked = tuple(question for question, ok in zip(haystack.questions, right, strict=True) if ok)
            known.append(dataclasses.replace(haystack, questions=asked))
            if progress:
                progress("needles, dense", i + 1, len(haystacks))
        return cls(ctx, tuple(known), sum(sizes))

    @property
    def n_known(self) -> int:
        """Questions that the dense cache answers."""
        return sum(len(haystack.questions) for haystack in self.haystacks)

    @property
    def applies(self) -> bool:
        """Whether the dense cache finds enough of them to say something about other schemes."""
        return self.n_known > 0 and self.n_known >= KNOWN_SHARE * self.n_hidden

    @property
    def note(self) -> str:
        """In words: how many needles the dense cache finds, or why the test says nothing."""
        if not self.n_hidden:
            return f"not applicable: none were hidden in windows of {self.ctx} tokens"
        found = f"the dense cache finds {self.n_known} of {self.n_hidden}"
        return f"{found}; schemes are asked for those" if self.applies else f"not applicable: {found}"

    def score(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        spec: CacheSpec,
        *,
        adapter: Adapter | None = None,
        progress: TaskProgress | None = None,
    ) -> int:
        """How many of the known needles the scheme finds."""
        n = 0
        for i, haystack in enumerate(self.haystacks):
            n += sum(answers(decoder, tokenizer, spec, haystack, self.ctx, adapter))
            if progress:
                progress(f"needles, {spec.scheme.name}", i + 1, len(self.haystacks))
        return n


def answers(
    decoder: Decoder,
    tokenizer: Tokenizer,
    spec: CacheSpec,
    haystack: Haystack,
    ctx: int,
    adapter: Adapter | None = None,
) -> list[bool]:
    """Whether greedy decoding answers each question, asked of the cache as the whole text left it.

    The text is read as a prompt is, and compressed before any question is known; no question sees another.
    """
    if not haystack.questions:
        return []
    caches = open_caches(decoder, spec, ctx, adapter)
    read(decoder, haystack.ids, caches)
    right = []
    for question in haystack.questions:
        own = open_caches(decoder, spec, ctx, adapter)
        copy_caches(caches, own)
        right.append(is_right(question, answer(decoder, tokenizer, question, own)))
    return right


def answer(decoder: Decoder, tokenizer: Tokenizer, question: Question, caches: Sequence[LayerState]) -> str:
    """The likeliest text after a question, as long as the answer; both enter the caches."""
    tokens = [int(read(decoder, question.ids, caches).argmax())]
    with blas_threads(1):
        while len(tokens) < question.n_answer:
            tokens.append(int(to_host(decoder.step(tokens[-1], caches)).argmax()))
    return b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", errors="replace").lstrip()


def is_right(question: Question, said: str) -> bool:
    """Whether an answer is that of the question."""
    return said.startswith(question.value)


def read(
    decoder: Decoder,
    ids: Sequence[int],
    caches: Sequence[LayerState],
    progress: Callable[[int, int], None] | None = None,
) -> F32:
    """(vocab,) logits after the ids, which enter the caches. progress(layer, n_layers)."""
    with blas_threads(decoder.threads):
        hidden = decoder.prefill(decoder.embed(ids, caches[0].n_seen), caches, progress)
        logits: F32 = to_host(decoder.head(hidden[-1:]))[0]
        return logits


def copy_caches(sources: Sequence[LayerState], targets: Sequence[LayerState]) -> None:
    """Makes empty caches of the same scheme and size equal to others."""
    for source, target in zip(sources, targets, strict=True):
        state = source.state()
        for name, array in target.prepare(state.counters, copy.deepcopy(state.fitted)).items():
            copy_used(state.arrays[name], array)
