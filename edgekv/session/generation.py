"""One text, token by token: choose, print what can be printed, see whether it ends here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgekv.session.grammar import Constraint
from edgekv.session.prompt import Spans
from edgekv.session.report import RunReport
from edgekv.session.sampling import Sampler, StopMatcher
from edgekv.session.state import LayerProgress
from edgekv.tokenizer import StreamDecoder

if TYPE_CHECKING:
    from edgekv.session.session import Session

F32 = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Step:
    """One generated token: its id, the text that can be printed now, and the seconds it took.

    The first step's latency contains the prompt's prefill. ``stop`` says why generation ended here, else None.
    """

    token: int
    text: str
    latency_s: float
    stop: str | None = None


class Generation:
    """What `Session.generate` does, step by step; see there."""

    def __init__(
        self,
        session: Session,
        report: RunReport,
        sampler: Sampler,
        max_new_tokens: int,
        stop: Sequence[str],
        constraint: Constraint | None,
    ) -> None:
        self._session, self._report, self._sampler = session, report, sampler
        self._max_new_tokens, self._constraint = max_new_tokens, constraint
        tokenizer = session.tokenizer
        self._stream = StreamDecoder(tokenizer, at_start=False) if tokenizer else None
        self._eos = tokenizer.eos_ids if tokenizer else ()
        self._matcher = StopMatcher(stop)

    def steps(self, ids: list[int], spans: Spans, progress: LayerProgress | None) -> Iterator[Step]:
        session, report = self._session, self._report
        begin = time.perf_counter()
        logits = self._prefill(ids, spans, progress)
        for produced in range(1, self._max_new_tokens + 1):
            if produced > 1:
                begin = time.perf_counter()
                session.make_room()
                logits = session.read(session.tokens[session.n_past :])
            token, complete = self._choose(logits)
            latency = time.perf_counter() - begin
            if produced == 1:
                report.time_to_first_token_s = latency
            else:
                report.decode_latencies_s.append(latency)
            text, stopped = self._matcher.push(self._text(token))
            reason = self._stop_reason(token, stopped, complete, produced == self._max_new_tokens)
            report.stop_reason = reason
            if reason and not stopped:
                text += self._rest()
            yield Step(token, text, latency, reason)
            if reason:
                return

    def _prefill(self, ids: list[int], spans: Spans, progress: LayerProgress | None) -> F32:
        session, begin = self._session, time.perf_counter()
        n_pending = len(session.tokens) - session.n_past  # the last answer's final token
        logits: F32 = session.append(ids, spans, progress=progress)[0]
        self._report.prefill_tokens = n_pending + len(ids)
        self._report.prefill_s = time.perf_counter() - begin
        return logits

    def _choose(self, logits: F32) -> tuple[int, bool]:
        """The next token, and whether the constraint is complete with it."""
        constraint, tokens = self._constraint, self._session.tokens
        token = self._sampler.sample(constraint.allowed(logits) if constraint else logits, tokens)
        tokens.append(token)
        return token, constraint is not None and constraint.accept(token)

    def _text(self, token: int) -> str:
        return self._stream.push(token) if self._stream and token not in self._eos else ""

    def _rest(self) -> str:
        """What was held back in case a stop string, or a character, went on."""
        text, stopped = self._matcher.push(self._stream.flush()) if self._stream else ("", False)
        return text if stopped else text + self._matcher.flush()

    def _stop_reason(self, token: int, stopped: bool, complete: bool, last: bool) -> str | None:
        if token in self._eos:
            return "end of text"
        if stopped:
            return "stop string"
        if complete:
            return "end of schema"
        if last:
            return "max_new_tokens"
        ctx = self._session.plan.ctx
        if len(self._session.tokens) > ctx and not self._session.overflow.makes_room:
            return f"context full ({ctx} tokens); raise --ctx for more, or set --overflow slide"
        return None
