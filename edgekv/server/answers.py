"""Answers in the formats of OpenAI's API, whole or streamed: reasoning, content and tool calls, parsed from text.

Source: https://platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import re
import secrets
import string
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgekv.errors import EdgeKVError
from edgekv.server.engine import AnswerEnd, Channel, EmbeddingVector, Event, Piece
from edgekv.server.prompts import END_THINK, THINK, EncodedPrompt, RequestEncoder, ToolFormat
from edgekv.server.requests import ChatRequest, EmbeddingRequest, Request, RequestError, json_value, request_error
from edgekv.text import possible_start

LOG = logging.getLogger("edgekv.server")
HEARTBEAT_S = 10.0  # between comments in an idle stream, which keep proxies and clients waiting
LEAST_LOGPROB = -9999.0  # OpenAI's, for an impossible token
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
NAME = re.compile(r'\{\s*"name"\s*:\s*"([\w.-]*)("?)')  # perhaps only its beginning
STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"?|[][{}]', re.DOTALL)  # strings and brackets
ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # the only length that Mistral's templates accept
Json = dict[str, Any]
T = TypeVar("T")


class AnswerParser:
    """An incremental parser of answers: it takes text in pieces of any length, and returns OpenAI's deltas.

    A tool call is returned once it is complete; if the answer was cut off, its arguments are incomplete JSON.

    thinks: whether the text begins within reasoning. form: the format of tool calls; None: no tools. names: the
    names of the tools. forced: whether the text consists of calls only. plain: whether all of it is content.
    """

    def __init__(
        self,
        *,
        thinks: bool = False,
        form: ToolFormat | None = None,
        names: Sequence[str] = (),
        forced: bool = False,
        plain: bool = False,
    ) -> None:
        self._tool_format, self._names, self._forced = form, names, forced
        self.is_cut = False  # whether the answer ended within a call
        self.content = self.reasoning = ""
        self.calls: list[Json] = []
        self._buffer, self._deltas = "", list[Json]()
        self._name: str | None = None  # of a call whose arguments follow apart from it
        self._is_first = True  # nothing was returned yet
        opening = self._read_reasoning if thinks else self._read_opening
        self._state: Callable[[bool], bool] = self._read_content if plain else opening

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._state == self._read_reasoning

    def push(self, text: str, last: bool = False) -> list[Json]:
        """Takes more text; returns the deltas that are certain now. last: no more text follows."""
        self._buffer += text
        while self._buffer and self._state(last):
            pass
        if last and self._forced and not self.calls and not self.is_cut:
            self._add_cut_call("", is_complete=False)
        deltas, self._deltas = self._deltas, []
        return deltas

    def end(self) -> list[Json]:
        """Returns the last deltas, at the end of the text."""
        return self.push("", last=True)

    # The states of the parser: each reads from the buffer, and returns whether the next state can go on with it.

    def _read_opening(self, last: bool) -> bool:
        """Reads the beginning of the text, or of the content after the reasoning."""
        text = self._buffer.lstrip()
        if not self._is_first:
            self._buffer = text
        if not last and (not text or (self._is_first and THINK.startswith(text))):
            return False
        if self._is_first and text.startswith(THINK):
            self._buffer, self._state = text[len(THINK) :].lstrip("\n"), self._read_reasoning
        elif self._tool_format is not None and not self._tool_format.begin and text.startswith("{"):
            self._buffer, self._state = text, self._read_between_calls
        else:
            self._state = self._read_content
        self._is_first = False
        return True

    def _read_reasoning(self, last: bool) -> bool:
        self._is_first = False
        return self._read_until(END_THINK, self._read_opening, last)

    def _read_content(self, last: bool) -> bool:
        mark = self._tool_format.begin if self._tool_format else ""
        return self._read_until(mark, self._read_between_calls, last)

    def _read_until(self, mark: str, next_state: Callable[[bool], bool], last: bool) -> bool:
        """Emits the text before ``mark``, but an end of it that may be the beginning of the mark."""
        start = self._buffer.find(mark) if mark else -1
        if start >= 0:
            self._emit_text(self._buffer[:start])
            self._buffer, self._state = self._buffer[start + len(mark) :], next_state
            return True
        safe = len(self._buffer) - (0 if last else possible_start(self._buffer, [mark]))
        self._emit_text(self._buffer[:safe])
        self._buffer = self._buffer[safe:]
        return False

    def _read_between_calls(self, last: bool) -> bool:
        """Reads from the mark of a call, or the end of another call, to the brace that begins a call."""
        assert self._tool_format is not None
        if self._tool_format.args:
            return self._read_name(self._tool_format, last)
        closing = self._tool_format.closing.strip()
        text = self._buffer.lstrip(" \r\n\t,;[]")
        if closing and text.startswith(closing):
            text = text[len(closing) :].lstrip()
        elif not last and closing and closing.startswith(text):
            return False
        self._buffer = text
        if text.startswith("{"):
            self._state = self._read_call
        elif text:
            self._state = self._read_content
        return bool(text)

    def _read_name(self, form: ToolFormat, last: bool) -> bool:
        """Reads a name, and the mark before its arguments."""
        head, mark, rest = self._buffer.partition(form.args)
        name, has_id, _ = head.partition("[CALL_ID]")
        if rest := rest.lstrip():
            self._name, self._buffer, self._state = name.strip(), rest, self._read_call
        elif last:
            self._add_cut_call(name.strip(), is_complete=bool(has_id or mark))
        return bool(rest)

    def _read_call(self, last: bool) -> bool:
        """Reads a JSON object: a name with its arguments, or arguments alone."""
        end = object_end(self._buffer)
        if not end and not last:
            return False
        text, self._buffer = (self._buffer[:end], self._buffer[end:]) if end else (self._buffer, "")
        self.is_cut = not end
        head = HEAD.match(text)
        if self._name is not None:
            self._add_call(self._name, text)
        elif head and (name := json_value(head[1])):
            arguments = text[head.end() :]
            self._add_call(name, arguments[: object_end(arguments) or len(arguments)])
        elif end:
            self._add_unordered_call(text)
        else:
            name_match = NAME.match(text)
            self._add_cut_call(name_match[1] if name_match else "", is_complete=bool(name_match and name_match[2]))
        self._state = self._read_between_calls if self._name is None else self._read_content
        self._name = None
        return True

    def _add_unordered_call(self, text: str) -> None:
        """Adds a call whose fields have another order; an object that is no call is content."""
        value = json_value(text)
        arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
        if isinstance(arguments, dict) and isinstance(value.get("name"), str):
            self._add_call(value["name"], json.dumps(arguments, ensure_ascii=False))
        else:
            self._emit_text(text)

    def _add_cut_call(self, name: str, is_complete: bool) -> None:
        """Adds a call that was cut off before its arguments, if the beginning of its name fits one tool only."""
        self.is_cut, self._buffer = True, ""
        matches = [tool for tool in self._names if (tool == name if is_complete else tool.startswith(name))]
        if len(matches) == 1:
            self._add_call(matches[0], "")

    def _add_call(self, name: str, arguments: str) -> None:
        id = "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
        function = {"name": name, "arguments": arguments}
        self.calls.append({"id": id, "type": "function", "function": function})
        self._deltas.append({"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1]}]})

    def _emit_text(self, text: str) -> None:
        if text and self.is_thinking:
            self.reasoning += text
            self._deltas.append({"reasoning_content": text})
        elif text and not self._forced:
            self.content += text
            self._deltas.append({"content": text})


def object_end(text: str) -> int:
    """Returns the length of the JSON object at the beginning of a text; 0: it is incomplete."""
    depth = 0
    for token in STRUCTURE.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return 0


class Answer(AnswerParser):
    """One growing answer: its parsed text, log probabilities and finish reason."""

    def __init__(self, request: Request, prompt: EncodedPrompt, encoder: RequestEncoder) -> None:
        tools = request.tools_allowed
        names = tuple(function.name for function in tools.callable) if tools else ()
        super().__init__(
            plain=not isinstance(request, ChatRequest),
            thinks=prompt.thinks,
            form=encoder.form if names else None,
            names=names,
            forced=bool(tools and tools.forced),
        )
        self.n_reasoning = 0  # tokens of reasoning, with its marks
        self.logprobs: list[Json] = []
        self._n_sent = 0  # log probabilities that are in a chunk
        self.reason: str | None = None

    def take(self, event: Piece | AnswerEnd) -> list[Json]:
        """Returns the deltas that an event adds."""
        if isinstance(event, Piece):
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
        self._timings: Json = {}  # of the latest event

    def take(self, event: Event) -> list[Json]:
        """Takes an event; returns the chunks for it."""
        assert isinstance(event, (Piece, AnswerEnd))
        if isinstance(event, Piece) and event.progress:
            return [self._chunk(prompt_progress=event.progress)]
        i, answer = event.index, self._answers[event.index]
        self._timings = {"timings": event.timings} if event.timings else {}
        if isinstance(event, Piece):
            answer.logprobs += self._entries(event, len(answer.content))
        deltas = [self.delta(delta) for delta in answer.take(event)]
        chunks = [self._chunk(self._choice(i, d, answer.new_logprobs()), **self._timings) for d in deltas]
        if isinstance(event, AnswerEnd):
            self.n_open -= 1
            uncounted = {"prompt": 0, "cached": 0} if i % self._request.n else {}  # counted once per prompt
            self._usage.update({**event.usage, "reasoning": answer.n_reasoning, **uncounted})
            last = self._choice(i, self.no_text, answer.new_logprobs(), answer.reason)
            chunks.append(self._chunk(last, **self._timings))
        return chunks

    def opening(self) -> list[Json]:
        """Returns the first chunks of a stream."""
        return []

    def closing(self) -> list[Json]:
        """Returns the last chunks."""
        options = self._request.stream_options
        return [self._chunk(usage=usage_json(self._usage))] if options and options.include_usage else []

    def whole(self) -> Json:
        """Returns all answers in one piece, after the last event."""
        choices = [self._choice(i, self.text(a), a.logprobs, a.reason) for i, a in enumerate(self._answers)]
        rest = {"object": self.whole_object, "choices": choices, "usage": usage_json(self._usage)}
        return {**self._base, **rest, **self._timings}

    def delta(self, delta: Json) -> Json:
        """Returns a delta as part of a choice in a chunk."""
        return {"delta": delta}

    def text(self, answer: Answer) -> Json:
        """Returns the text of an answer as part of a choice."""
        raise NotImplementedError

    def place(self, offset: int) -> Json:
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

    def _entries(self, piece: Piece, offset: int) -> Iterator[Json]:
        """Yields the log probabilities of a piece's tokens. offset: the position of its text in the answer."""
        for entry_data in piece.logprobs:
            entry = self._entry(entry_data.token, entry_data.logprob)
            yield entry | {"top_logprobs": [self._entry(*pair) for pair in entry_data.top], **self.place(offset)}
            offset += len(entry["token"])

    def _entry(self, token: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token)
        text = data.decode("utf-8", errors="replace")
        if not text and token < self._tokenizer.vocab_size:
            text = self._tokenizer.piece(token)
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(data)}


class CompletionFormat(AnswerFormat):
    """The format of POST /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"
    no_text: ClassVar[Json] = {"text": ""}

    def delta(self, delta: Json) -> Json:
        return {"text": delta["content"]}

    def text(self, answer: Answer) -> Json:
        return {"text": answer.content}

    def place(self, offset: int) -> Json:
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


def usage_json(usage: Counter[str]) -> Json:
    """Returns OpenAI's usage object."""
    return {
        "prompt_tokens": usage["prompt"],
        "completion_tokens": usage["completion"],
        "total_tokens": usage["prompt"] + usage["completion"],
        "prompt_tokens_details": {"cached_tokens": usage["cached"]},
        "completion_tokens_details": {"reasoning_tokens": usage["reasoning"]},
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
