"""Answers as OpenAI's API has them: completions, chats, responses and embeddings, whole or as server-sent events.

Source: https://platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgekv.errors import EdgeKVError
from edgekv.server.engine import AnswerEnd, Channel, EmbeddingVector, Event, Piece, PromptProgress, Usage
from edgekv.server.parser import AnswerParser, CallArguments, CallBegin, Content, Delta, Reasoning
from edgekv.server.prompts import EncodedPrompt, RequestEncoder
from edgekv.server.requests import FAILED, ChatRequest, EmbeddingRequest, Request, RequestError, ResponsesChat

LOG = logging.getLogger("edgekv.server")
HEARTBEAT_S = 10.0  # a comment while nothing comes, so that proxies and clients keep waiting
LEAST_LOGPROB = -9999.0  # OpenAI's, for a token that can't come
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
Json = dict[str, Any]
T = TypeVar("T")


class Answer:
    """One answer as it grows: content, reasoning, tool calls, log probabilities, and why it ended."""

    def __init__(self, request: Request, prompt: EncodedPrompt, encoder: RequestEncoder) -> None:
        tools = request.tools_allowed
        names = tuple(function.name for function in tools.callable) if tools else ()
        self._parser = AnswerParser(
            plain=not isinstance(request, ChatRequest),
            thinks=prompt.thinks,
            form=encoder.form if names else None,
            names=names,
            forced=bool(tools and tools.forced),
        )
        self.prompt_ids = prompt.ids
        self.content = self.reasoning = ""
        self.n_reasoning = 0  # tokens, with those of the marks around it
        self.calls: list[Json] = []
        self.logprobs: list[Json] = []
        self._n_sent = 0  # of them
        self.reason: str | None = None

    def push(self, piece: Piece) -> list[Delta]:
        """Return what the next piece of text adds."""
        thought = self._parser.is_thinking
        deltas = self._added(self._parser.push(piece.text))
        self.n_reasoning += piece.n_tokens if thought or self._parser.is_thinking else 0
        return deltas

    def end(self, reason: str) -> list[Delta]:
        """Return what was held back; ``reason``: why the text ended."""
        deltas = self._added(self._parser.end())
        self.reason = "tool_calls" if self.calls and reason == "stop" and not self._parser.is_cut else reason
        return deltas

    def new_logprobs(self) -> list[Json]:
        """Return the log probabilities that no chunk has had."""
        new, self._n_sent = self.logprobs[self._n_sent :], len(self.logprobs)
        return new

    def _added(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            if isinstance(delta, Content):
                self.content += delta.text
            elif isinstance(delta, Reasoning):
                self.reasoning += delta.text
            elif isinstance(delta, CallBegin):
                function = {"name": delta.name, "arguments": ""}
                self.calls.append({"id": delta.id, "type": "function", "function": function})
            else:
                self.calls[delta.number]["function"]["arguments"] += delta.text
        return deltas


class AnswerFormat:
    """One request's answers. In a stream: `opening`, `take` for every event, `closing`; else `take` and `whole`.

    A format has `opening`, `delta`, `end`, `closing` and `whole`; those here are of completions and chats, whose
    choices are the answers.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    no_text: ClassVar[Json]
    last_line = b"data: [DONE]\n\n"

    def __init__(
        self, model: str, request: Request, prompts: Sequence[EncodedPrompt], encoder: RequestEncoder
    ) -> None:
        self._request, self._tokenizer = request, encoder.tokenizer
        self._base: Json = {"id": self.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}
        self._answers = [Answer(request, prompt, encoder) for prompt in prompts for _ in range(request.n)]
        self._usage, self._n_open = Usage(), len(self._answers)
        self._timings: Json = {}  # of the latest event

    @property
    def is_done(self) -> bool:
        """Whether the last event has come."""
        return self._n_open == 0

    def take(self, event: Event) -> list[Json]:
        """Take an event; return the chunks that it makes."""
        if isinstance(event, PromptProgress):
            return self.progress(event.values)
        assert isinstance(event, (Piece, AnswerEnd))
        i, answer = event.index, self._answers[event.index]
        self._timings = {"timings": event.timings} if event.timings else {}
        if isinstance(event, Piece):
            answer.logprobs += self._entries(answer, event)
            return self.delta(i, answer.push(event))
        self._n_open -= 1
        deltas = answer.end(event.reason)
        again = {"prompt": 0, "cached": 0} if i % self._request.n else {}  # counted with the first answer
        self._usage += dataclasses.replace(event.usage, reasoning=answer.n_reasoning, **again)
        return self.end(i, deltas)

    def opening(self) -> list[Json]:
        """Return the first chunks of a stream."""
        return []

    def progress(self, values: Json) -> list[Json]:
        """Return the chunks that say how far a prompt is read."""
        return [self._chunk(prompt_progress=values)]

    def delta(self, i: int, deltas: Sequence[Delta]) -> list[Json]:
        """Return the chunks of a piece of the i-th answer."""
        raise NotImplementedError

    def end(self, i: int, deltas: Sequence[Delta]) -> list[Json]:
        """Return the chunks at its end; deltas: of what was held back."""
        chunks, answer = self.delta(i, deltas) if deltas else [], self._answers[i]
        last = self._choice(i, self.no_text, answer.new_logprobs(), answer.reason)
        return [*chunks, self._chunk(last, **self._timings)]

    def closing(self) -> list[Json]:
        """Return the last chunks."""
        options = self._request.stream_options
        return [self._chunk(usage=self._usage.as_json())] if options and options.include_usage else []

    def whole(self) -> Json:
        """Return the answers in one piece, once all events were taken."""
        choices = [self._choice(i, self._text(a), a.logprobs, a.reason) for i, a in enumerate(self._answers)]
        rest = {"object": self.whole_object, "choices": choices, "usage": self._usage.as_json()}
        return {**self._base, **rest, **self._timings}

    def failed(self, error: RequestError) -> list[Json]:
        """Return the chunks that end a stream with an error."""
        return [error.as_json()]

    def encoded(self, chunk: Json) -> bytes:
        """Return a chunk as a server-sent event."""
        return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def _text(self, answer: Answer) -> Json:
        """Return the text of a whole answer as a choice has it."""
        raise NotImplementedError

    def _logprobs(self, entries: Sequence[Json]) -> Json:
        return {"content": entries, "refusal": None}

    def _choice(self, i: int, text: Json, entries: Sequence[Json] = (), reason: str | None = None) -> Json:
        logprobs = self._logprobs(entries) if entries else None
        return {"index": i, **text, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, *choices: Json, **more: Any) -> Json:
        return {**self._base, "object": self.chunk_object, "choices": choices, **more}

    def _entries(self, answer: Answer, piece: Piece) -> Iterator[Json]:
        """Yield the log probabilities of a piece's tokens; None stands for the first of an echoed prompt."""
        for n, found in enumerate(piece.logprobs):
            if found is None:
                yield self._entry(answer.prompt_ids[n], None) | {"top_logprobs": None}
            else:
                top = [self._entry(*pair) for pair in found.top]
                yield self._entry(found.token, found.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float | None) -> Json:
        data = self._tokenizer.token_bytes(token)
        text = data.decode("utf-8", errors="replace")
        if not text and token < self._tokenizer.vocab_size:
            text = self._tokenizer.piece(token)
        least = None if logprob is None else max(logprob, LEAST_LOGPROB)
        return {"token": text, "logprob": least, "bytes": list(data)}


class CompletionFormat(AnswerFormat):
    """POST /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"
    no_text: ClassVar[Json] = {"text": ""}

    def delta(self, i: int, deltas: Sequence[Delta]) -> list[Json]:
        text = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        choice = self._choice(i, {"text": text}, self._answers[i].new_logprobs())
        return [self._chunk(choice, **self._timings)]

    def _text(self, answer: Answer) -> Json:
        return {"text": answer.content}

    def _entries(self, answer: Answer, piece: Piece) -> Iterator[Json]:
        offset = len(answer.content)
        for entry in super()._entries(answer, piece):
            yield entry | {"text_offset": offset}
            offset += len(entry["token"])

    def _logprobs(self, entries: Sequence[Json]) -> Json:
        tops = [each["top_logprobs"] for each in entries]
        return {
            "tokens": [each["token"] for each in entries],
            "token_logprobs": [each["logprob"] for each in entries],
            "top_logprobs": [top and {t["token"]: t["logprob"] for t in top} for top in tops],
            "text_offset": [each["text_offset"] for each in entries],
        }


class ChatFormat(AnswerFormat):
    """POST /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    no_text: ClassVar[Json] = {"delta": {}}

    def opening(self) -> list[Json]:
        role = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(self._choice(i, role)) for i in range(len(self._answers))]

    def delta(self, i: int, deltas: Sequence[Delta]) -> list[Json]:
        new = self._answers[i].new_logprobs
        choices = [self._choice(i, {"delta": _delta_json(delta)}, new()) for delta in deltas]
        return [self._chunk(choice, **self._timings) for choice in choices]

    def _text(self, answer: Answer) -> Json:
        message: Json = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
        if answer.reasoning.strip():
            message["reasoning_content"] = answer.reasoning.strip()
        return {"message": message | ({"tool_calls": answer.calls} if answer.calls else {})}


def _delta_json(delta: Delta) -> Json:
    """Return OpenAI's delta of a chunk."""
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text}
    if isinstance(delta, CallArguments):
        return {"tool_calls": [{"index": delta.number, "function": {"arguments": delta.text}}]}
    function = {"name": delta.name, "arguments": ""}
    return {"tool_calls": [{"index": delta.number, "id": delta.id, "type": "function", "function": function}]}


class ResponsesFormat(AnswerFormat):
    """POST /v1/responses: items of the kinds reasoning, message, function_call, and the events that build them."""

    prefix, last_line = "resp_", b""

    def __init__(
        self, model: str, request: Request, prompts: Sequence[EncodedPrompt], encoder: RequestEncoder
    ) -> None:
        super().__init__(model, request, prompts, encoder)
        assert isinstance(request, ResponsesChat)
        tools = request.tools_allowed
        self._base = {
            "id": self._base["id"],
            "object": "response",
            "created_at": self._base["created"],
            "model": model,
            **dict.fromkeys(("error", "incomplete_details", "instructions", "max_output_tokens")),
            "metadata": {},
            "parallel_tool_calls": bool(tools and tools.several),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": request.top_p,
            "truncation": "disabled",
            **request.sent,
            "store": False,
        }
        self._items: list[Json] = []
        self._n_events = 0

    def opening(self) -> list[Json]:
        response = self._response("in_progress")
        return [self._event(kind, response=response) for kind in ("created", "in_progress")]

    def progress(self, values: Json) -> list[Json]:
        return []

    def delta(self, i: int, deltas: Sequence[Delta]) -> list[Json]:
        return [event for delta in deltas for event in self._events(delta)]

    def end(self, i: int, deltas: Sequence[Delta]) -> list[Json]:
        return [*self.delta(i, deltas), *self._close(self._status)]

    def closing(self) -> list[Json]:
        return [self._event(self._status, response=self.whole())]

    def whole(self) -> Json:
        usage = self._usage.as_json()
        names = {"prompt": "input", "completion": "output"}
        counts = {f"{new}_tokens": usage[f"{old}_tokens"] for old, new in names.items()}
        details = {f"{new}_tokens_details": usage[f"{old}_tokens_details"] for old, new in names.items()}
        usage = {**counts, **details, "total_tokens": usage["total_tokens"]}
        why = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return self._response(self._status) | {"usage": usage, "incomplete_details": why}

    def failed(self, error: RequestError) -> list[Json]:
        failure = {"error": {"code": "server_error", "message": str(error)}}
        return [self._event("failed", response=self._response("failed") | failure)]

    def encoded(self, chunk: Json) -> bytes:
        return f"event: {chunk['type']}\n".encode() + super().encoded(chunk)

    @property
    def _status(self) -> str:
        return "incomplete" if self._answers[0].reason == "length" else "completed"

    def _response(self, status: str) -> Json:
        return {**self._base, "status": status, "output": [dict(item) for item in self._items]}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._n_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._n_events - 1, **fields}

    def _events(self, delta: Delta) -> Iterator[Json]:
        """Yield the events of more of an item, or of the next one's beginning."""
        if isinstance(delta, CallBegin):
            item = {"type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": ""}
            yield from self._open("fc", item)
        elif isinstance(delta, CallArguments):
            self._items[-1]["arguments"] += delta.text
            yield self._change("function_call_arguments.delta", delta=delta.text)
        else:
            is_message = isinstance(delta, Content)
            kind, part = ("message", "output_text") if is_message else ("reasoning", "reasoning_text")
            more: Json = {"logprobs": []} if is_message else {}
            if not (self._is_open and self._items[-1]["type"] == kind):
                if not delta.text.strip():
                    return
                head: Json = {"role": "assistant"} if is_message else {"summary": []}
                yield from self._open("msg" if is_message else "rs", {"type": kind, **head, "content": []})
                empty: Json = {"type": part, "text": "", **({"annotations": [], **more} if is_message else {})}
                self._items[-1]["content"].append(empty)
                yield self._change("content_part.added", content_index=0, part=dict(empty))
            self._items[-1]["content"][0]["text"] += delta.text
            yield self._change(f"{part}.delta", content_index=0, delta=delta.text, **more)

    @property
    def _is_open(self) -> bool:
        return bool(self._items) and self._items[-1]["status"] == "in_progress"

    def _open(self, prefix: str, item: Json) -> Iterator[Json]:
        yield from self._close()
        self._items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item})
        yield self._item_event("added")

    def _close(self, status: str = "completed") -> Iterator[Json]:
        """Yield the end of the item that is open."""
        if not self._is_open:
            return
        item = self._items[-1]
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._change("function_call_arguments.done", **done)
        else:
            part = dict(item["content"][0])
            more: Json = {"logprobs": []} if item["type"] == "message" else {}
            yield self._change(f"{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._change("content_part.done", content_index=0, part=part)
        item["status"] = status
        yield self._item_event("done")

    def _item_event(self, kind: str) -> Json:
        place = len(self._items) - 1
        return self._event(f"output_item.{kind}", output_index=place, item=copy.deepcopy(self._items[-1]))

    def _change(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)


class EmbeddingFormat:
    """POST /v1/embeddings: a vector of each prompt."""

    def __init__(
        self, model: str, request: EmbeddingRequest, prompts: Sequence[EncodedPrompt], encoder: RequestEncoder
    ) -> None:
        self._model, self._request, self._n = model, request, len(prompts)
        self._vectors: list[EmbeddingVector] = []

    @property
    def is_done(self) -> bool:
        """Whether the last vector has come."""
        return len(self._vectors) == self._n

    def take(self, event: Event) -> None:
        """Take an event."""
        assert isinstance(event, EmbeddingVector)
        self._vectors.append(event)

    def whole(self) -> Json:
        """Return all vectors, as numbers or as base64 of float32."""
        n_tokens, data = sum(vector.n_tokens for vector in self._vectors), []
        for vector in self._vectors:
            values: Any = vector.values
            if self._request.encoding_format == "base64":
                values = base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()
            data.append({"object": "embedding", "index": vector.index, "embedding": values})
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}


async def whole_answer(receive: Receive, channel: Channel, answers: AnswerFormat | EmbeddingFormat) -> Json | None:
    """Return all answers in one piece; None, and the jobs ended, where the client goes before.

    Raises the EdgeKVError that ended a job.
    """

    async def build() -> Json:
        while not answers.is_done:
            event = await channel.events.get()
            if isinstance(event, EdgeKVError):
                raise event
            answers.take(event)
        return answers.whole()

    return await _while_connected(receive, channel, build())


async def _while_connected(receive: Receive, channel: Channel, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what ``work`` does, None where the client goes before. The jobs are ended with it."""

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
    """Server-sent events of a request's answers, which end when the client is gone.

    on_end: called once nothing more is sent.
    """

    def __init__(
        self,
        channel: Channel,
        answers: AnswerFormat,
        headers: Mapping[str, str] | None = None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(headers={**HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._channel, self._answers, self._on_end = channel, answers, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _while_connected(receive, self._channel, self._send(send))
        except OSError:  # the client is gone
            pass
        except Exception:
            LOG.exception("a stream failed")
        finally:
            self._on_end()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async for line in self._lines():
            if start:
                await send(start)
                start = {}
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lines(self) -> AsyncIterator[bytes]:
        """Yield all that is sent. What fails while it is built is logged, and ends the stream as an error."""
        answers = self._answers
        try:
            for value in answers.opening():
                yield answers.encoded(value)
            while not answers.is_done:
                try:
                    event = await asyncio.wait_for(self._channel.events.get(), HEARTBEAT_S)
                except asyncio.TimeoutError:
                    yield b": waiting\n\n"
                    continue
                if isinstance(event, EdgeKVError):
                    values = answers.failed(event) if isinstance(event, RequestError) else []
                    break
                for value in answers.take(event):
                    yield answers.encoded(value)
            else:
                values = answers.closing()
        except Exception:
            LOG.exception("a stream failed")
            values = answers.failed(RequestError(500, FAILED, "internal_error"))
        for value in values:
            yield answers.encoded(value)
        if answers.last_line:
            yield answers.last_line
