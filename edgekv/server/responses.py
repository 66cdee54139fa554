"""OpenAI's responses API in its simple form: nothing is stored, so that a request brings its whole conversation.

Source: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from edgekv.server.answer import CallArguments, CallBegin, Content, Delta, Reasoning
from edgekv.server.ask import Ask
from edgekv.server.jobs import Done, EncodedPrompt, Event, Piece, Usage
from edgekv.server.protocol import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    Positive,
    RequestError,
    _Closed,
    read,
)
from edgekv.server.shapes import ChatAnswer, Json
from edgekv.server.tools import ToolFormat

TEXTS, IMAGE = ("input_text", "output_text", "text"), "input_image"


class TextFormat(_Closed):
    """As ResponseFormat, its schema without a level between."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(_Closed):
    """verbosity changes nothing here."""

    format: TextFormat | None = None
    verbosity: Any = None


class Effort(_Closed):
    """How long to think; summaries are not made."""

    effort: str | None = None
    summary: Any = None


class ResponsesRequest(_Closed, kw_only=True):
    """POST /v1/responses; the last fields change nothing here."""

    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Effort | None = None
    previous_response_id: None = None
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    store: Any = None
    include: Any = None
    metadata: Any = None
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    stream_options: Any = None
    max_tool_calls: Any = None
    top_logprobs: Literal[0] = 0


def chat_request(body: Any) -> ChatRequest:
    """The same request to /v1/chat/completions. Raises RequestError."""
    if isinstance(body, dict) and body.get("previous_response_id") is not None:
        message = "nothing is stored here: send the whole conversation as 'input', without previous_response_id"
        raise RequestError(400, message, param="previous_response_id")
    request = read(body, ResponsesRequest)
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    for i, item in enumerate(items):
        _add(messages, item, f"input[{i}]")
    choice: Any = request.tool_choice
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    form = request.text.format if request.text else None
    given = {
        "model": request.model,
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": request.stream,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())],
        "tool_choice": choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
    }
    if form is not None:
        schema = {"name": form.name, "schema": form.schema} if form.type == "json_schema" else None
        given["response_format"] = {"type": form.type, "json_schema": schema}
    return read(given, ChatRequest)


def _tool(tool: Json, name: str) -> Json:
    if tool.get("type") != "function":
        raise RequestError(400, f"{name}.type is {tool.get('type')!r:.40}; accepted: function", param=name)
    fields = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in fields if key in tool}}


def _add(messages: list[Json], item: Json, name: str) -> None:
    """One item of the input as a message, or as a call of the last one. Raises RequestError."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _content(item.get("content"), name)})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id") or "", "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        content = _content(item.get("output"), name)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id") or "", "content": content})
    elif kind != "reasoning":  # what an earlier answer thought is not shown to the model again
        accepted = "message, function_call, function_call_output, reasoning"
        raise RequestError(400, f"{name}.type is {kind!r:.40}; accepted: {accepted}", param=name)


def _content(content: Any, name: str) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in TEXTS:
            parts.append({"type": "text", "text": part.get("text")})
        elif kind == IMAGE and part.get("image_url") is not None:
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            accepted = f"{', '.join(TEXTS)}, {IMAGE} with an image_url"
            raise RequestError(400, f"{name}.content has a part {kind!r:.40}; accepted: {accepted}", param=name)
    return parts


class ResponsesShape:
    """The answer: items of the kinds reasoning, message, function_call, and the events that build them."""

    last_line = b""

    def __init__(self, model: str, ask: Ask, prompts: Sequence[EncodedPrompt], form: ToolFormat) -> None:
        self._answer = ChatAnswer(ask, prompts[0].thinks, form)
        self._base: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": bool(ask.tools and ask.tools.several),
            "temperature": ask.sampling.temperature,
            "top_p": ask.sampling.top_p,
            "tool_choice": "required" if ask.tools and ask.tools.forced else "auto",
            "tools": [],
            "store": False,
        }
        self._items: list[Json] = []
        self._n_events = 0
        self._usage = Usage()
        self.is_done = False

    def opening(self) -> list[Json]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def take(self, event: Event) -> list[Json]:
        if isinstance(event, Piece):
            return self._told(self._answer.push(event.text))
        if isinstance(event, Done):
            self._usage, self.is_done = event.usage, True
            events = self._told(self._answer.end(event.reason))
            return events + self._close()
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
            "output_tokens_details": {"reasoning_tokens": 0},
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

    def _close(self) -> list[Json]:
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
        item["status"] = "completed"
        place = len(self._items) - 1
        return [*events, self._event("response.output_item.done", output_index=place, item=_copied(item))]

    def _change(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)


def _copied(item: Json) -> Json:
    """A snapshot: the item goes on to grow."""
    copied: Json = json.loads(json.dumps(item))
    return copied
