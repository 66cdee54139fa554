"""One thread that answers requests one after the other, and the queue before it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from edgekv.chat.conversation import answer_ids
from edgekv.chat.template import ChatTemplate
from edgekv.chat.turns import TurnEncoder
from edgekv.errors import ContextError, EdgeKVError
from edgekv.server.energy import Energy
from edgekv.server.metrics import Metrics
from edgekv.server.pool import SessionPool
from edgekv.server.protocol import Ask, RequestError
from edgekv.server.shapes import Usage
from edgekv.session.finish import FinishReason
from edgekv.session.generation import Step
from edgekv.session.grammar import json_constraint
from edgekv.session.report import RunReport
from edgekv.session.session import Session

LOG = logging.getLogger("edgekv.server")
REMEMBERED_ANSWERS = 512


@dataclasses.dataclass(frozen=True)
class Piece:
    """Text that can be shown."""

    text: str


@dataclasses.dataclass(frozen=True)
class Done:
    """The end of an answer: OpenAI's finish reason."""

    reason: FinishReason
    usage: Usage


class Cancelled(Exception):
    """The client is gone."""


class Job:
    """A request on its way: its events arrive in the event loop that made it; an exception is the last one."""

    def __init__(self, ask: Ask, ids: Sequence[int]) -> None:
        self.ask, self.ids = ask, list(ids)
        self.events: asyncio.Queue[Piece | Done | EdgeKVError] = asyncio.Queue()
        self.cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, event: Piece | Done | EdgeKVError) -> None:
        """Hands an event to the event loop; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def check(self, *progress: object) -> None:
        """Raises Cancelled where the client is gone; a callback of progress."""
        if self.cancelled.is_set():
            raise Cancelled


class Engine:
    """Owns the model. Everything that computes runs in its thread; `submit` may be called from any other.

    queue_limit: requests that may wait; pool_bytes: of all conversations' caches.
    """

    def __init__(
        self,
        session: Session,
        template: ChatTemplate,
        *,
        queue_limit: int,
        pool_bytes: int,
        max_new_tokens: int,
        energy: Energy,
    ) -> None:
        self.session, self.template, self.max_new_tokens = session, template, max_new_tokens
        self.metrics, self.pool = Metrics(), SessionPool(session, pool_bytes)
        self._tokenizer = session.require_tokenizer()
        self._turns = TurnEncoder(template, self._tokenizer)
        self._energy = energy
        self._queue_limit = queue_limit
        self._waiting: deque[Job] = deque()
        self._active: Job | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._answers: OrderedDict[str, list[int]] = OrderedDict()  # text -> its tokens as generated
        self._thread = threading.Thread(target=self._run, name="edgekv-engine", daemon=True)

    @property
    def ctx(self) -> int:
        """Tokens that a conversation can have."""
        return self.session.plan.ctx

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; an answer that is being made stops at its next token."""
        with self._changed:
            self._stopping = True
            for job in (*self._waiting, *([self._active] if self._active else [])):
                job.cancelled.set()
            self._changed.notify()
        self._thread.join()

    def encode(self, ask: Ask) -> list[int]:
        """The prompt's tokens. Raises RequestError where it does not fit."""
        if ask.messages is not None:
            messages = ask.messages
            ids = self._turns.ids(messages, lambda i: self._known(messages[i]))
        elif isinstance(ask.prompt, str):
            ids = self._tokenizer.encode(ask.prompt)
        else:
            ids = list(ask.prompt or ())
        if not ids:
            raise RequestError(400, "the prompt is empty: give at least one token", param="prompt")
        if len(ids) > self.ctx:
            message = f"the prompt has {len(ids)} tokens, this server's context is {self.ctx}: shorten it"
            raise RequestError(400, message, "context_length_exceeded")
        return ids

    def submit(self, job: Job) -> None:
        """Raises RequestError (429) when the queue is full."""
        with self._changed:
            self._waiting = deque(waiting for waiting in self._waiting if not waiting.cancelled.is_set())
            if len(self._waiting) >= self._queue_limit:
                raise RequestError(
                    429, f"{self._queue_limit} requests wait already: try again later", "queue_full"
                )
            self._waiting.append(job)
            self._changed.notify()
        self.metrics.queue_length.set(len(self._waiting))

    def _known(self, message: dict[str, Any]) -> list[int] | None:
        return self._answers.get(message["content"]) if message["role"] == "assistant" else None

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self.metrics.active.set(1)
            end = self._answered(job)
            self._active = None
            self.metrics.active.set(0)
            self.metrics.sessions.set(self.pool.n_sessions)
            self.metrics.cache_bytes.set(self.pool.nbytes)
            if end is not None:
                job.emit(end)

    def _answered(self, job: Job) -> Done | RequestError | None:
        """Makes the answer; returns its last event, None where nobody waits for it."""
        try:
            return self._answer(job)
        except Cancelled:
            return None
        except ContextError as error:
            return RequestError(400, str(error), "context_length_exceeded", error.field)
        except EdgeKVError as error:
            return error if isinstance(error, RequestError) else RequestError(400, str(error), param=error.field)
        except Exception:
            LOG.exception("an answer failed")
            return RequestError(500, "the server failed on this request; its log says why", "internal_error")

    def _next(self) -> Job | None:
        """Waits for a job whose client is still there; None: the end."""
        with self._changed:
            while True:
                while self._waiting:
                    job = self._waiting.popleft()
                    self.metrics.queue_length.set(len(self._waiting))
                    if not job.cancelled.is_set():
                        self._active = job
                        return job
                if self._stopping:
                    return None
                self._changed.wait()

    def _answer(self, job: Job) -> Done:
        session, new = self.pool.acquire(job.ids)
        try:
            return self._generate(job, session, new)
        finally:
            self.pool.release(session)

    def _generate(self, job: Job, session: Session, new: list[int]) -> Done:
        ask, metered = job.ask, None
        made: list[Step] = []
        steps = session.generate(
            new,
            max_new_tokens=min(ask.max_tokens or self.max_new_tokens, self.ctx),
            sampling=ask.sampling,
            stop=(*self.template.stops, *ask.stop) if ask.messages is not None else ask.stop,
            constraint=None
            if ask.schema is None
            else json_constraint(ask.schema, self._tokenizer, session.config.vocab_size),
            progress=job.check,
        )
        try:
            with contextlib.closing(steps):
                for step in steps:
                    metered = metered or self._energy.begin()
                    made.append(step)
                    if step.text:
                        job.emit(Piece(step.text))
                    job.check()
        finally:
            joules, watts = metered.end() if metered else (None, None)
            self._remember(session, made)
            usage = self._count(session.report(), len(job.ids), joules, watts)
        return Done(made[-1].finish_reason or "length", usage)

    def _remember(self, session: Session, made: Sequence[Step]) -> None:
        """An answer's own tokens: the next request brings back its text alone."""
        text, tokens = "".join(step.text for step in made), [step.token for step in made]
        ids = answer_ids(self._tokenizer, tokens, text)
        session.rewind(len(session.tokens) - len(tokens) + len(ids))
        if not ids:
            return
        self._answers[text] = ids
        self._answers.move_to_end(text)
        while len(self._answers) > REMEMBERED_ANSWERS:
            self._answers.popitem(last=False)

    def _count(self, report: RunReport, n_prompt: int, joules: float | None, watts: float | None) -> Usage:
        metrics, n_decoded = self.metrics, len(report.decode_latencies_s)
        n_made = n_decoded + (report.time_to_first_token_s is not None)
        usage = Usage(n_prompt, max(0, n_prompt - report.prefill_tokens) if n_made else 0, n_made)
        metrics.prompt_tokens.inc(usage.prompt)
        metrics.cached_tokens.inc(usage.cached)
        metrics.generated_tokens.inc(usage.completion)
        metrics.prefill_seconds.inc(report.prefill_s or 0)
        metrics.decode_seconds.inc(sum(report.decode_latencies_s))
        metrics.latest("tokens_per_second", "Decoding speed of the latest answer", report.decode_tokens_per_s)
        kind = "estimated_" if self._energy.estimated else ""
        metrics.latest(f"{kind}watts", "Average power of the latest answer's decoding", watts)
        if joules is not None and n_decoded:
            millijoules = 1e3 * joules / n_decoded
            metrics.latest(f"{kind}millijoules_per_token", "Energy per token of the latest answer", millijoules)
        return usage
