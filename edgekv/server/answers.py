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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

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


class Answer:
    """One answer as it grows: content, reasoning, tool calls, log probabilities, and why it ended.

    A chat's text is parsed; that of a completion is content.
    """

    def __init__(self, request: Request, prompt: EncodedPrompt, encoder: RequestEncoder) -> None:
        tools = request.toolset
        names = tuple(function.name for function in tools.callable) if tools else ()
        form, forced = encoder.form if names else None, bool(tools and tools.forced)
        self._parser = AnswerParser(thinks=prompt.thinks, form=form, names=names, forced=forced)
        self._is_chat = isinstance(request, ChatRequest)
        self.prompt_ids = prompt.ids
        self.content = self.reasoning = ""
        self.n_reasoning = 0  # tokens, with those of the marks around it
        self.calls: list[Json] = []
        self.logprobs: list[Json] = []
        self._n_told = 0  # of them
        self.reason: str | None = None

    def push(self, piece: Piece) -> list[Delta]:
        """What the next piece of text adds."""
        if not self._is_chat:
            return self._kept([Content(piece.text)])
        thought = self._parser.is_thinking
        deltas = self._kept(self._parser.push(piece.text))
        self.n_reasoning += piece.n_tokens if thought or self._parser.is_thinking else 0
        return deltas

    def end(self, reason: str) -> list[Delta]:
        """What was held back; ``reason``: why the text ended."""
        deltas = self._kept(self._parser.end())
        self.reason = "tool_calls" if self.calls and reason == "stop" and not self._parser.is_cut else reason
        return deltas

    def untold(self) -> list[Json]:
        """Log probabilities that no chunk has had."""
        new, self._n_told = self.logprobs[self._n_told :], len(self.logprobs)
        return new

    def _kept(self, deltas: list[Delta]) -> list[Delta]:
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


class Builder(Protocol):
    """Events of the engine to the JSON of one request."""

    @property
    def is_done(self) -> bool:
        """Whether the last event has come."""

    def take(self, event: Event) -> list[Json]:
        """Takes an event; returns the chunks that it makes."""

    def whole(self) -> Json:
        """The answer in one piece, once all events were taken."""


class ResponseBuilder(Builder):
    """One request's answers. In a stream: `opening`, `take` for every event, `closing`.

    A format defines `opening`, `delta`, `end`, `closing` and `whole`; here stands what completions and chats
    share, whose choices are the answers.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
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
        return self._n_open == 0

    def take(self, event: Event) -> list[Json]:
        if isinstance(event, PromptProgress):
            return self.progress(event.values)
        assert isinstance(event, (Piece, AnswerEnd))
        i, answer = event.index, self._answers[event.index]
        self._timings = {"timings": event.timings} if event.timings else {}
        if isinstance(event, Piece):
            answer.logprobs += self._logprobs(answer, event)
            return self.delta(i, answer.push(event))
        self._n_open -= 1
        deltas = answer.end(event.reason)
        again = {"prompt": 0, "cached": 0} if i % self._request.n else {}  # counted with the first answer
        self._usage += dataclasses.replace(event.usage, reasoning=answer.n_reasoning, **again)
        return self.end(i, deltas)

    def opening(self) -> list[Json]:
        """The first chunks of a stream."""
        return []

    def progress(self, values: Json) -> list[Json]:
        """The chunks that say how far a prompt is read."""
        return [self._chunk([], prompt_progress=values)]

    def delta(self, i: int, deltas: Sequence[Delta]) -> list[Json]:
        """The chunks of a piece of the i-th answer."""
        raise NotImplementedError

    def end(self, i: int, deltas: Sequence[Delta]) -> list[Json]:
        """The chunks at its end; deltas: of what was held back."""
        raise NotImplementedError

    def closing(self) -> list[Json]:
        """The last chunks."""
        return [self._chunk([], usage=self._usage.as_json())] if self._request.include_usage else []

    def whole(self) -> Json:
        choices = [self._choice(i, answer) for i, answer in enumerate(self._answers)]
        told = {"object": self.whole_object, "choices": choices, "usage": self._usage.as_json()}
        return {**self._base, **told, **self._timings}

    def failed(self, error: RequestError) -> list[Json]:
        """The chunks that end a stream with an error."""
        return [error.as_json()]

    def encoded(self, chunk: Json) -> bytes:
        """A chunk as a server-sent event."""
        return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def _choice(self, i: int, answer: Answer) -> Json:
        """The whole i-th answer."""
        raise NotImplementedError

    def _chunk(self, choices: list[Json], **extra: Any) -> Json:
        return {**self._base, "object": self.chunk_object, "choices": choices, **extra}

    def _logprobs(self, answer: Answer, piece: Piece) -> Iterator[Json]:
        """Of a piece's tokens; None stands for the first of an echoed prompt."""
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


class CompletionBuilder(ResponseBuilder):
    """POST /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def _logprobs(self, answer: Answer, piece: Piece) -> Iterator[Json]:
        offset = len(answer.content)
        for entry in super()._logprobs(answer, piece):
            yield entry | {"text_offset": offset}
            offset += len(entry["token"])

    def delta(self, i: int, deltas: Sequence[Delta]) -> list[Json]:
        text = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        return [self._chunk([self._told(i, text, self._answers[i].untold())], **self._timings)]

    def end(self, i: int, deltas: Sequence[Delta]) -> list[Json]:
        last = self._told(i, "", None) | {"finish_reason": self._answers[i].reason}
        return [self._chunk([last], **self._timings)]

    def _choice(self, i: int, answer: Answer) -> Json:
        return self._told(i, answer.content, answer.logprobs) | {"finish_reason": answer.reason}

    def _told(self, i: int, text: str, found: Sequence[Json] | None) -> Json:
        logprobs = None
        if found is not None and self._request.n_logprobs is not None:
            tops = [each["top_logprobs"] for each in found]
            logprobs = {
                "tokens": [each["token"] for each in found],
                "token_logprobs": [each["logprob"] for each in found],
                "top_logprobs": [top and {t["token"]: t["logprob"] for t in top} for top in tops],
                "text_offset": [each["text_offset"] for each in found],
            }
        return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": None}


class ChatBuilder(ResponseBuilder):
    """POST /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Json]:
        role = {"role": "assistant", "content": ""}
        return [self._chunk([self._told(i, role, [])]) for i in range(len(self._answers))]

    def delta(self, i: int, deltas: Sequence[Delta]) -> list[Json]:
        untold = self._answers[i].untold
        return [self._chunk([self._told(i, _delta_json(delta), untold())], **self._timings) for delta in deltas]

    def end(self, i: int, deltas: Sequence[Delta]) -> list[Json]:
        chunks, answer = self.delta(i, deltas), self._answers[i]
        last = self._told(i, {}, answer.untold()) | {"finish_reason": answer.reason}
        return [*chunks, self._chunk([last], **self._timings)]

    def _choice(self, i: int, answer: Answer) -> Json:
        message: Json = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
        if answer.reasoning.strip():
            message["reasoning_content"] = answer.reasoning.strip()
        if answer.calls:
            message["tool_calls"] = answer.calls
        logprobs = None if self._request.n_logprobs is None else {"content": answer.logprobs, "refusal": None}
        return {"index": i, "message": message, "logprobs": logprobs, "finish_reason": answer.reason}

    def _told(self, i: int, delta: Json, found: Sequence[Json]) -> Json:
        logprobs = {"content": found, "refusal": None} if found else None
        return {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _delta_json(delta: Delta) -> Json:
    """OpenAI's delta of a chunk."""
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text}
    if isinstance(delta, CallArguments):
        return {"tool_calls": [{"index": delta.number, "function": {"arguments": delta.text}}]}
    function = {"name": delta.name, "arguments": ""}
    return {"tool_calls": [{"index": delta.number, "id": delta.id, "type": "function", "function": function}]}


class ResponsesBuilder(ResponseBuilder):
    """POST /v1/responses: items of the kinds reasoning, message, function_call, and the events that build them."""

    prefix, whole_object, last_line = "resp_", "response", b""

    def __init__(
        self, model: str, request: Request, prompts: Sequence[EncodedPrompt], encoder: RequestEncoder
    ) -> None:
        super().__init__(model, request, prompts, encoder)
        assert isinstance(request, ResponsesChat)
        self._base = {
            "id": self._base["id"],
            "object": "response",
            "created_at": self._base["created"],
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "parallel_tool_calls": bool(request.toolset and request.toolset.several),
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
        return [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]

    def progress(self, values: Json) -> list[Json]:
        return []

    def delta(self, i: int, deltas: Sequence[Delta]) -> list[Json]:
        events: list[Json] = []
        for delta in deltas:
            if isinstance(delta, CallBegin):
                events += self._close()
                item = {"type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": ""}
                events += self._open("fc", item)
            elif isinstance(delta, CallArguments):
                self._items[-1]["arguments"] += delta.text
                events.append(self._change("response.function_call_arguments.delta", delta=delta.text))
            else:
                events += self._text(delta)
        return events

    def end(self, i: int, deltas: Sequence[Delta]) -> list[Json]:
        return self.delta(i, deltas) + self._close(self._status())

    def closing(self) -> list[Json]:
        return [self._event(f"response.{self._status()}", response=self.whole())]

    def whole(self) -> Json:
        usage = self._usage.as_json()
        told = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        status = self._status()
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status) | {"usage": told, "incomplete_details": details}

    def failed(self, error: RequestError) -> list[Json]:
        told = {"error": {"code": "server_error", "message": str(error)}}
        return [self._event("response.failed", response=self._response("failed") | told)]

    def encoded(self, chunk: Json) -> bytes:
        return f"event: {chunk['type']}\n".encode() + super().encoded(chunk)

    def _status(self) -> str:
        return "incomplete" if self._answers[0].reason == "length" else "completed"

    def _response(self, status: str) -> Json:
        return {**self._base, "status": status, "output": [dict(item) for item in self._items]}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _text(self, delta: Content | Reasoning) -> list[Json]:
        """More of a message, or of what is thought before it."""
        is_message = isinstance(delta, Content)
        kind, part = ("message", "output_text") if is_message else ("reasoning", "reasoning_text")
        logprobs: Json = {"logprobs": []} if is_message else {}
        events: list[Json] = []
        if not (self._items and self._items[-1]["type"] == kind and self._items[-1]["status"] == "in_progress"):
            if not delta.text.strip():
                return []
            events += self._close()
            extra: Json = {"role": "assistant"} if is_message else {"summary": []}
            empty: Json = {"type": part, "text": ""} | ({"annotations": [], **logprobs} if is_message else {})
            events += self._open("msg" if is_message else "rs", {"type": kind, **extra, "content": []})
            self._items[-1]["content"].append(empty)
            events.append(self._change("response.content_part.added", content_index=0, part=dict(empty)))
        self._items[-1]["content"][0]["text"] += delta.text
        events.append(self._change(f"response.{part}.delta", content_index=0, delta=delta.text, **logprobs))
        return events

    def _open(self, prefix: str, item: Json) -> list[Json]:
        self._items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item})
        place = len(self._items) - 1
        return [self._event("response.output_item.added", output_index=place, item=copy.deepcopy(self._items[-1]))]

    def _close(self, status: str = "completed") -> list[Json]:
        """The end of the item that is open."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item, events = self._items[-1], []
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._change("response.function_call_arguments.done", **done))
        else:
            part = dict(item["content"][0])
            logprobs: Json = {"logprobs": []} if item["type"] == "message" else {}
            events += [
                self._change(f"response.{part['type']}.done", content_index=0, text=part["text"], **logprobs),
                self._change("response.content_part.done", content_index=0, part=part),
            ]
        item["status"] = status
        place = len(self._items) - 1
        return [*events, self._event("response.output_item.done", output_index=place, item=copy.deepcopy(item))]

    def _change(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)


class EmbeddingBuilder(Builder):
    """POST /v1/embeddings of ``n`` texts."""

    def __init__(self, model: str, request: EmbeddingRequest, n: int) -> None:
        self._model, self._request, self._n = model, request, n
        self._vectors: list[EmbeddingVector] = []

    @property
    def is_done(self) -> bool:
        return len(self._vectors) == self._n

    def take(self, event: Event) -> list[Json]:
        assert isinstance(event, EmbeddingVector)
        self._vectors.append(event)
        return []

    def whole(self) -> Json:
        n_tokens = sum(vector.n_tokens for vector in self._vectors)
        data = [{"object": "embedding", "index": v.index, "embedding": self._told(v)} for v in self._vectors]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    def _told(self, vector: EmbeddingVector) -> Any:
        if self._request.encoding_format == "float":
            return vector.values
        return base64.b64encode(np.asarray(vector.values, "<f4").tobytes()).decode()


async def whole_answer(receive: Receive, channel: Channel, answers: Builder) -> Json | None:
    """What ``answers`` makes of all events; None, and the jobs ended, where the client goes before.

    Raises the EdgeKVError that ended a job.
    """

    async def build() -> Json:
        while not answers.is_done:
            event = await channel.events.get()
            if isinstance(event, EdgeKVError):
                raise event
            answers.take(event)
        return answers.whole()

    gone, building = asyncio.create_task(_until_gone(receive)), asyncio.create_task(build())
    try:
        await asyncio.wait((gone, building), return_when=asyncio.FIRST_COMPLETED)
        return building.result() if building.done() else None
    finally:
        channel.cancelled.set()
        gone.cancel()
        building.cancel()


class EventStream(Response):
    """Ends the jobs when the client is gone, or takes longer than ``timeout_s`` for what was sent.

    on_end: called once nothing more is sent.
    """

    def __init__(
        self,
        channel: Channel,
        answers: ResponseBuilder,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(headers={**HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._channel, self._answers, self._timeout_s, self._on_end = channel, answers, timeout_s, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._channel.cancelled.set()
            for task in (sending, gone):
                task.cancel()
            sent, _ = await asyncio.gather(sending, gone, return_exceptions=True)
            of_client = OSError, asyncio.TimeoutError  # it is gone, or reads too slowly
            if isinstance(sent, Exception) and not isinstance(sent, of_client):
                LOG.error("a stream failed", exc_info=sent)
            self._on_end()

    async def _send(self, send: Send) -> None:
        events = self._lines()
        first = await anext(events)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._give(send, first)
        async for line in events:
            await self._give(send, line)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _give(self, send: Send, line: bytes) -> None:
        await asyncio.wait_for(
            send({"type": "http.response.body", "body": line, "more_body": True}), self._timeout_s
        )

    async def _lines(self) -> AsyncIterator[bytes]:
        """All that is sent. What fails while it is built is logged, and told at the end."""
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


async def _until_gone(receive: Receive) -> None:
    """Of a request whose body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
