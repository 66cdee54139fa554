"""One text, token by token: choose a token, decode it, see whether the text ends."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta

from edgekv.engine.grammar import Constraint
from edgekv.engine.report import FinishReason, RunReport
from edgekv.engine.runner import Runner
from edgekv.engine.sampling import Sampler
from edgekv.engine.state import Spans
from edgekv.kernels.arrays import to_host
from edgekv.machine import memory_errors
from edgekv.text import StreamDecoder, Tokenizer
from edgekv.types import F32, LayerProgress

Stop = Annotated[str, Meta(min_length=1, description="a text that is not empty")]
Stops = Stop | Sequence[Stop]


Finish = tuple[FinishReason, str]
"""Why a text ended, for programs and for people."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One generated token.

    token: its id.
    text: what can be printed now; empty while a character or a stop string may go on.
    latency_s: the seconds that it took, for the first token with the prompt's. Of the tokens of one pass the first
        has the pass's.
    finish_reason: None, or in the last step why the text ended: "stop" (an end-of-text token, a stop string, the
        end of a schema) or "length" (max_new_tokens, or a full context).
    finish_message: the same for people.
    """

    token: int
    text: str
    latency_s: float
    finish_reason: FinishReason | None = None
    finish_message: str | None = None


StepIterator = Generator[Step, None, None]


def generate_steps(
    runner: Runner,
    ids: list[int],
    spans: Spans,
    report: RunReport,
    sampler: Sampler,
    max_new_tokens: int,
    *,
    tokenizer: Tokenizer | None = None,
    stop: Stops = (),
    constraint: Constraint | None = None,
    image_token: int | None = None,
    progress: LayerProgress | None = None,
) -> StepIterator:
    """What `Session.generate` does: reads the prompt's ids and embeddings, then yields a step per token.

    image_token: is never chosen, as the next prompt would take it for a place of an image. Fills the report.
    """
    stream = StreamDecoder(tokenizer, at_start=False) if tokenizer else None
    eos, matcher = tokenizer.eos_ids if tokenizer else (), StopMatcher(stop)
    try:
        runner.state.sampler = sampler
        begin = time.perf_counter()
        logits: F32 = runner.append(ids, spans, progress=progress)[0]
        report.drafts, report.prefill_tokens = runner.begin_drafts(), runner.n_read
        report.prefill_s = time.perf_counter() - begin
        for n in range(1, max_new_tokens + 1):
            same_pass = runner.is_ready
            if n > 1:
                begin = time.perf_counter()
                logits = runner.next_logits()
            token = choose_token(runner, sampler, logits, constraint, image_token)
            complete = constraint is not None and constraint.accept(token)
            latency = time.perf_counter() - begin
            if n == 1:
                report.time_to_first_token_s = latency
            else:
                report.add_latency(latency, same_pass)
            text, stopped = matcher.push(stream.push(token) if stream and token not in eos else "")
            finish = _finish(token in eos, stopped, complete, n == max_new_tokens, runner)
            if finish is None:
                yield Step(token, text, latency)
                continue
            report.finish_reason, report.finish_message = finish
            if stream and not stopped:  # what was held back in case a stop string, or a character, went on
                rest, stopped = matcher.push(stream.flush())
                text += rest if stopped else rest + matcher.flush()
            yield Step(token, text, latency, *finish)
            return
    finally:
        runner.end_text()


def choose_token(
    runner: Runner, sampler: Sampler, logits: F32, constraint: Constraint | None, image_token: int | None
) -> int:
    """The next token by logits (vocab,), which is added to the conversation."""
    with memory_errors("choosing a token", runner.decoder.backend.free_bytes):
        masked = constraint.allowed(to_host(logits)) if constraint else None
        if image_token is not None:
            masked = (logits if masked is None else masked).copy()
            masked[image_token : image_token + 1] = -np.inf
        token = sampler.sample(logits, runner.state.tokens, masked)
    runner.add(token)
    return token


def _finish(is_end: bool, stopped: bool, complete: bool, is_last: bool, runner: Runner) -> Finish | None:
    if is_end:
        return "stop", "end of text"
    if stopped:
        return "stop", "stop string"
    if complete:
        return "stop", "end of schema"
    if is_last:
        return "length", "max_new_tokens"
    if runner.is_full:
        return "length", f"context full ({runner.ctx} tokens); raise `ctx` for more, or set overflow='slide'"
    return None


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, and holds back what could be the start of one.

    The stop string completed first ends the text, wherever the pieces are cut; of two completed by the same
    character, the longer one.
    """

    def __init__(self, stops: Stops) -> None:
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; returns (text safe to print, whether a stop string has been met).

        The stop string itself and all that follows it are never returned.
        """
        if self.stopped:
            return "", True
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]], True
        safe = len(text) - self._possible_start(text)
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """The text still held back, once no more will come."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        starts = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops))
        return next(starts, 0)
