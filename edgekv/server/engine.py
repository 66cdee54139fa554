"""The engine of the server: a queue of requests, a thread per slot that answers them, and the events it sends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from edgekv.engine.chat import answer_ids
from edgekv.engine.grammar import Constraint, Grammar, JsonSchema
from edgekv.engine.report import FinishReason
from edgekv.engine.sampling import Sampler, TokenLogprob
from edgekv.engine.session import Session, Step
from edgekv.engine.tools import tools_grammar
from edgekv.errors import ConfigError, EdgeKVError, MemoryBudgetError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import LayerState
from edgekv.kvcache.choice import EXACT
from edgekv.kvcache.recurrent import attending
from edgekv.power.energy import Share, SharedMeter
from edgekv.server.prompts import EncodedPrompt, Images, RequestEncoder
from edgekv.server.requests import AnyRequest, ChatRequest, EmbeddingRequest, Request, RequestError, request_error
from edgekv.text.template import ChatTemplate
from edgekv.vision.model import Prompt

LOG = logging.getLogger("edgekv.server")
MIN_COPY_TOKENS = 32  # shared tokens from which on the cache of another conversation is copied
IDLE_S = 1.0  # without requests, after which what was read goes to the prefix cache on disk
INTERVAL_S = 0.25  # between two measurements of cache bytes, and two events of progress


@dataclasses.dataclass(frozen=True)
class TextChunk:
    """A part of the answer ``index``: its next text, of ``n_tokens`` tokens, or the progress of its prompt.

    logprobs: the log probabilities of the tokens, if requested.
    """

    index: int
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    timings: dict[str, Any] | None = None
    n_tokens: int = 0
    progress: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class AnswerEnd:
    """The end of the answer ``index``. reason: OpenAI's finish reason.

    usage: numbers of tokens: ``prompt``, ``completion``, and ``cached`` ones of the prompt. joules: where known.
    """

    index: int
    reason: FinishReason
    usage: Mapping[str, int]
    timings: dict[str, Any] | None = None
    joules: float | None = None


@dataclasses.dataclass(frozen=True)
class EmbeddingVector:
    """The embedding of the text ``index``."""

    index: int
    values: Sequence[float]


Event = TextChunk | AnswerEnd | EmbeddingVector | EdgeKVError


class Cancelled(Exception):
    """Raised when the client of a job has disconnected, and in other work when a job has come."""


class Channel:
    """A queue of events from the engine's threads to the event loop that serves one request."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, event: Event) -> None:
        """Puts an event into the queue, from any thread. An exception is the last event."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def check(self) -> None:
        """Raises Cancelled if the client has disconnected."""
        if self.cancelled.is_set():
            raise Cancelled


@dataclasses.dataclass(frozen=True)
class Job:
    """One answer or embedding to compute: the ``choice``-th for its prompt, the ``index``-th of its request.

    lora: the name of the LoRA to apply; None: none.
    """

    channel: Channel
    request: AnyRequest
    prompt: EncodedPrompt
    choice: int
    index: int
    lora: str | None


COUNTERS = {
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Tokens of prompts that were cached and not computed",
    "generated_tokens": "Tokens of answers",
    "prefill_seconds": "Time spent reading prompts",
    "decode_seconds": "Time spent generating all but each first token",
    "energy_joules": "Energy while requests were answered, of {meter}",
}
GAUGES = {
    "queue_length": "Requests that wait",
    "active": "Requests being answered",
    "cache_bytes": "KV caches of all conversations that are kept",
    "sessions": "Conversations that are kept",
    "tokens_per_second": "Decoding speed of the latest answer",
    "watts": "Power while the latest request was answered, of {meter}",
}


class Metrics:
    """The metrics of the server, for Prometheus. Names end in their unit; a metric without a value is absent.

    meter: the name of the power meter, and what it covers.
    """

    def __init__(self, meter: str = "") -> None:
        self.registry, self._lock, self._meter = CollectorRegistry(), threading.Lock(), meter
        text = "Requests by endpoint and HTTP status"
        self.requests = Counter("edgekv_requests", text, ["endpoint", "status"], registry=self.registry)
        self._metrics: dict[str, Any] = {}
        self.record(**{name: 0.0 for name in COUNTERS if name != "energy_joules"})

    def record(self, **values: float | None) -> None:
        """Adds to counters and sets gauges, but for None."""
        for name, value in values.items():
            if value is None:
                continue
            with self._lock:
                if name not in self._metrics:
                    kind: Any = Counter if name in COUNTERS else Gauge
                    text = (COUNTERS | GAUGES)[name].format(meter=self._meter)
                    self._metrics[name] = kind(f"edgekv_{name}", text, registry=self.registry)
            metric = self._metrics[name]
            metric.inc(value) if name in COUNTERS else metric.set(value)


class SessionPool:
    """Sessions with at most ``budget_bytes`` of caches, of which the least recently used is reused; thread-safe.

    base: a loaded session, the first of the pool, whose weights the others share. slots: the number of sessions
    that can be acquired at once. Raises MemoryBudgetError if the caches of these don't fit the memory.
    """

    def __init__(self, base: Session, budget_bytes: int, slots: int = 1) -> None:
        self.base = base
        self.capacity = max(slots, budget_bytes // max(1, base.nbytes))
        self._all: list[Session] = [base, *(base.fork() for _ in range(slots - 1))]
        self._idle = list(self._all)  # least recently used first
        self._pinned: list[Session] = []  # idle sessions that are being copied, which can't be acquired meanwhile
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(session.nbytes for session in self._all)

    @property
    def n_sessions(self) -> int:
        """The number of conversations in the pool."""
        return len(self._all)

    def acquire(self, prompt: Prompt, lora: str | None = None) -> tuple[Session, Prompt]:
        """Returns a session that has cached the longest prefix of a prompt, and the rest of the prompt.

        Only sessions with the same LoRA count, as another LoRA makes other keys and values. A session whose whole
        conversation is a prefix is returned itself. One that shares only its beginning is copied, so that its own
        conversation can go on; a caller that needs a session being copied waits. `release` gives it back.
        """
        with self._changed:
            while (choice := self._choose(prompt, lora)) is None:
                self._changed.wait()
            session, source = choice
            self._take(session, lora)
            if source:
                self._pinned.append(source)
        try:
            if source:
                with contextlib.suppress(MemoryBudgetError):  # the prompt is read again instead
                    session.copy_from(source)
            return session, session.align(prompt)
        except BaseException:
            self.release(session)
            raise
        finally:
            if source:
                self._unpin(source)

    def _unpin(self, source: Session) -> None:
        with self._changed:
            self._pinned.remove(source)
            self._changed.notify_all()

    def keep_prefixes(self, is_wanted: Callable[[], bool]) -> None:
        """Writes what idle sessions have read to disk. Raises Cancelled if one ``is_wanted``."""
        for session in list(self._all):
            with self._changed:
                if session not in self._idle or session in self._pinned:
                    continue
                self._pinned.append(session)
            held = [session]

            def between(is_copied: bool, held: list[Session] = held) -> None:
                if is_copied:
                    self._unpin(held.pop())
                elif is_wanted():
                    raise Cancelled

            try:
                session.keep_prefix(between)
            finally:
                if held:
                    self._unpin(session)

    def borrow(self, lora: str | None) -> Session:
        """Returns a session with this LoRA for work that keeps its conversation; `release` gives it back."""
        with self._changed:
            while (session := self._latest(lora) or self._new_or_oldest()) is None:
                self._changed.wait()
            self._take(session, lora)
            return session

    def release(self, session: Session) -> None:
        """Takes a session of `acquire` or `borrow` back, as the most recently used one."""
        with self._changed:
            self._idle.append(session)
            self._changed.notify_all()

    def _choose(self, prompt: Prompt, lora: str | None) -> tuple[Session, Session | None] | None:
        """Returns the session to acquire, and one to copy into it or None; None where it is better to wait.

        Waiting for a session that is being copied takes less time than reading its prefix again.
        """
        same_lora = [session for session in reversed(self._idle) if session.lora == lora]
        same_lora.sort(key=lambda session: session in self._pinned)  # of equal ones, first those that are free
        closest = max(same_lora, key=lambda session: session.shared_prefix(prompt), default=None)
        shared = closest.shared_prefix(prompt) if closest else 0
        goes_on = closest is not None and shared == len(closest.tokens)
        if closest in self._pinned and (goes_on or shared >= MIN_COPY_TOKENS):
            return None
        if closest and goes_on:
            return closest, None
        spare = self._new_or_oldest()
        if spare is None:
            return None
        return spare, closest if closest is not spare and shared >= MIN_COPY_TOKENS else None

    def _take(self, session: Session, lora: str | None) -> None:
        if session.lora != lora:
            session.use_lora(lora)
        self._idle.remove(session)  # last: an error before leaves it in the pool

    def _latest(self, lora: str | None) -> Session | None:
        """Returns the most recently used session with this LoRA that can be acquired now."""
        free = (session for session in reversed(self._idle) if session not in self._pinned)
        return next((session for session in free if session.lora == lora), None)

    def _new_or_oldest(self) -> Session | None:
        """Returns a new session if there is room, else the least recently used one; None if none is idle."""
        if len(self._all) < self.capacity:
            try:
                session = self.base.fork()
            except MemoryBudgetError:
                self.capacity = len(self._all)
            else:
                self._all.append(session)
                self._idle.insert(0, session)
                return session
        return next((session for session in self._idle if session not in self._pinned), None)


class Engine:
    """The owner of the model, whose threads do all computing; `submit` can be called from any other thread.

    slots: the number of answers computed at once, which the session was loaded for. queue_limit: the number of
    requests that may wait. pool_bytes: the bytes of all conversations' caches. max_new_tokens: the limit of
    answers whose request sets none. power: the meter of requests. Raises ConfigError if the model's sampling
    defaults can't be read.
    """

    def __init__(
        self,
        session: Session,
        template: ChatTemplate,
        *,
        queue_limit: int,
        pool_bytes: int,
        max_new_tokens: int,
        power: SharedMeter | None = None,
        slots: int = 1,
    ) -> None:
        self.session, self.slots, self.max_new_tokens = session, slots, max_new_tokens
        self.sampling = session.model.sampling
        self.meter = f"{power.meter.name}: {power.meter.covers}" if power else None
        self.metrics, self.pool = Metrics(self.meter or ""), SessionPool(session, pool_bytes, slots)
        tokenizer = session.require_tokenizer()
        self.prompts = RequestEncoder(template, tokenizer, session.plan.ctx, session.config.vocab_size)
        self._images, self._power = Images(session), power
        self._queue_limit = queue_limit
        self._queue: deque[deque[Job]] = deque()  # by request
        self._active: list[Job] = []
        self._changed = threading.Condition()
        self._stopping = self._has_read = False
        work = {f"slot-{i}": self._run for i in range(slots)} | {"prefixes": self._keep_prefixes}
        self._threads = [
            threading.Thread(target=run, name=f"edgekv-{it}", daemon=True) for it, run in work.items()
        ]
        self._count_jobs()

    def start(self) -> None:
        """Starts the threads."""
        if self._power:
            self._power.start()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends all answers with an error; the threads stop at their next token or layer."""
        with self._changed:
            self._stopping = True
            for job in (*self._active, *(job for jobs in self._queue for job in jobs)):
                job.channel.emit(_stopped_error())
                job.channel.cancelled.set()
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Waits for the threads of a stopped engine, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def submit(
        self, channel: Channel, request: AnyRequest, prompts: Sequence[EncodedPrompt], lora: str | None = None
    ) -> None:
        """Queues the answers to each prompt, in OpenAI's order.

        Raises RequestError: 429 where the queue is full, 503 after `stop`.
        """
        pairs = [(prompt, choice) for prompt in prompts for choice in range(request.n)]
        with self._changed:
            if self._stopping:
                raise _stopped_error()
            self._drop_disconnected()
            if sum(jobs[0].index == 0 for jobs in self._queue) >= self._queue_limit:
                message = f"{self._queue_limit} requests wait already: try again later"
                raise RequestError(429, message, "queue_full")
            self._queue.append(deque(Job(channel, request, *pair, i, lora) for i, pair in enumerate(pairs)))
            self._changed.notify_all()
            self._count_jobs()

    def answer(self, job: Job, share: Share) -> AnswerEnd | EmbeddingVector:
        """Computes an answer, emits its text, and returns its end. Raises Cancelled or an EdgeKVError.

        share: counts the tokens that are computed.
        """
        request, ids = job.request, job.prompt.ids
        if isinstance(request, EmbeddingRequest):
            session = self.pool.borrow(job.lora)
            try:
                values = session.embed(ids).tolist()
                share.tokens += len(ids)
            finally:
                self.pool.release(session)
            self.metrics.record(prompt_tokens=len(ids))
            return EmbeddingVector(job.index, values)
        prompt = self._images.with_embeddings(ids, job.prompt.images)
        session, new = self.pool.acquire(prompt, job.lora)
        try:
            return self._generate(job, request, session, new, share)
        finally:
            self.pool.release(session)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            end: Event | None = None
            share = Share()
            try:
                with self._power.share() if self._power else contextlib.nullcontext(share) as share:
                    end = self.answer(job, share)
                if isinstance(end, AnswerEnd):
                    end = dataclasses.replace(end, joules=share.joules)
            except Cancelled:
                pass
            except BaseException as error:  # a panic of a Rust library is no Exception; the slot goes on
                end = request_error(error, job.request.names)
                if end.code == "internal_error":
                    LOG.exception("an answer failed")
                elif end.status >= 500:
                    LOG.warning("an answer failed: %s", error)
            self.metrics.record(energy_joules=share.joules, watts=share.watts)
            with self._changed:
                self._active.remove(job)
                self._has_read = True
                self._changed.notify_all()
                self._count_jobs()
            if end is not None:
                job.channel.emit(end)
            if isinstance(end, EdgeKVError):
                job.channel.cancelled.set()  # the request's other answers

    def _next(self) -> Job | None:
        """Waits for the next job, and returns it; None once stopped. Requests take turns, answer by answer."""
        with self._changed:
            while True:
                self._drop_disconnected()
                if self._queue:
                    break
                if self._stopping:
                    return None
                self._changed.wait()
            jobs = self._queue.popleft()
            self._active.append(jobs.popleft())
            if jobs:
                self._queue.append(jobs)
            self._count_jobs()
            return self._active[-1]

    def _keep_prefixes(self) -> None:
        """Writes what was read to disk, while no answer is asked for and once the engine is stopped."""

        def is_wanted() -> bool:
            return bool(self._queue or self._active) and not self._stopping

        while not self._stopping:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or (self._has_read and not is_wanted()))
                self._changed.wait_for(lambda: self._stopping or is_wanted(), IDLE_S)
                if is_wanted():
                    continue
                self._has_read = False
            try:
                self.pool.keep_prefixes(is_wanted)
            except Cancelled:
                self._has_read = True

    def _drop_disconnected(self) -> None:
        self._queue = deque(jobs for jobs in self._queue if not jobs[0].channel.cancelled.is_set())
        self._count_jobs()

    def _count_jobs(self) -> None:
        self.metrics.record(queue_length=len(self._queue), active=len(self._active))
        self.metrics.record(sessions=self.pool.n_sessions, cache_bytes=self.pool.nbytes)

    def _generate(self, job: Job, request: Request, session: Session, new: Prompt, share: Share) -> AnswerEnd:
        prompts, steps_made, n_sent = self.prompts, list[Step](), 0  # n_sent: steps that were emitted
        is_chat, eos = isinstance(request, ChatRequest), prompts.tokenizer.eos_ids
        params = request.sampling(self.sampling, job.choice)
        sampler = Sampler(params, session.config.vocab_size, request.n_logprobs)
        n_prompt = len(session.tokens) + sum(1 if isinstance(piece, int) else len(piece.rows) for piece in new)
        timings = Timings(session, n_prompt)

        def progress(layer: int, n_layers: int) -> None:
            job.channel.check()
            share.tokens = (n_prompt - timings.n_cached) * layer / n_layers
            if request.return_progress and (values := timings.prefill(layer, n_layers)) is not None:
                job.channel.emit(TextChunk(job.index, progress=values))

        def current(count_bytes: bool) -> dict[str, Any] | None:
            return timings.as_json(count_bytes) if request.timings_per_token else None

        def emit(text: str, upto: int) -> None:
            nonlocal n_sent
            logprobs = [logprob for logprob in sampler.logprobs[n_sent:upto] if logprob.token not in eos]
            job.channel.emit(TextChunk(job.index, text, logprobs, current(len(steps_made) == 1), upto - n_sent))
            n_sent = upto

        steps = session.generate(
            new,
            max_new_tokens=min(request.max_tokens or self.max_new_tokens, session.plan.ctx),
            sampling=sampler,
            stop=(*prompts.template.stops, *request.stops) if is_chat else request.stops,
            constraint=self._constraint(request, session),
            progress=progress,
        )
        try:
            with contextlib.closing(steps):
                for step in steps:
                    steps_made.append(step)
                    share.tokens += 1
                    timings.made_s.append(time.perf_counter())
                    text = step.text + (prompts.marks.get(step.token, "") if is_chat else "")
                    if text:
                        emit(text, len(steps_made))
                    job.channel.check()
        finally:
            n_kept, usage = self._remember(session, steps_made), self._count(session, n_prompt, timings.n_cached)
        if sampler.logprobs and n_kept > n_sent:  # log probabilities of tokens without text
            emit("", n_kept)
        return AnswerEnd(job.index, steps_made[-1].finish_reason or "length", usage, current(True))

    def _constraint(self, request: Request, session: Session) -> Constraint | None:
        tokenizer, vocab_size, tools = self.prompts.tokenizer, session.config.vocab_size, request.tools_allowed
        param = request.names["json_schema"]
        try:
            if tools is not None and tools.callable:
                param = "tools"
                grammar = tools_grammar(tools, self.prompts.form, self.prompts.marks, request.schema)
                return Grammar(grammar, tokenizer, vocab_size)
            return None if request.schema is None else JsonSchema(request.schema, tokenizer, vocab_size)
        except ConfigError as error:
            raise RequestError(400, str(error), param=param) from None

    def _remember(self, session: Session, steps: Sequence[Step]) -> int:
        """Remembers the answer's tokens, for when the client sends its text back; returns the number of them."""
        text, tokens = "".join(step.text for step in steps), [step.token for step in steps]
        ids = answer_ids(self.prompts.tokenizer, tokens, text)
        session.rewind(len(session.tokens) - len(tokens) + len(ids))
        if ids:
            self.prompts.remember(text, ids)
        return len(ids)

    def _count(self, session: Session, n_prompt: int, n_cached: int) -> dict[str, int]:
        report = session.report()
        n_made = len(report.decode_latencies_s) + (report.time_to_first_token_s is not None)
        n_cached = n_cached if n_made else 0
        self.metrics.record(
            prompt_tokens=n_prompt,
            cached_tokens=n_cached,
            generated_tokens=n_made,
            prefill_seconds=report.prefill_s or 0,
            decode_seconds=sum(report.decode_latencies_s),
            tokens_per_second=report.decode_tokens_per_s,
        )
        return {"prompt": n_prompt, "cached": n_cached, "completion": n_made}


def _stopped_error() -> RequestError:
    return RequestError(503, "the server is shutting down: ask again once it is back", "shutting_down")


class Timings:
    """The timings of an answer, with the names of llama.cpp's server. n_prompt: the tokens of the whole prompt."""

    def __init__(self, session: Session, n_prompt: int) -> None:
        self._session, self._n_prompt = session, n_prompt
        self._begun_s = self._counted_s = time.perf_counter()
        self.made_s: list[float] = []  # the time of each token
        self._bytes: dict[str, int] = {}

    @property
    def n_cached(self) -> int:
        """The number of the prompt's tokens that were cached, once it is being read."""
        return max(0, self._n_prompt - self._session.n_read)

    def prefill(self, layer: int, n_layers: int) -> dict[str, Any] | None:
        """Returns the progress after a layer of the prompt; None within INTERVAL_S of the last."""
        if not self._count_bytes(layer == n_layers):
            return None
        n_cached = self.n_cached
        done = n_cached + (self._n_prompt - n_cached) * layer // n_layers
        return {"total": self._n_prompt, "cache": n_cached, "processed": done, **self._bytes}

    def as_json(self, count_bytes: bool) -> dict[str, Any]:
        """Returns counts, milliseconds and bytes. count_bytes: measure bytes again even within INTERVAL_S."""
        self._count_bytes(count_bytes)
        first_s, n_made = self.made_s[0], len(self.made_s)
        writing_s = self.made_s[-1] - first_s
        return {
            "cache_n": self.n_cached,
            "prompt_n": self._n_prompt - self.n_cached,
            "prompt_ms": round(1e3 * (first_s - self._begun_s), 1),
            "predicted_n": n_made,
            "predicted_ms": round(1e3 * writing_s, 1),
            "predicted_per_second": round((n_made - 1) / writing_s, 2) if writing_s > 0 else None,
            **self._bytes,
        }

    def _count_bytes(self, at_once: bool) -> bool:
        """Measures the bytes and returns True, or False within INTERVAL_S of the last time, unless ``at_once``."""
        now = time.perf_counter()
        if not at_once and now - self._counted_s < INTERVAL_S:
            return False
        self._bytes, self._counted_s = cache_bytes(self._session.caches), now
        return True


def cache_bytes(caches: Sequence[LayerState]) -> dict[str, int]:
    """Returns the bytes of the tokens in caches, without spare capacity, and the bytes in f16."""
    filled, plain = [cache for cache in attending(caches) if cache.n_seen], CacheSpec.parse(EXACT)
    return {
        "kv_cache_bytes": sum(min(cache.nbytes, cache.planned_bytes(cache.n_seen)) for cache in filled),
        "kv_cache_f16_bytes": sum(plain.layer(cache.geometry).planned_bytes(cache.n_seen) for cache in filled),
    }
