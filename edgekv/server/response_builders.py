"""The JSON of OpenAI's chat and text completions, whole and in chunks."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from edgekv.server.answer_parser import Delta
from edgekv.server.chat_answer import ChatAnswer, Json, delta_json
from edgekv.server.checked_request import CheckedRequest
from edgekv.server.jobs import AnswerEnd, EncodedPrompt, Event, Piece, PromptProgress, Usage
from edgekv.server.protocol import RequestError
from edgekv.server.tools import ToolFormat
from edgekv.session.logprobs import TokenLogprob
from edgekv.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # OpenAI's, for a token that can't come


class ResponseBuilder(Protocol):
    """One request's answers as JSON. In a stream: `opening`, `take` for every event, `closing`."""

    @property
    def is_done(self) -> bool:
        """Whether every answer has come to its end."""

    def opening(self) -> list[Json]:
        """The first chunks of a stream."""

    def take(self, event: Event) -> list[Json]:
        """The chunks that an event of the engine makes."""

    def closing(self) -> list[Json]:
        """The last chunks."""

    def failed(self, error: RequestError) -> list[Json]:
        """The chunks that end a stream with an error."""

    def whole(self) -> Json:
        """The answer in one piece, once all events were taken."""

    def encoded(self, value: Json) -> bytes:
        """A chunk as a server-sent event."""

    @property
    def last_line(self) -> bytes:
        """Bytes behind the last chunk; may be empty."""


def line(value: Json) -> bytes:
    """JSON as the data of a server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class _CompletionsBuilder(ResponseBuilder):
    """What both have in common; a choice is an answer."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    last_line = b"data: [DONE]\n\n"

    def __init__(
        self, model: str, request: CheckedRequest, prompts: Sequence[EncodedPrompt], tokenizer: Tokenizer
    ) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._base: Json = {"id": self.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}
        self._usage, self._n_open = Usage(), len(prompts) * request.n
        self._timings: Json | None = None

    @property
    def is_done(self) -> bool:
        return self._n_open == 0

    def opening(self) -> list[Json]:
        return []

    def take(self, event: Event) -> list[Json]:
        if isinstance(event, PromptProgress):
            return [self._chunk([], prompt_progress=event.values)]
        if isinstance(event, Piece):
            return self._piece(event)
        assert isinstance(event, AnswerEnd)
        self._n_open -= 1
        usage, self._timings = dataclasses.replace(event.usage, reasoning=self._reasoning(event)), event.timings
        again = event.index % self._request.n > 0  # its prompt is counted with the first answer
        self._usage += dataclasses.replace(usage, prompt=0, cached=0) if again else usage
        return self._done(event)

    def _reasoning(self, event: AnswerEnd) -> int:
        """Tokens of an answer's reasoning."""
        return 0

    def closing(self) -> list[Json]:
        return [self._chunk([], usage=self._usage.as_json())] if self._request.include_usage else []

    def failed(self, error: RequestError) -> list[Json]:
        return [error.as_json()]

    def whole(self) -> Json:
        extra = {"timings": self._timings} if self._timings else {}
        return {
            **self._base,
            "object": self.whole_object,
            "choices": self._choices(),
            "usage": self._usage.as_json(),
            **extra,
        }

    def encoded(self, value: Json) -> bytes:
        return line(value)

    def _piece(self, event: Piece) -> list[Json]:
        raise NotImplementedError

    def _done(self, event: AnswerEnd) -> list[Json]:
        raise NotImplementedError

    def _choices(self) -> list[Json]:
        raise NotImplementedError

    def _chunk(self, choices: list[Json], **extra: Any) -> Json:
        return {**self._base, "object": self.chunk_object, "choices": choices, **extra}

    def _token(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        return data.decode("utf-8", errors="replace") or self._piece_name(token)

    def _piece_name(self, token: int) -> str:
        return self._tokenizer.piece(token) if token < self._tokenizer.vocab_size else ""


class CompletionBuilder(_CompletionsBuilder):
    """POST /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self, model: str, request: CheckedRequest, prompts: Sequence[EncodedPrompt], tokenizer: Tokenizer
    ) -> None:
        super().__init__(model, request, prompts, tokenizer)
        n = self._n_open
        self._texts: list[str] = [""] * n
        self._logprobs: list[Json] = [self._empty() for _ in range(n)]
        self._reasons: list[str | None] = [None] * n
        self._echoed = [prompt.ids for prompt in prompts]

    def _empty(self) -> Json:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _piece(self, event: Piece) -> list[Json]:
        i = event.index
        found = None if self._request.n_logprobs is None else self._told(event)
        self._texts[i] += event.text
        for name, values in (found or {}).items():
            self._logprobs[i][name] += values
        timings = {"timings": event.timings} if event.timings else {}
        return [self._chunk([self._choice(i, event.text, found, None)], **timings)]

    def _told(self, event: Piece) -> Json:
        told, offset = self._empty(), len(self._texts[event.index])
        for n, each in enumerate(event.logprobs):
            token = self._echoed[event.index // self._request.n][n] if each is None else each.token
            text = self._token(token)
            told["tokens"].append(text)
            told["token_logprobs"].append(None if each is None else _finite(each.logprob))
            top = None if each is None else {self._token(t): _finite(p) for t, p in each.top}
            told["top_logprobs"].append(top)
            told["text_offset"].append(offset)
            offset += len(text)
        return told

    def _done(self, event: AnswerEnd) -> list[Json]:
        self._reasons[event.index] = event.reason
        timings = {"timings": event.timings} if event.timings else {}
        return [self._chunk([self._choice(event.index, "", None, event.reason)], **timings)]

    def _choices(self) -> list[Json]:
        logprobs = [None] * len(self._texts) if self._request.n_logprobs is None else self._logprobs
        every = enumerate(zip(self._texts, logprobs, self._reasons, strict=True))
        return [self._choice(i, text, found, reason) for i, (text, found, reason) in every]

    def _choice(self, i: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": reason}


class ChatBuilder(_CompletionsBuilder):
    """POST /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        request: CheckedRequest,
        prompts: Sequence[EncodedPrompt],
        tokenizer: Tokenizer,
        form: ToolFormat,
    ) -> None:
        super().__init__(model, request, prompts, tokenizer)
        self._answers = [ChatAnswer(request, prompts[0].thinks, form) for _ in range(self._n_open)]
        self._found: list[list[Json]] = [[] for _ in self._answers]
        self._n_told = [0] * len(self._answers)

    def opening(self) -> list[Json]:
        role = {"role": "assistant", "content": ""}
        return [self._chunk([self._choice(i, role)]) for i in range(len(self._answers))]

    def _piece(self, event: Piece) -> list[Json]:
        i = event.index
        self._found[i] += [self._logprob(each) for each in event.logprobs if each is not None]
        timings = {"timings": event.timings} if event.timings else {}
        return self._deltas(i, self._answers[i].push(event.text, event.n_tokens), timings)

    def _reasoning(self, event: AnswerEnd) -> int:
        return self._answers[event.index].n_reasoning

    def _done(self, event: AnswerEnd) -> list[Json]:
        i, answer = event.index, self._answers[event.index]
        chunks = self._deltas(i, answer.end(event.reason), {})
        timings = {"timings": event.timings} if event.timings else {}
        last = self._choice(i, {}, logprobs=self._untold(i)) | {"finish_reason": answer.reason}
        return [*chunks, self._chunk([last], **timings)]

    def _deltas(self, i: int, deltas: Sequence[Delta], extra: Json) -> list[Json]:
        return [
            self._chunk([self._choice(i, delta_json(delta), logprobs=self._untold(i))], **extra)
            for delta in deltas
        ]

    def _untold(self, i: int) -> Json | None:
        """Log probabilities that no chunk has had."""
        content, self._n_told[i] = self._found[i][self._n_told[i] :], len(self._found[i])
        return {"content": content, "refusal": None} if content else None

    def _choices(self) -> list[Json]:
        choices = []
        for i, answer in enumerate(self._answers):
            told = None if self._request.n_logprobs is None else {"content": self._found[i], "refusal": None}
            choices.append(
                {"index": i, "message": answer.message(), "logprobs": told, "finish_reason": answer.reason}
            )
        return choices

    def _choice(self, i: int, delta: Json, logprobs: Json | None = None) -> Json:
        return {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprob(self, found: TokenLogprob) -> Json:
        top = [self._entry(token, logprob) for token, logprob in found.top]
        return self._entry(found.token, found.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token)
        return {"token": self._token(token), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
