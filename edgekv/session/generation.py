"""One text, token by token: choose a token, decode it, see whether the text ends."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator

import numpy as np

from edgekv.kernels.memory import to_host
from edgekv.machine import memory_errors
from edgekv.session.finish import (
    END_OF_SCHEMA,
    END_OF_TEXT,
    MAX_NEW_TOKENS,
    STOP_STRING,
    Finish,
    FinishReason,
    context_full,
)
from edgekv.session.grammar import Constraint
from edgekv.session.model_runner import ModelRunner
from edgekv.session.prompt import Spans
from edgekv.session.report import RunReport
from edgekv.session.sampling import Sampler, StopMatcher, Stops
from edgekv.tokenizer import StreamDecoder, Tokenizer
from edgekv.types import F32, LayerProgress


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
        runner: ModelRunner,
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
            report.finish_reason, report.finish_message = finish.reason, finish.message
            if not stopped:
                text += self._rest()
            yield Step(token, text, latency, finish.reason, finish.message)
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
        with memory_errors("choosing a token", self._runner.free_bytes):
            masked = constraint.allowed(to_host(logits)) if constraint else None
            if (n := self._image_token) is not None:  # the next prompt would take it for a place of an image
                masked = (logits if masked is None else masked).copy()
                masked[n : n + 1] = -np.inf
            token = self._sampler.sample(logits, self._runner.tokens, masked)
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
            return END_OF_TEXT
        if stopped:
            return STOP_STRING
        if complete:
            return END_OF_SCHEMA
        if last:
            return MAX_NEW_TOKENS
        if self._runner.is_full:
            return context_full(self._runner.ctx)
        return None
