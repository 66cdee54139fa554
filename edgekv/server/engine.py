"""The threads that answer requests, one for each slot, the queue before them, and the events that they send."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from edgekv.engine.chat import answer_ids
from edgekv.engine.generation import Step
from edgekv.engine.grammar import Constraint, Grammar, JsonSchema
from edgekv.engine.model import sampling_defaults
from edgekv.engine.report import FinishReason
from edgekv.engine.sampling import Sampler, TokenLogprob, token_logprob
from edgekv.engine.session import Session
from edgekv.errors import ConfigError, EdgeKVError, PowerError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import LayerState
from edgekv.kvcache.choice import DEFAULT
from edgekv.kvcache.recurrent import attending
from edgekv.power.energy import PowerSource
from edgekv.power.sampler import PowerSampler
from edgekv.server.pool import SessionPool
from edgekv.server.prompts import EncodedPrompt, Images, RequestEncoder, tools_grammar
from edgekv.server.requests import (
    FAILED,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RequestError,
    request_error,
)
from edgekv.text.template import ChatTemplate
from edgekv.vision.prompt import Prompt

LOG = logging.getLogger("edgekv.server")
LOGITS_AT_ONCE = 64  # tokens of an echoed prompt whose logits are in memory
INTERVAL_S = 0.25  # between two counts of the cache's bytes, and between two events of progress


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of one answer: ``cached`` of the prompt's were not computed, ``reasoning`` are in the completion."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def __add__(self, other: Usage) -> Usage:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Usage(*(a + b for a, b in pairs))

    def as_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclasses.dataclass(frozen=True)
class Piece:
    """Text that can be shown, of the answer ``index``, made of ``n_tokens`` of its own.

    logprobs: of its tokens, if asked for; None for the first of an echoed prompt, which follows nothing.
    """

    index: int
    text: str
    logprobs: Sequence[TokenLogprob | None] = ()
    timings: dict[str, Any] | None = None
    n_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class PromptProgress:
    """How far the prompt of the answer ``index`` is read."""

    index: int
    values: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class AnswerEnd:
    """The end of the answer ``index``: OpenAI's finish reason."""

    index: int
    reason: FinishReason
    usage: Usage
    timings: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class EmbeddingVector:
    """The text ``index`` as a vector."""

    index: int
    values: Sequence[float]
    n_tokens: int


Event = Piece | PromptProgress | AnswerEnd | EmbeddingVector | EdgeKVError


class Cancelled(Exception):
    """The client is gone."""


class Channel:
    """The way back to the client of one request: its events arrive in the event loop that made it."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, event: Event) -> None:
        """Hands an event to the event loop; from any thread. An exception is the last one."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def check(self) -> None:
        """Raises Cancelled where the client is gone."""
        if self.cancelled.is_set():
            raise Cancelled


@dataclasses.dataclass(frozen=True)
class Job:
    """One answer of a request: the ``choice``-th to its prompt, the ``index``-th of all.

    lora: the name of the one beside the weights; None: without.
    """

    channel: Channel
    request: ChatRequest | CompletionRequest
    prompt: EncodedPrompt
    index: int = 0
    choice: int = 0
    lora: str | None = None


@dataclasses.dataclass(frozen=True)
class EmbeddingJob:
    """The ``index``-th text of a request for vectors. lora: as a `Job`'s."""

    channel: Channel
    ids: list[int]
    index: int = 0
    lora: str | None = None


def jobs_of(
    channel: Channel,
    request: ChatRequest | CompletionRequest,
    prompts: Sequence[EncodedPrompt],
    lora: str | None = None,
) -> list[Job]:
    """n answers to each prompt, in OpenAI's order."""
    return [
        Job(channel, request, prompt, i * request.n + choice, choice, lora)
        for i, prompt in enumerate(prompts)
        for choice in range(request.n)
    ]


class Metrics:
    """What the server counts, for Prometheus. Names end in their unit; what was never measured is absent."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        what = "Requests by endpoint and HTTP status"
        self.requests = Counter("edgekv_requests", what, ["endpoint", "status"], registry=self.registry)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self.cached_tokens = self._counter("cached_tokens", "Tokens of prompts that were cached and not computed")
        self.generated_tokens = self._counter("generated_tokens", "Tokens of answers")
        self.prefill_seconds = self._counter("prefill_seconds", "Time spent reading prompts")
        self.decode_seconds = self._counter("decode_seconds", "Time spent generating all but each first token")
        self.queue_length = self._gauge("queue_length", "Requests that wait")
        self.active = self._gauge("active", "Requests being answered")
        self.cache_bytes = self._gauge("cache_bytes", "KV caches of all conversations that are kept")
        self.sessions = self._gauge("sessions", "Conversations that are kept")
        self._latest: dict[str, Gauge] = {}
        self._lock = threading.Lock()

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"edgekv_{name}", what, registry=self.registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"edgekv_{name}", what, registry=self.registry)

    def latest(self, name: str, what: str, value: float | None) -> None:
        """Sets a gauge that exists from its first value on."""
        if value is not None:
            with self._lock:
                gauge = self._latest.get(name) or self._latest.setdefault(name, self._gauge(name, what))
            gauge.set(value)

    def as_json(self) -> dict[str, Any]:
        """Name to value, without the request counts."""
        return {
            sample.name: sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if not sample.labels and not sample.name.endswith("_created")
        }


class Engine:
    """Owns the model. Everything that computes runs in its threads; `submit` may be called from any other.

    slots: answers that are made at once, of a session that was loaded for so many. queue_limit: requests that may
    wait. pool_bytes: of all conversations' caches. max_new_tokens: of an answer whose request sets no limit.
    power: meters each answer's decoding. Raises ConfigError where the model's own settings can't be read.
    """

    def __init__(
        self,
        session: Session,
        template: ChatTemplate,
        *,
        queue_limit: int,
        pool_bytes: int,
        max_new_tokens: int,
        power: PowerSource | None = None,
        slots: int = 1,
    ) -> None:
        self.session, self.slots, self.max_new_tokens = session, slots, max_new_tokens
        self.sampling = sampling_defaults(session.model)
        self.metrics, self.pool = Metrics(), SessionPool(session, pool_bytes, slots)
        tokenizer = session.require_tokenizer()
        self.prompts = RequestEncoder(template, tokenizer, session.plan.ctx, session.config.vocab_size)
        self._images, self._power = Images(session), power
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
        """Queues one request's answers. Raises RequestError: 429 where the queue is full, 503 after `stop`."""
        with self._changed:
            if self._stopping:
                raise _stopped()
            self._forget_gone()
            if len(self._new) >= self._queue_limit:
                message = f"{self._queue_limit} requests wait already: try again later"
                raise RequestError(429, message, "queue_full")
            self._new.append(deque(jobs))
            self._changed.notify_all()
            self.metrics.queue_length.set(len(self._new) + len(self._begun))

    def answer(self, job: Job) -> AnswerEnd:
        """Emits the text; returns the end. Raises Cancelled, and an EdgeKVError where it can't be made."""
        prompt, request = self._images.placed(job.prompt.ids, job.prompt.images), job.request
        session, new = self.pool.acquire(prompt, job.lora)
        try:
            if request.echoes:
                if request.n_logprobs is None:
                    job.channel.emit(Piece(job.index, job.prompt.text))
                else:
                    self._echo_logprobs(job, session, request.n_logprobs)
                    new = session.align(prompt)
                if request.limit == 0:
                    return AnswerEnd(job.index, "length", Usage(len(job.prompt.ids)))
            return self._generate(job, session, new)
        finally:
            self.pool.release(session)

    def embed(self, job: EmbeddingJob) -> EmbeddingVector:
        """The text as a vector."""
        session = self.pool.borrow(job.lora)
        try:
            values = session.embed(job.ids)
        finally:
            self.pool.release(session)
        self.metrics.prompt_tokens.inc(len(job.ids))
        return EmbeddingVector(job.index, values.tolist(), len(job.ids))

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
            return self.embed(job) if isinstance(job, EmbeddingJob) else self.answer(job)
        except Cancelled:
            return None
        except EdgeKVError as error:
            told = request_error(error, (EmbeddingRequest if isinstance(job, EmbeddingJob) else job.request).names)
            if told.status >= 500:
                LOG.warning("an answer failed: %s", error)
            return told
        except BaseException:  # a panic of a Rust library is no Exception; the slot goes on
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

    def _echo_logprobs(self, job: Job, session: Session, n_top: int) -> None:
        """Emits the prompt with the log probabilities of its tokens, for which all of it is read again."""
        session.rewind(0)
        ids, found = job.prompt.ids, list[TokenLogprob | None]([None])
        for a in range(0, len(ids) - 1, LOGITS_AT_ONCE):
            job.channel.check()
            b = min(a + LOGITS_AT_ONCE, len(ids) - 1)
            rows = session.logits(ids[a:b])
            found += [token_logprob(row, i, n_top) for row, i in zip(rows, ids[a + 1 : b + 1], strict=True)]
        job.channel.emit(Piece(job.index, job.prompt.text, found))

    def _generate(self, job: Job, session: Session, new: Prompt) -> AnswerEnd:
        request, prompts, made, meter = job.request, self.prompts, list[Step](), _Meter(self._power)
        is_chat = isinstance(request, ChatRequest)
        sampler = Sampler(request.sampling(job.choice), session.config.vocab_size, request.n_logprobs)
        n_held = len(session.tokens)
        n_new = sum(1 if isinstance(piece, int) else len(piece.rows) for piece in new)
        n_read = n_held if request.echoes and request.n_logprobs is not None else 0  # for the echo, a moment ago
        timings = Timings(session, n_held + n_new, n_read)
        n_told = 0  # of the tokens that were made

        def progress(layer: int, n_layers: int) -> None:
            job.channel.check()
            if request.return_progress and (values := timings.prefill(layer, n_layers)) is not None:
                job.channel.emit(PromptProgress(job.index, values))

        def told(at_once: bool) -> dict[str, Any] | None:
            return timings.so_far(at_once=at_once) if request.timings_per_token else None

        def emit(text: str, upto: int) -> None:
            nonlocal n_told
            eos = prompts.tokenizer.eos_ids
            found = [each for each in sampler.logprobs[n_told:upto] if each.token not in eos]
            job.channel.emit(Piece(job.index, text, found, told(at_once=len(made) == 1), upto - n_told))
            n_told = upto

        steps = session.generate(
            new,
            max_new_tokens=min(request.limit or self.max_new_tokens, session.plan.ctx),
            sampling=sampler,
            stop=(*prompts.template.stops, *request.stops) if is_chat else request.stops,
            constraint=self._constraint(request, session),
            progress=progress,
        )
        try:
            with contextlib.closing(steps):
                for step in steps:
                    meter.begin()
                    made.append(step)
                    timings.made()
                    text = step.text + (prompts.marks.get(step.token, "") if is_chat else "")
                    if text:
                        emit(text, len(made))
                    job.channel.check()
        finally:
            joules, watts = meter.end()
            n_kept = self._remember(session, made)
            usage = self._count(session, n_held + n_new, timings.n_cached, joules, watts)
        if sampler.logprobs and n_kept > n_told:  # of tokens that belong to the text, without what ended it
            emit("", n_kept)
        return AnswerEnd(job.index, made[-1].finish_reason or "length", usage, told(at_once=True))

    def _constraint(self, request: ChatRequest | CompletionRequest, session: Session) -> Constraint | None:
        tokenizer, vocab_size, tools = self.prompts.tokenizer, session.config.vocab_size, request.toolset
        if tools is not None and tools.callable:
            try:
                grammar = tools_grammar(tools, self.prompts.form, self.prompts.marks, request.schema)
                return Grammar(grammar, tokenizer, vocab_size)
            except ConfigError as error:
                raise RequestError(400, f"the tools' arguments: {error}", param="tools") from None
        if request.schema is None:
            return None
        try:
            return JsonSchema(request.schema, tokenizer, vocab_size)
        except ConfigError as error:
            raise RequestError(400, str(error), param=request.names["json_schema"]) from None

    def _remember(self, session: Session, made: Sequence[Step]) -> int:
        """Keeps the answer's own tokens; returns how many belong to its text."""
        text, tokens = "".join(step.text for step in made), [step.token for step in made]
        ids = answer_ids(self.prompts.tokenizer, tokens, text)
        session.rewind(len(session.tokens) - len(tokens) + len(ids))
        if ids:
            self.prompts.remember(text, ids)
        return len(ids)

    def _count(
        self, session: Session, n_prompt: int, n_cached: int, joules: float | None, watts: float | None
    ) -> Usage:
        metrics, report = self.metrics, session.report()
        n_decoded = len(report.decode_latencies_s)
        n_made = n_decoded + (report.time_to_first_token_s is not None)
        usage = Usage(n_prompt, n_cached if n_made else 0, n_made)
        metrics.prompt_tokens.inc(usage.prompt)
        metrics.cached_tokens.inc(usage.cached)
        metrics.generated_tokens.inc(usage.completion)
        metrics.prefill_seconds.inc(report.prefill_s or 0)
        metrics.decode_seconds.inc(sum(report.decode_latencies_s))
        metrics.latest("tokens_per_second", "Decoding speed of the latest answer", report.decode_tokens_per_s)
        kind = "estimated_" if self._power and self._power.about().estimate else ""
        metrics.latest(f"{kind}watts", "Average power of the latest answer's decoding", watts)
        if joules is not None and n_decoded:
            millijoules = 1e3 * joules / n_decoded
            metrics.latest(f"{kind}millijoules_per_token", "Energy per token of the latest answer", millijoules)
        return usage


def _stopped() -> RequestError:
    return RequestError(503, "the server is shutting down: ask again once it is back", "shutting_down")


class _Meter:
    """Energy of one answer, by a source of its own: samples of a day would not stay in memory."""

    def __init__(self, source: PowerSource | None) -> None:
        if isinstance(source, PowerSampler):
            source = PowerSampler(source.meter, notes=source.notes)
        self._source = source
        self._begun_s = 0.0

    def begin(self) -> None:
        """Starts to meter, the first time that it is called."""
        if self._source and not self._begun_s:
            self._source.start()
            self._begun_s = time.perf_counter()

    def end(self) -> tuple[float | None, float | None]:
        """Joules and average watts since the beginning; None: not measured."""
        if self._source is None or not self._begun_s:
            return None, None
        ended_s = time.perf_counter()
        self._source.mark()
        self._source.stop()
        try:
            window = self._source.window(self._begun_s, ended_s)
        except PowerError:
            return None, None
        return window.joules, window.average_w


class Timings:
    """Where an answer is, by the names of llama.cpp's server.

    n_prompt: tokens of the whole prompt; n_read: those of them that were computed for its echo.
    """

    def __init__(self, session: Session, n_prompt: int, n_read: int) -> None:
        self._session, self._n_prompt, self._n_read = session, n_prompt, n_read
        self._begun_s = self._counted_s = time.perf_counter()
        self._first_s = self._latest_s = 0.0  # when tokens were made
        self._n_made = 0
        self._bytes: dict[str, Any] = {}

    @property
    def n_cached(self) -> int:
        """Tokens of the prompt that need not be computed, once it is being read."""
        return max(0, self._n_prompt - self._n_read - self._session.n_read)

    def made(self) -> None:
        """Counts a token."""
        self._latest_s, self._n_made = time.perf_counter(), self._n_made + 1
        self._first_s = self._first_s or self._latest_s

    def prefill(self, layer: int, n_layers: int) -> dict[str, Any] | None:
        """After each layer of the prompt; None where an event was told a moment ago."""
        if not self._count_bytes(at_once=layer == n_layers):
            return None
        seconds, n_cached = time.perf_counter() - self._begun_s, self.n_cached
        done = n_cached + (self._n_prompt - n_cached) * layer // n_layers
        counts = {"total": self._n_prompt, "cache": n_cached, "processed": done}
        return {**counts, "time_ms": round(1e3 * seconds, 1), **self._bytes}

    def so_far(self, *, at_once: bool) -> dict[str, Any]:
        """Counts, milliseconds and bytes; at_once: the bytes are counted even if they were a moment ago."""
        self._count_bytes(at_once)
        counts = {
            "cache_n": self.n_cached,
            "prompt_n": self._n_prompt - self.n_cached,
            "predicted_n": self._n_made,
        }
        if not self._n_made:
            return {**counts, **self._bytes}
        writing = self._latest_s - self._first_s
        return {
            **counts,
            "prompt_ms": round(1e3 * (self._first_s - self._begun_s), 1),
            "predicted_ms": round(1e3 * writing, 1),
            "predicted_per_second": round((self._n_made - 1) / writing, 2) if writing > 0 else None,
            **self._bytes,
        }

    def _count_bytes(self, at_once: bool) -> bool:
        """Unless that was done a moment ago; returns whether it was done now."""
        now = time.perf_counter()
        if not at_once and now - self._counted_s < INTERVAL_S:
            return False
        caches, self._counted_s = self._session.caches, now
        self._bytes = {"kv_cache_bytes": held_bytes(caches), "kv_cache_f16_bytes": f16_bytes(caches)}
        return True


def held_bytes(caches: Sequence[LayerState]) -> int:
    """Bytes of the tokens that caches hold, without what is set aside for more of them."""
    held = [cache for cache in attending(caches) if cache.n_seen]
    return sum(min(cache.nbytes, cache.planned_bytes(cache.n_seen)) for cache in held)


def f16_bytes(caches: Sequence[LayerState]) -> int:
    """Bytes that the same tokens take in the plain cache."""
    plain, held = CacheSpec.parse(DEFAULT), [cache for cache in attending(caches) if cache.n_seen]
    return sum(plain.layer(cache.geometry).planned_bytes(cache.n_seen) for cache in held)
