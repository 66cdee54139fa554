"""Answers of OpenAI's responses API: the items of an answer, and the events that build them.

Source: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from edgekv.server.answer_parser import CallArguments, CallBegin, Content, Delta, Reasoning
from edgekv.server.chat_answer import ChatAnswer, Json
from edgekv.server.checked_request import CheckedRequest
from edgekv.server.jobs import AnswerEnd, EncodedPrompt, Event, Piece, Usage
from edgekv.server.protocol import RequestError
from edgekv.server.response_builders import ResponseBuilder
from edgekv.server.tools import ToolFormat


class ResponsesBuilder(ResponseBuilder):
    """The answer: items of the kinds reasoning, message, function_call, and the events that build them."""

    last_line = b""

    def __init__(
        self, model: str, request: CheckedRequest, prompts: Sequence[EncodedPrompt], form: ToolFormat
    ) -> None:
        self._answer = ChatAnswer(request, prompts[0].thinks, form)
        self._base: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "parallel_tool_calls": bool(request.tools and request.tools.several),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "temperature": request.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": request.sampling.top_p,
            "truncation": "disabled",
            **request.sent,
            "store": False,
        }
        self._items: list[Json] = []
        self._n_events = 0
        self._usage = Usage()
        self._is_done = False

    @property
    def is_done(self) -> bool:
        return self._is_done

    def opening(self) -> list[Json]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def take(self, event: Event) -> list[Json]:
        if isinstance(event, Piece):
            return self._told(self._answer.push(event.text, event.n_tokens))
        if isinstance(event, AnswerEnd):
            self._usage, self._is_done = event.usage, True
            events = self._told(self._answer.end(event.reason))
            return events + self._close("incomplete" if self._answer.reason == "length" else "completed")
        return []

    def closing(self) -> list[Json]:
        whole = self.whole()
        return [self._event(f"response.{whole['status']}", response=whole)]

    def failed(self, error: RequestError) -> list[Json]:
        told = error.as_json()["error"]
        response = self._response("failed") | {"error": {"code": "server_error", "message": told["message"]}}
        return [self._event("response.failed", response=response)]

    def whole(self) -> Json:
        cut = self._answer.reason == "length"
        usage = {
            "input_tokens": self._usage.prompt,
            "input_tokens_details": {"cached_tokens": self._usage.cached},
            "output_tokens": self._usage.completion,
            "output_tokens_details": {"reasoning_tokens": self._answer.n_reasoning},
            "total_tokens": self._usage.prompt + self._usage.completion,
        }
        response = self._response("incomplete" if cut else "completed") | {"usage": usage}
        return response | {"incomplete_details": {"reason": "max_output_tokens"} if cut else None}

    def encoded(self, value: Json) -> bytes:
        data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return f"event: {value['type']}\ndata: {data}\n\n".encode()

    def _response(self, status: str) -> Json:
        return {**self._base, "status": status, "output": [dict(item) for item in self._items]}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _told(self, deltas: Sequence[Delta]) -> list[Json]:
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

    def _text(self, delta: Content | Reasoning) -> list[Json]:
        """More of a message, or of what is thought before it."""
        kind, part = ("message", "output_text") if isinstance(delta, Content) else ("reasoning", "reasoning_text")
        events: list[Json] = []
        if not (self._items and self._items[-1]["type"] == kind and self._items[-1]["status"] == "in_progress"):
            if not delta.text.strip():
                return []
            events += self._close()
            extra: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            events += self._open("msg" if kind == "message" else "rs", {"type": kind, **extra, "content": []})
            empty: Json = {"type": part, "text": ""} | (
                {"annotations": [], "logprobs": []} if kind == "message" else {}
            )
            self._items[-1]["content"].append(empty)
            events.append(self._change("response.content_part.added", content_index=0, part=dict(empty)))
        self._items[-1]["content"][0]["text"] += delta.text
        more: Json = {"logprobs": []} if kind == "message" else {}
        events.append(self._change(f"response.{part}.delta", content_index=0, delta=delta.text, **more))
        return events

    def _open(self, prefix: str, item: Json) -> list[Json]:
        self._items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item})
        place = len(self._items) - 1
        return [self._event("response.output_item.added", output_index=place, item=_copied(self._items[-1]))]

    def _close(self, status: str = "completed") -> list[Json]:
        """The end of the item that is open."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item, events = self._items[-1], []
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._change("response.function_call_arguments.done", **done))
        else:
            part = item["content"][0]
            extra: Json = {"logprobs": []} if item["type"] == "message" else {}
            events.append(
                self._change(f"response.{part['type']}.done", content_index=0, text=part["text"], **extra)
            )
            events.append(self._change("response.content_part.done", content_index=0, part=dict(part)))
        item["status"] = status
        place = len(self._items) - 1
        return [*events, self._event("response.output_item.done", output_index=place, item=_copied(item))]

    def _change(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)


def _copied(item: Json) -> Json:
    """A snapshot: the item goes on to grow."""
    copied: Json = json.loads(json.dumps(item))
    return copied
