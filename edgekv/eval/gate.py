"""The gate: judges whether a KV scheme may be used with a model, by its loss on a user's text and by needles.

Needles are facts hidden in the text; a scheme must find those that the dense cache finds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.checkpoint.adapter import Adapter
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import DEFAULT_CTX, open_caches
from edgekv.engine.verdicts import needs_gate
from edgekv.errors import ContextError
from edgekv.eval.evaluate import Quality, copy_cache, evaluate
from edgekv.kernels.arrays import to_host
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import LayerState
from edgekv.kvcache.choice import EXACT
from edgekv.kvcache.registry import PRESETS
from edgekv.machine import blas_threads
from edgekv.text import Tokenizer
from edgekv.types import F32, I64, LayerProgress, TaskProgress

Ids = npt.NDArray[Any]
Rng = np.random.Generator

COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")
THINGS = ("door", "gate", "house", "chest", "room", "box", "book", "boat")
NEEDLES = 20
PER_HAYSTACK = 10  # needles in one window
SPACING = 100  # tokens of the window for each needle
KNOWN_SHARE = 0.5  # of the needles that the dense cache must find for the test to say something
SPARSE = 100  # mean tokens between two sentences, above which facts are put between words


@dataclasses.dataclass(frozen=True)
class Fact:
    """A needle: digits to remember, and the name of the thing they belong to (None: the pass key)."""

    value: str
    name: str | None = None

    @property
    def statement(self) -> str:
        """The sentence that is hidden in the text."""
        if self.name is None:
            return f"The pass key is {self.value}. Remember it."
        return f"The code of the {self.name} is {self.value}."

    @property
    def question(self) -> str:
        """The question for the digits, and the beginning of its answer."""
        if self.name is None:
            return "What is the pass key? The pass key is"
        return f"What is the code of the {self.name}? The code of the {self.name} is"


def draw_value(rng: Rng) -> str:
    """Draws five digits."""
    return str(rng.integers(10_000, 100_000))


def draw_names(rng: Rng, n: int) -> list[str]:
    """Draws n different names of coloured things, at most 64."""
    return [f"{COLOURS[i % 8]} {THINGS[i // 8]}" for i in rng.choice(64, size=n, replace=False)]


class Prose:
    """A tokenised text to hide facts in: between its sentences; where it has few, between words; else anywhere.

    tokens: (n_tokens,) ids of ``tokenizer``, without those that it puts at the start of a text.
    """

    def __init__(self, tokens: Ids, tokenizer: Tokenizer) -> None:
        self.tokens, self.tokenizer = tokens, tokenizer
        self.start = tokenizer.encode("")  # BOS, where the model has one
        self.breaks = _breaks(tokens, tokenizer)

    def continuing(self, text: str) -> list[int]:
        """Encodes text that follows other text: without BOS, and without a space that is not in it."""
        if not self.tokenizer.drops_first_space:
            return self.tokenizer.encode(text, bos=False)
        ids = self.tokenizer.encode("\n" + text, bos=False)
        n, n_bytes = 0, 0
        while n_bytes < len(b" \n"):
            n_bytes += len(self.tokenizer.token_bytes(ids[n]))
            n += 1
        return ids[n:]

    def stretch(self, rng: Rng, n_tokens: int) -> tuple[Ids, I64]:
        """Draws ids (n_tokens,) from anywhere or a sentence's start; returns them and where sentences begin."""
        n_starts = len(self.tokens) - n_tokens + 1
        if n_starts < 1:
            raise ValueError(f"the text has {len(self.tokens)} tokens, too few for a row of {n_tokens}")
        start = int(rng.integers(n_starts))
        if rng.random() < 0.5:
            start = int(self.breaks[max(0, np.searchsorted(self.breaks, start, side="right") - 1)])
            start = min(start, n_starts - 1)
        first, last = np.searchsorted(self.breaks, [start, start + n_tokens])
        return self.tokens[start : start + n_tokens], self.breaks[first:last] - start

    def weave(self, rng: Rng, pieces: Sequence[tuple[float, Sequence[int]]], length: int) -> tuple[Ids, I64]:
        """Puts pieces of ids into prose after BOS, each before the sentence that follows its place (0 to 1).

        Returns ids (length,), and for each the index (length,) of its piece; -1 is the prose.
        """
        room = length - len(self.start) - sum(len(ids) for _, ids in pieces)
        text, breaks = self.stretch(rng, room)
        cuts = np.append(breaks, room)
        row, owners = [np.array(self.start, self.tokens.dtype)], [np.full(len(self.start), -1)]
        done = 0
        for i in sorted(range(len(pieces)), key=lambda i: pieces[i][0]):
            depth, ids = pieces[i]
            cut = int(cuts[np.searchsorted(cuts, min(depth, 1.0) * room)])
            row += [text[done:cut], np.array(ids, self.tokens.dtype)]
            owners += [np.full(cut - done, -1), np.full(len(ids), i)]
            done = cut
        row.append(text[done:])
        owners.append(np.full(room - done, -1))
        return np.concatenate(row), np.concatenate(owners)


def _breaks(tokens: Ids, tokenizer: Tokenizer) -> I64:
    """Returns the indices before which a fact may stand: where sentences begin, else where words do, else all."""
    used = np.unique(tokens)
    ends, words = np.zeros((2, int(used.max(initial=0)) + 1), bool)
    for token in used.tolist():
        piece = tokenizer.token_bytes(token)
        ends[token] = piece.rstrip(b"\"'").endswith((b".", b"?", b"!"))
        words[token] = piece.startswith((b" ", b"\n"))
    sentence = ends[tokens[:-1]] & words[tokens[1:]]
    for found in (sentence, words[tokens[1:]]):
        if found.sum() * SPARSE >= len(tokens):
            return np.flatnonzero(found) + 1
    return np.arange(1, max(len(tokens), 2))


@dataclasses.dataclass(frozen=True)
class Question:
    """The ids of a question for a fact, and the number of tokens of its digits."""

    fact: Fact
    ids: list[int]
    n_answer: int

    def is_answered(self, text: str) -> bool:
        """Returns whether a text begins with the answer."""
        return text.startswith(self.fact.value)


@dataclasses.dataclass(frozen=True)
class Haystack:
    """The ids of a text with several facts in it, and a question for each."""

    ids: list[int]
    questions: tuple[Question, ...]


def make_haystack(rng: Rng, prose: Prose, ctx: int, n: int) -> Haystack:
    """Hides a pass key and the codes of ``n - 1`` different things, evenly and in random order.

    The text leaves room for the longest question and its answer in ``ctx`` tokens.
    """
    pieces, questions = [], []
    depths = ((rng.permutation(n) + 0.5) / n).tolist()
    facts = [Fact(draw_value(rng), name) for name in (None, *draw_names(rng, n - 1))]
    for depth, fact in zip(depths, facts, strict=True):
        asked, digits = prose.continuing("\n\n" + fact.question), prose.continuing(" " + fact.value)
        questions.append(Question(fact, asked, len(digits)))
        pieces.append((depth, prose.continuing(" " + fact.statement)))
    room = max(len(question.ids) + question.n_answer for question in questions)
    return Haystack(prose.weave(rng, pieces, ctx - room)[0].tolist(), tuple(questions))


@dataclasses.dataclass(frozen=True)
class NeedleReader:
    """Reads texts into caches of ``ctx`` tokens, and asks for what was hidden in them."""

    decoder: Decoder
    tokenizer: Tokenizer
    ctx: int
    adapter: Adapter | None = None

    def open(self, spec: CacheSpec) -> list[LayerState]:
        """Returns empty caches of a scheme."""
        return open_caches(self.decoder, spec, self.ctx, self.adapter)

    def read(self, ids: Sequence[int], caches: Sequence[LayerState], progress: LayerProgress | None = None) -> F32:
        """Appends ids to the caches; returns the logits (vocab,) after them."""
        with blas_threads(self.decoder.threads):
            hidden = self.decoder.prefill(self.decoder.embed(ids, caches[0].n_seen), caches, progress)
            logits: F32 = to_host(self.decoder.head(hidden[-1:]))[0]
            return logits

    def ask(self, haystack: Haystack, caches: Sequence[LayerState], spec: CacheSpec) -> list[str]:
        """Returns the likeliest text after each question, as long as its answer; ``caches`` are not changed."""
        texts = []
        for question in haystack.questions:
            copies = self.open(spec)
            for source, target in zip(caches, copies, strict=True):
                copy_cache(source, target)
            tokens = [int(self.read(question.ids, copies).argmax())]
            with blas_threads(1):
                while len(tokens) < question.n_answer:
                    tokens.append(int(to_host(self.decoder.step(tokens[-1], copies)).argmax()))
            text = b"".join(map(self.tokenizer.token_bytes, tokens))
            texts.append(text.decode("utf-8", errors="replace").lstrip())
        return texts

    def answers(self, haystack: Haystack, spec: CacheSpec) -> list[bool]:
        """Reads a haystack as a prompt; returns whether greedy decoding answers each of its questions.

        The text is compressed before any question is read, and no question sees another.
        """
        if not haystack.questions:
            return []
        caches = self.open(spec)
        self.read(haystack.ids, caches)
        texts = self.ask(haystack, caches, spec)
        return [question.is_answered(text) for question, text in zip(haystack.questions, texts, strict=True)]


class NeedleTest:
    """The needles of a text that the dense cache finds, ``n_known`` of ``n_hidden``, as ``haystacks``.

    n: needles to hide, at most `PER_HAYSTACK` in a window of the reader's ctx, and fewer in a short one.
    """

    def __init__(self, reader: NeedleReader, prose: Prose, n: int, progress: TaskProgress | None = None) -> None:
        self.reader, self.haystacks = reader, list[Haystack]()
        per_haystack = min(PER_HAYSTACK, reader.ctx // SPACING)
        sizes = [min(per_haystack, n - a) for a in range(0, n, per_haystack)] if per_haystack else []
        rng = np.random.default_rng([0, reader.ctx])
        self.n_hidden = sum(sizes)
        for haystack in [make_haystack(rng, prose, reader.ctx, size) for size in sizes]:
            right = reader.answers(haystack, CacheSpec.parse(EXACT))
            asked = tuple(question for question, ok in zip(haystack.questions, right, strict=True) if ok)
            self.haystacks.append(Haystack(haystack.ids, asked))
            if progress:
                progress("needles, dense", len(self.haystacks), len(sizes))
        self.n_known = sum(len(haystack.questions) for haystack in self.haystacks)
        # Whether the dense cache finds enough of them to say something about other schemes.
        self.applies = self.n_known > 0 and self.n_known >= KNOWN_SHARE * self.n_hidden

    @property
    def note(self) -> str:
        """A line on the needles that the dense cache finds, or on why the test does not apply."""
        if not self.n_hidden:
            return f"not applicable: none were hidden in windows of {self.reader.ctx} tokens"
        found = f"the dense cache finds {self.n_known} of {self.n_hidden}"
        return f"{found}; schemes are asked for those" if self.applies else f"not applicable: {found}"

    def score(self, spec: CacheSpec, progress: TaskProgress | None = None) -> int:
        """Returns how many of the known needles the scheme finds."""
        n = 0
        for i, haystack in enumerate(self.haystacks, 1):
            n += sum(self.reader.answers(haystack, spec))
            if progress:
                progress(f"needles, {spec.scheme.name}", i, len(self.haystacks))
        return n


# Verdicts

MIN_TOKENS = 512  # most schemes keep the latest 128 tokens exact: a shorter text says nothing


@dataclasses.dataclass(frozen=True)
class GateLimits:
    """The limits of a scheme's loss against dense; docs/gate.md has the reasons for the defaults.

    max_kl: nats, over all positions and over the later half of each window. min_top1: share of positions,
    likewise. min_needles: share of the needles that the dense cache finds.
    """

    max_kl: float = 0.05
    min_top1: float = 0.9
    min_needles: float = 0.9


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on a scheme: its quality, and a phrase for each limit that it missed.

    needles: how many were found, and of how many; None where the test does not apply.
    """

    quality: Quality
    needles: tuple[int, int] | None
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the scheme missed no limit."""
        return not self.failures

    @property
    def kv(self) -> str:
        """The scheme with its options."""
        return self.quality.kv


DEFAULT_SCHEMES = tuple(name for name in PRESETS if needs_gate(CacheSpec.parse(name)))


def gate_ctx(n_tokens: int, max_positions: int) -> int:
    """Returns the window for a text: 8192 tokens, or the model's positions, or the whole text, whichever is least.

    Raises ContextError for a text that is too short.
    """
    if n_tokens < min(MIN_TOKENS, max_positions):
        raise ContextError(
            f"the text has {n_tokens} tokens, too few to gate a scheme on; give {MIN_TOKENS} or more, best as "
            "many as your contexts will have"
        )
    return min(DEFAULT_CTX, max_positions, n_tokens)


def judge(quality: Quality, needles: tuple[int, int] | None, limits: GateLimits) -> Verdict:
    """Judges a scheme by all limits."""
    kl, top1 = max(quality.kl, quality.kl_second_half), min(quality.top1, quality.top1_second_half)
    failures = []
    if not kl <= limits.max_kl:  # so that nan fails
        failures.append(f"KL {kl:.4f}, more than {limits.max_kl:g}")
    if not top1 >= limits.min_top1:
        failures.append(f"top-1 {top1:.3f}, less than {limits.min_top1:g}")
    if needles is not None and needles[0] < limits.min_needles * needles[1]:
        failures.append(f"needles {needles[0]} of {needles[1]}, less than {limits.min_needles:.0%}")
    return Verdict(quality, needles, tuple(failures))


def recommended(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Returns the verdict on the smallest cache that passed, or None."""
    return min((v for v in verdicts if v.passed), key=lambda v: v.quality.cache_bytes, default=None)


def gate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    specs: Sequence[CacheSpec],
    ctx: int,
    *,
    windows: int = 1,
    limits: GateLimits | None = None,
    n_needles: int = NEEDLES,
    adapter: Adapter | None = None,
    progress: TaskProgress | None = None,
) -> tuple[list[Verdict], NeedleTest]:
    """Judges schemes by the first ``windows`` of a tokenised text, and by needles hidden anywhere in it.

    Returns a verdict per scheme, and the needle test. Raises ContextError where the text does not fill a window.
    """
    qualities = evaluate(decoder, tokens[: ctx * windows], ctx, specs, adapter=adapter, progress=progress)
    text = np.asarray(tokens[len(tokenizer.encode("")) :])
    reader = NeedleReader(decoder, tokenizer, ctx, adapter)
    needle_test = NeedleTest(reader, Prose(text, tokenizer), n_needles, progress)
    verdicts = []
    for spec, quality in zip(specs, qualities, strict=True):
        needles = None
        if needle_test.applies:
            needles = needle_test.score(spec, progress), needle_test.n_known
        verdicts.append(judge(quality, needles, limits or GateLimits()))
    return verdicts, needle_test
