"""Requests of OpenAI's responses API in its simple form: each brings its whole conversation, as nothing is stored.

Source: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from edgekv.server.chat_answer import Json
from edgekv.server.protocol import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    IgnoredFields,
    Positive,
    RequestError,
    StrictStruct,
    read,
)

TEXTS, IMAGE = ("input_text", "output_text", "text"), "input_image"


class TextFormat(StrictStruct):
    """As ResponseFormat, its schema without a level between."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(StrictStruct):
    """verbosity changes nothing here."""

    format: TextFormat | None = None
    verbosity: Any = None


class Effort(StrictStruct):
    """How long to think; summaries are not made."""

    effort: str | None = None
    summary: Any = None


class ResponsesRequest(IgnoredFields, kw_only=True):
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
    include: Any = None
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
