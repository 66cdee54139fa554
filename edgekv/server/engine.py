"""The threads that answer requests, one for each slot, and the queue before them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from edgekv.chat.template import ChatTemplate
from edgekv.errors import EdgeKVError
from edgekv.server.energy import ServerEnergy
from edgekv.server.jobs import AnswerEnd, Cancelled, EmbeddingJob, EmbeddingVector, Job
from edgekv.server.metrics import Metrics
from edgekv.server.pool import SessionPool
from edgekv.server.protocol import FAILED, RequestError, request_error
from edgekv.server.request_encoder import RequestEncoder
from edgekv.server.responder import Responder
from edgekv.session.session import Session

LOG = logging.getLogger("edgekv.server")


class Engine:
    """Owns the model. Everything that computes runs in its threads; `submit` may be called from any other.

    slots: answers that are made at once, of a session that was loaded for so many. queue_limit: requests that may
    wait; pool_bytes: of all conversations' caches; max_new_tokens: of an answer whose request sets no limit.
    """

    def __init__(
        self,
        session: Session,
        template: ChatTemplate,
        *,
        queue_limit: int,
        pool_bytes: int,
        max_new_tokens: int,
        energy: ServerEnergy,
        slots: int = 1,
    ) -> None:
        self.session, self.max_new_tokens = session, max_new_tokens
        self.slots, self.metrics, self.pool = slots, Metrics(), SessionPool(session, pool_bytes, slots)
        self.prompts = RequestEncoder(
            template, session.require_tokenizer(), session.plan.ctx, session.config.vocab_size
        )
        self._answering = Responder(self.pool, self.prompts, self.metrics, energy, max_new_tokens)
        self._queue_limit = queue_limit
        self._new: deque[deque[Job | EmbeddingJob]] = deque()  # requests of which no answer has begun
        self._begun: deque[deque[Job | EmbeddingJob]] = deque()  # the further answers of others
        self._took_new = False
        self._active: list[Job | EmbeddingJob] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"edgekv-slot-{i}", daemon=True) for i in range(slots)
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends all answers with an error; the threads stop at their next token or layer: see `join`."""
        with self._changed:
            self._stopping = True
            for job in (*self._active, *(job for jobs in (*self._new, *self._begun) for job in jobs)):
                job.channel.emit(_stopped())
                job.channel.cancelled.set()
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Waits for the threads of an engine that was stopped, but no longer than that."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def submit(self, jobs: Sequence[Job | EmbeddingJob]) -> None:
        """All answers of one request. Raises RequestError: 429 when the queue is full, 503 behind `stop`."""
        with self._changed:
            if self._stopping:
                raise _stopped()
            self._forget_gone()
            if len(self._new) >= self._queue_limit:
                raise RequestError(
                    429, f"{self._queue_limit} requests wait already: try again later", "queue_full"
                )
            self._new.append(deque(jobs))
            self._changed.notify_all()
            self.metrics.queue_length.set(len(self._new) + len(self._begun))

    def _forget_gone(self) -> None:
        """Drops the requests whose clients are gone."""
        for queue in (self._new, self._begun):
            here = [jobs for jobs in queue if not jobs[0].channel.cancelled.is_set()]
            queue.clear()
            queue.extend(here)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            end = self._ended(job)
            with self._changed:
                self._active.remove(job)
                self.metrics.active.set(len(self._active))
            self.metrics.sessions.set(self.pool.n_sessions)
            self.metrics.cache_bytes.set(self.pool.nbytes)
            if end is not None:
                job.channel.emit(end)
            if isinstance(end, EdgeKVError):
                job.channel.cancelled.set()  # the request's other answers

    def _ended(self, job: Job | EmbeddingJob) -> AnswerEnd | EmbeddingVector | RequestError | None:
        """Makes the answer; returns its last event, None where nobody waits for it."""
        try:
            return self._answering.embed(job) if isinstance(job, EmbeddingJob) else self._answering.answer(job)
        except Cancelled:
            return None
        except EdgeKVError as error:
            told = request_error(error, job.fields)
            if told.status >= 500:
                LOG.warning("an answer failed: %s", error)
            return told
        except Exception:
            LOG.exception("an answer failed")
            return RequestError(500, FAILED, "internal_error")

    def _next(self) -> Job | EmbeddingJob | None:
        """Waits for a job whose client is still there; None: the end."""
        with self._changed:
            while True:
                self._forget_gone()
                if self._new or self._begun:
                    job = self._taken()
                    self._active.append(job)
                    self.metrics.queue_length.set(len(self._new) + len(self._begun))
                    self.metrics.active.set(len(self._active))
                    return job
                if self._stopping:
                    return None
                self._changed.wait()

    def _taken(self) -> Job | EmbeddingJob:
        """The next one: the first of a request, and a further one of those that have begun, in turn."""
        queue = self._begun if self._begun and (self._took_new or not self._new) else self._new
        self._took_new = queue is self._new
        jobs = queue.popleft()
        job = jobs.popleft()
        if jobs:
            self._begun.append(jobs)
        return job


def _stopped() -> RequestError:
    return RequestError(503, "the server is shutting down: ask again once it is back", "shutting_down")
