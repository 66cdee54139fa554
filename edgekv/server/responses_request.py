"""Requests of OpenAI's responses API in its simple form: each brings its whole conversation, as nothing is stored.

Source: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from msgspec import Meta

from edgekv.schema import shown
from edgekv.server.checked_request import CheckedRequest, check_chat
from edgekv.server.protocol import (
    MAX_MESSAGES,
    MAX_TOOLS,
    RESPONSES_FIELDS,
    CalledFunction,
    ChatRequest,
    Function,
    IgnoredFields,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedTool,
    Positive,
    RequestError,
    ResponseFormat,
    StrictStruct,
    Tool,
    ToolCall,
    read,
)

TEXTS, IMAGE = ("input_text", "output_text", "text"), "input_image"
RETURNED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "user",
)


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


class FunctionTool(Function, tag_field="type", tag="function"):
    """What the model may call."""


class FunctionChoice(StrictStruct):
    """Which tool must be called."""

    name: str
    type: Literal["function"] = "function"


class FunctionCall(StrictStruct):
    """What an earlier answer called."""

    name: str
    arguments: str
    call_id: str = ""


class ResponsesRequest(IgnoredFields, kw_only=True):
    """POST /v1/responses; the last fields change nothing here."""

    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
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


def check_response(body: Any) -> tuple[str, CheckedRequest]:
    """The name of the model, and the same request to /v1/chat/completions. Raises RequestError."""
    if isinstance(body, dict) and body.get("previous_response_id") is not None:
        message = "nothing is stored here: send the whole conversation as 'input', without previous_response_id"
        raise RequestError(400, message, param="previous_response_id")
    request = read(body, ResponsesRequest)
    messages, places = _messages(request)
    choice = request.tool_choice
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
        tools=[Tool(tool) for tool in request.tools or ()],
        tool_choice=NamedTool(NamedFunction(choice.name)) if isinstance(choice, FunctionChoice) else choice,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        response_format=_format(request.text.format if request.text else None),
    )
    sent = {name: body[name] for name in RETURNED if body.get(name) is not None}
    return request.model, dataclasses.replace(check_chat(chat, RESPONSES_FIELDS, places), sent=sent)


def _format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None:
        return None
    if form.type != "json_schema":
        return ResponseFormat(form.type)
    if form.schema is None:
        raise RequestError(400, "'text.format.schema' is missing", param="text.format.schema")
    return ResponseFormat("json_schema", JsonSchemaFormat(form.schema))


def _messages(request: ResponsesRequest) -> tuple[list[Message], list[str]]:
    """The input as messages, with calls in the assistant's before them, and what errors call each."""
    messages, places = list[Message](), list[str]()

    def add(message: Message, place: str) -> None:
        messages.append(message)
        places.append(place)

    if request.instructions:
        add(Message("system", request.instructions), "instructions")
    if isinstance(request.input, str):
        add(Message("user", request.input), "input")
        return messages, places
    for i, item in enumerate(request.input):
        kind, place = item.get("type", "message"), f"input[{i}]"
        if kind == "message":
            given = {"role": item.get("role"), "content": _content(item.get("content"), place)}
            add(read(given, Message, place), place)
        elif kind == "function_call":
            item = {name: item.get(name) for name in ("name", "arguments", "call_id")}
            called = read(item, FunctionCall, place)
            if not messages or messages[-1].role != "assistant":
                add(Message("assistant"), place)
            call = ToolCall(CalledFunction(called.name, called.arguments), called.call_id)
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
        elif kind == "function_call_output":
            given = {"content": _content(item.get("output"), place), "tool_call_id": item.get("call_id")}
            add(read({"role": "tool", **given}, Message, place), place)
        elif kind != "reasoning":  # what an earlier answer thought is not shown to the model again
            accepted = "message, function_call, function_call_output, reasoning"
            field = f"{place}.type"
            raise RequestError(400, f"{field!r} is {shown(kind)}; accepted: {accepted}", param=field)
    return messages, places


def _content(content: Any, place: str) -> Any:
    """The parts of a message as those of a chat."""
    if not isinstance(content, list):
        return content
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in TEXTS:
            parts.append({"type": "text", "text": part.get("text")})
        elif kind == IMAGE and isinstance(part.get("image_url"), str):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            accepted, field = f"{', '.join(TEXTS)}, {IMAGE} with an image_url", f"{place}.content[{i}]"
            raise RequestError(400, f"{field!r} is {shown(part)}; accepted: {accepted}", param=field)
    return parts
