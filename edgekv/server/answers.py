"""Answers in the formats of OpenAI's API, whole or streamed.

Source: https://platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgekv.engine.tools import AnswerParser, Json
from edgekv.errors import EdgeKVError
from edgekv.server.engine import AnswerEnd, Channel, EmbeddingVector, Event, TextChunk
from edgekv.server.prompts import EncodedPrompt, RequestEncoder
from edgekv.server.requests import ChatRequest, EmbeddingRequest, Request, RequestError, request_error

LOG = logging.getLogger("edgekv.server")
HEARTBEAT_S = 10.0  # between comments in an idle stream, which keep proxies and clients waiting
MIN_LOGPROB = -9999.0  # OpenAI's, for an impossible token
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
T = TypeVar("T")


class Answer(AnswerParser):
    """One growing answer: its parsed text, log probabilities and finish reason."""

    def __init__(self, request: Request, prompt: EncodedPrompt, encoder: RequestEncoder) -> None:
        tools = request.tools_allowed
        super().__init__(
            plain=not isinstance(request, ChatRequest),
            thinks=prompt.thinks,
            form=encoder.form if tools and tools.callable else None,
            forced=bool(tools and tools.forced),
        )
        self.n_reasoning = 0  # tokens of reasoning, with its marks
        self.logprobs: list[Json] = []
        self._n_sent = 0  # log probabilities that are in a chunk
        self.reason: str | None = None

    def take(self, event: TextChunk | AnswerEnd) -> list[Json]:
        """Returns the deltas that an event adds."""
        if isinstance(event, TextChunk):
            thought, deltas = self.is_thinking, self.push(event.text)
            self.n_reasoning += event.n_tokens if thought or self.is_thinking else 0
            return deltas
        deltas = self.end()
        self.reason = "tool_calls" if self.calls and event.reason == "stop" and not self.is_cut else event.reason
        return deltas

    def new_logprobs(self) -> list[Json]:
        """Returns the log probabilities that no chunk has yet."""
        new, self._n_sent = self.logprobs[self._n_sent :], len(self.logprobs)
        return new


class AnswerFormat:
    """The answers to one request in an endpoint's format; ``n_open`` of them have not ended.

    A stream consists of `opening`, the chunks of `take` for each event, and `closing`; an answer in one piece is
    `whole` after the last event. Subclasses define the names of objects, the text of a choice in a chunk (`delta`)
    and in a whole answer (`text`), and the layout of log probabilities.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    no_text: ClassVar[Json]

    def __init__(
        self, model: str, request: Request, prompts: Sequence[EncodedPrompt], encoder: RequestEncoder
    ) -> None:
        self._request, self._tokenizer = request, encoder.tokenizer
        self._base: Json = {"id": self.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}
        self._answers = [Answer(request, prompt, encoder) for prompt in prompts for _ in range(request.n)]
        self._usage, self.n_open = Counter[str](), len(self._answers)
        self._joules = 0.0  # NaN: not known of each answer
        self._timings: Json = {}  # of the latest event

    def take(self, event: Event) -> list[Json]:
        """Takes an event; returns the chunks for it."""
        assert isinstance(event, (TextChunk, AnswerEnd))
        if isinstance(event, TextChunk) and event.progress:
            return [self._chunk(prompt_progress=event.progress)]
        i, answer = event.index, self._answers[event.index]
        self._timings = {"timings": event.timings} if event.timings else {}
        if isinstance(event, TextChunk):
            answer.logprobs += self._entries(event, len(answer.content))
        deltas = [self.delta(delta) for delta in answer.take(event)]
        chunks = [self._chunk(self._choice(i, d, answer.new_logprobs()), **self._timings) for d in deltas]
        if isinstance(event, AnswerEnd):
            self.n_open -= 1
            uncounted = {"prompt": 0, "cached": 0} if i % self._request.n else {}  # counted once per prompt
            self._usage.update({**event.usage, "reasoning": answer.n_reasoning, **uncounted})
            self._joules += math.nan if event.joules is None else event.joules
            last = self._choice(i, self.no_text, answer.new_logprobs(), answer.reason)
            chunks.append(self._chunk(last, **self._timings))
        return chunks

    def opening(self) -> list[Json]:
        """Returns the first chunks of a stream."""
        return []

    def closing(self) -> list[Json]:
        """Returns the last chunks."""
        options = self._request.stream_options
        return (
            [self._chunk(usage=usage_json(self._usage, self._joules))] if options and options.include_usage else []
        )

    def whole(self) -> Json:
        """Returns all answers in one piece, after the last event."""
        choices = [self._choice(i, self.text(a), a.logprobs, a.reason) for i, a in enumerate(self._answers)]
        rest = {"object": self.whole_object, "choices": choices, "usage": usage_json(self._usage, self._joules)}
        return {**self._base, **rest, **self._timings}

    def delta(self, delta: Json) -> Json:
        """Returns a delta as part of a choice in a chunk."""
        return {"delta": delta}

    def text(self, answer: Answer) -> Json:
        """Returns the text of an answer as part of a choice."""
        raise NotImplementedError

    def text_at(self, offset: int) -> Json:
        """Returns the position of a token in its answer, for its log probability."""
        return {}

    def logprobs(self, entries: Sequence[Json]) -> Json:
        """Returns the log probabilities of tokens as part of a choice."""
        return {"content": entries, "refusal": None}

    def _choice(self, i: int, text: Json, entries: Sequence[Json] = (), reason: str | None = None) -> Json:
        logprobs = self.logprobs(entries) if entries else None
        return {"index": i, **text, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, *choices: Json, **more: Any) -> Json:
        return {**self._base, "object": self.chunk_object, "choices": choices, **more}

    def _entries(self, piece: TextChunk, offset: int) -> Iterator[Json]:
        """Yields the log probabilities of a piece's tokens. offset: the position of its text in the answer."""
        for entry_data in piece.logprobs:
            entry = self._entry(entry_data.token, entry_data.logprob)
            yield entry | {"top_logprobs": [self._entry(*pair) for pair in entry_data.top], **self.text_at(offset)}
            offset += len(entry["token"])

    def _entry(self, token: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token)
        text = data.decode("utf-8", errors="replace")
        if not text and token < self._tokenizer.vocab_size:
            text = self._tokenizer.piece(token)
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(data)}


class CompletionFormat(AnswerFormat):
    """The format of POST /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"
    no_text: ClassVar[Json] = {"text": ""}

    def delta(self, delta: Json) -> Json:
        return {"text": delta["content"]}

    def text(self, answer: Answer) -> Json:
        return {"text": answer.content}

    def text_at(self, offset: int) -> Json:
        return {"text_offset": offset}

    def logprobs(self, entries: Sequence[Json]) -> Json:
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{t["token"]: t["logprob"] for t in entry["top_logprobs"]} for entry in entries],
            "text_offset": [entry["text_offset"] for entry in entries],
        }


class ChatFormat(AnswerFormat):
    """The format of POST /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    no_text: ClassVar[Json] = {"delta": {}}

    def opening(self) -> list[Json]:
        role = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(self._choice(i, role)) for i in range(len(self._answers))]

    def text(self, answer: Answer) -> Json:
        message: Json = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
        if answer.reasoning.strip():
            message["reasoning_content"] = answer.reasoning.strip()
        return {"message": message | ({"tool_calls": answer.calls} if answer.calls else {})}


def usage_json(usage: Counter[str], joules: float) -> Json:
    """Returns OpenAI's usage object, with the energy unless that is NaN."""
    return {
        "prompt_tokens": usage["prompt"],
        "completion_tokens": usage["completion"],
        "total_tokens": usage["prompt"] + usage["completion"],
        "prompt_tokens_details": {"cached_tokens": usage["cached"]},
        "completion_tokens_details": {"reasoning_tokens": usage["reasoning"]},
        **({} if math.isnan(joules) else {"energy_joules": round(joules, 4)}),
    }


class EmbeddingFormat:
    """The format of POST /v1/embeddings: a vector for each prompt."""

    def __init__(
        self, model: str, request: EmbeddingRequest, prompts: Sequence[EncodedPrompt], encoder: RequestEncoder
    ) -> None:
        self._model, self._is_base64 = model, request.encoding_format == "base64"
        self._n_tokens, self.n_open = sum(len(prompt.ids) for prompt in prompts), len(prompts)
        self._data: list[Json] = []

    def take(self, event: Event) -> None:
        """Takes a vector, which becomes numbers or the base64 text of float32."""
        assert isinstance(event, EmbeddingVector)
        values: Any = event.values
        if self._is_base64:
            values = base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()
        self._data.append({"object": "embedding", "index": event.index, "embedding": values})
        self.n_open -= 1

    def whole(self) -> Json:
        """Returns all vectors."""
        usage = {"prompt_tokens": self._n_tokens, "total_tokens": self._n_tokens}
        return {"object": "list", "data": self._data, "model": self._model, "usage": usage}


async def whole_answer(receive: Receive, channel: Channel, answers: AnswerFormat | EmbeddingFormat) -> Json | None:
    """Returns all answers in one piece; None if the client disconnects before, which cancels the jobs.

    Raises the EdgeKVError that ended a job.
    """

    async def build() -> Json:
        while answers.n_open:
            event = await channel.events.get()
            if isinstance(event, EdgeKVError):
                raise event
            answers.take(event)
        return answers.whole()

    return await _while_connected(receive, channel, build())


async def _while_connected(receive: Receive, channel: Channel, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of ``work``, None if the client disconnects before; then the jobs are cancelled."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = working, _ = asyncio.create_task(work), asyncio.create_task(until_gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        channel.cancelled.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """The answers to a request as server-sent events, until they end or the client disconnects.

    on_end: called at the end.
    """

    def __init__(
        self, channel: Channel, answers: AnswerFormat, on_end: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._channel, self._answers, self._on_end = channel, answers, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(OSError):  # the client disconnected
                await _while_connected(receive, self._channel, self._send(send))
        finally:
            self._on_end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for line in self._lines():
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lines(self) -> AsyncIterator[bytes]:
        """Yields the lines of the stream. An exception is logged, and ends the stream with an error event."""
        try:
            async for chunk in self._chunks():
                yield as_event(chunk) if chunk else b": waiting\n\n"
        except Exception as error:
            if not isinstance(error, RequestError):
                LOG.exception("a stream failed")
            yield as_event(request_error(error).as_json())
        yield b"data: [DONE]\n\n"

    async def _chunks(self) -> AsyncIterator[Json]:
        """Yields the chunks, and an empty one each HEARTBEAT_S without any. Raises the error that ended a job."""
        answers, sent_s = self._answers, time.monotonic()
        for chunk in answers.opening():
            yield chunk
        while answers.n_open:
            chunks: list[Json] = []
            with contextlib.suppress(asyncio.TimeoutError):
                event = await asyncio.wait_for(self._channel.events.get(), HEARTBEAT_S)
                if isinstance(event, EdgeKVError):
                    raise event
                chunks = answers.take(event)
            if not chunks and time.monotonic() - sent_s >= HEARTBEAT_S:  # such as during a tool call
                chunks = [{}]
            for chunk in chunks:
                sent_s = time.monotonic()
                yield chunk
        for chunk in answers.closing():
            yield chunk


def as_event(chunk: Json) -> bytes:
    """Returns a chunk as a server-sent event."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
