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


class Generation:
    """What `Session.generate` does, step by step; see there."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        sampler: Sampler,
        max_new_tokens: int,
        stop: Stops,
        constraint: Constraint | None,
        image_token: int | None = None,
    ) -> None:
        self._runner, self._sampler = runner, sampler
        self._max_new_tokens, self._constraint = max_new_tokens, constraint
        self._stream = StreamDecoder(tokenizer, at_start=False) if tokenizer else None
        self._eos = tokenizer.eos_ids if tokenizer else ()
        self._matcher, self._image_token = StopMatcher(stop), image_token

    def steps(
        self, ids: list[int], spans: Spans, report: RunReport, progress: LayerProgress | None
    ) -> StepIterator:
        """The prompt's ids with embeddings in the place of some, and then a step per token; fills the report."""
        try:
            yield from self._steps(ids, spans, report, progress)
        finally:
            self._runner.end_text()

    def _steps(
        self, ids: list[int], spans: Spans, report: RunReport, progress: LayerProgress | None
    ) -> StepIterator:
        begin = time.perf_counter()
        self._runner.state.sampler = self._sampler
        logits = self._prefill(ids, spans, report, progress)
        for produced in range(1, self._max_new_tokens + 1):
            same_pass = self._runner.is_ready
            if produced > 1:
                begin = time.perf_counter()
                logits = self._runner.next_logits()
            token, complete = self._choose(logits)
            latency = time.perf_counter() - begin
            if produced == 1:
                report.time_to_first_token_s = latency
            else:
                report.add_latency(latency, same_pass)
            text, stopped = self._matcher.push(self._decoded(token))
            finish = self._finish(token, stopped, complete, produced == self._max_new_tokens)
            if finish is None:
                yield Step(token, text, latency)
                continue
            report.finish_reason, report.finish_message = finish
            if not stopped:
                text += self._rest()
            yield Step(token, text, latency, *finish)
            return

    def _prefill(self, ids: list[int], spans: Spans, report: RunReport, progress: LayerProgress | None) -> F32:
        begin = time.perf_counter()
        logits: F32 = self._runner.append(ids, spans, progress=progress)[0]
        report.drafts = self._runner.begin_drafts()
        report.prefill_tokens = self._runner.n_read
        report.prefill_s = time.perf_counter() - begin
        return logits

    def _choose(self, logits: F32) -> tuple[int, bool]:
        """The next token, and whether the constraint is complete with it."""
        constraint = self._constraint
        with memory_errors("choosing a token", self._runner.decoder.free_bytes):
            masked = constraint.allowed(to_host(logits)) if constraint else None
            if (n := self._image_token) is not None:  # the next prompt would take it for a place of an image
                masked = (logits if masked is None else masked).copy()
                masked[n : n + 1] = -np.inf
            token = self._sampler.sample(logits, self._runner.state.tokens, masked)
        self._runner.add(token)
        return token, constraint is not None and constraint.accept(token)

    def _decoded(self, token: int) -> str:
        return self._stream.push(token) if self._stream and token not in self._eos else ""

    def _rest(self) -> str:
        """What was held back in case a stop string, or a character, went on."""
        text, stopped = self._matcher.push(self._stream.flush()) if self._stream else ("", False)
        return text if stopped else text + self._matcher.flush()

    def _finish(self, token: int, stopped: bool, complete: bool, last: bool) -> Finish | None:
        if token in self._eos:
            return "stop", "end of text"
        if stopped:
            return "stop", "stop string"
        if complete:
            return "stop", "end of schema"
        if last:
            return "length", "max_new_tokens"
        if self._runner.is_full:
            ctx = self._runner.ctx
            return "length", f"context full ({ctx} tokens); raise `ctx` for more, or set overflow='slide'"
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
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
