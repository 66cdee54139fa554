"""Requests of OpenAI's API, declared field by field: types and ranges are in the structs, and msgspec checks them.

Source: https://platform.openai.com/docs/api-reference (chat, completions, embeddings), and what llama.cpp's server
adds to it (top_k, min_p, chat_template_kwargs, return_progress, timings_per_token). Null is as good as absent; a
field that is not declared is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, inspect

from edgekv.errors import ContextError, EdgeKVError, MemoryBudgetError, SessionError
from edgekv.schema import shown

MAX_MESSAGES, MAX_STOPS, MAX_CHOICES, MAX_TOOLS, MAX_TOP, MAX_IMAGES = 4096, 16, 128, 128, 20, 16
LARGEST = (1 << 63) - 1
RETRY_AFTER_S = "1"
FAILED = "the server failed on this request; its log says why"
PATH = r"([^.\[\]]+)|\[(\d+|\.\.\.)\]"  # of what a message of msgspec names
T = TypeVar("T", bound=Struct)

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
Seed = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Stop = Annotated[str, Meta(min_length=1)]
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class RequestError(EdgeKVError):
    """A request that can't be served: HTTP status, OpenAI's error code, and the field that is to blame."""

    def __init__(self, status: int, message: str, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message, field=param)
        self.status, self.code, self.param = status, code, param

    def as_json(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Retry-After where the same request may be served later: OpenAI's clients wait and ask again."""
        return {"Retry-After": RETRY_AFTER_S} if self.status in (429, 503) else {}


# What the library calls a parameter, to the request's field of it.
CHAT_FIELDS = {"prompt": "messages", "images": "messages", "json_schema": "response_format"}
COMPLETION_FIELDS = {"json_schema": "response_format"}
RESPONSES_FIELDS = {"prompt": "input", "images": "input", "json_schema": "text.format"}
EMBEDDING_FIELDS = {"prompt": "input"}


def request_error(error: EdgeKVError, fields: Mapping[str, str] | None = None) -> RequestError:
    """An error of the library as an answer: 503 where memory is short or a pass was interrupted, else 400.

    fields: as CHAT_FIELDS, of the endpoint.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, MemoryBudgetError):
        return RequestError(503, str(error), "overloaded")
    if isinstance(error, SessionError):
        return RequestError(503, str(error), "interrupted")
    code = "context_length_exceeded" if isinstance(error, ContextError) else "invalid_request"
    return RequestError(400, str(error), code, (fields or {}).get(error.field or "", error.field))


class StrictStruct(Struct, forbid_unknown_fields=True):
    """An object without fields that are not declared."""


class TextPart(StrictStruct, tag_field="type", tag="text"):
    """A piece of a message."""

    text: str


class ImageUrl(StrictStruct):
    """Where an image is; detail is not used."""

    url: str
    detail: str | None = None


class ImagePart(StrictStruct, tag_field="type", tag="image_url"):
    """An image in a message."""

    image_url: ImageUrl


class CalledFunction(StrictStruct):
    """arguments: JSON, as the model wrote it."""

    name: str
    arguments: str = "{}"


class ToolCall(StrictStruct):
    """What an answer asked for, as the client sends it back."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None


class Message(StrictStruct):
    """A turn. What OpenAI's own answers have beside role and content may come back, empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


class Function(StrictStruct):
    """parameters: a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictStruct):
    """What the model may call."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(StrictStruct):
    """Which function must be called."""

    name: str


class NamedTool(StrictStruct):
    """Which tool must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


class JsonSchemaFormat(StrictStruct):
    """schema: the JSON schema of the answer."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictStruct):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StreamOptions(StrictStruct):
    """include_usage: a last chunk with the counts."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class IgnoredFields(StrictStruct, kw_only=True):
    """Fields of OpenAI's API that change nothing here, with any value."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class SharedFields(IgnoredFields, kw_only=True):
    """The fields that chat and text completions share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_progress: bool = False
    timings_per_token: bool = False
    max_tokens: Count | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Count = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    n: Choices = 1
    response_format: ResponseFormat | None = None


class ChatRequest(SharedFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] = 0
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    verbosity: Any = None


class CompletionRequest(SharedFields, kw_only=True):
    """POST /v1/completions; a prompt is a text or the ids of its tokens, or a list of such prompts."""

    prompt: str | Annotated[list[str | Count | list[Count]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    echo: bool = False
    best_of: Literal[1] = 1
    suffix: Literal[""] = ""


class EmbeddingRequest(StrictStruct):
    """POST /v1/embeddings."""

    model: str
    input: str | Annotated[list[str | Count | list[Count]], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Positive | None = None
    user: Any = None


def read(body: Any, kind: type[T], at: str = "") -> T:
    """The request, or what stands ``at`` a path of one, as ``kind``.

    Raises RequestError (400): the field, its value and what is accepted.
    """
    if not isinstance(body, dict):
        raise RequestError(
            400, f"{at or 'the body'} is a JSON {type(body).__name__}; send an object", param=at or None
        )
    given = {name: value for name, value in body.items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _told(str(error), given, kind, at) from None


def listed(prompt: str | list[Any], name: str) -> list[str | list[int]]:
    """One prompt or several, as a list. Raises RequestError where texts and ids are mixed, or one is empty."""
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(item, int) for item in prompt):
        return [prompt]
    if len(prompt) > MAX_CHOICES or not all(item != [] and type(item) is type(prompt[0]) for item in prompt):
        accepted = f"a text, the ids of its tokens, or a list of up to {MAX_CHOICES} such"
        raise RequestError(400, f"{name!r} is {shown(prompt)}; accepted: {accepted}", param=name)
    return prompt


def _told(reason: str, given: dict[str, Any], kind: type[Struct], at: str) -> RequestError:
    """msgspec's reason in our words."""
    reason, _, path = reason.partition(" - at `$")
    place = path.rstrip("`").lstrip(".")
    types = _types_at(kind, place)

    def named(name: str) -> str:
        return f"{at}.{name}".strip(".")

    if unknown := re.search(r"contains unknown field `(.*)`", reason):
        fields = sorted(field.encode_name for each in types for field in getattr(each, "fields", ()))
        name = named(f"{place}.{unknown[1]}".strip("."))[:60]
        return RequestError(400, f"unknown field {name!r}; accepted: {', '.join(fields)}", param=name)
    if missing := re.search(r"missing required field `(.*?)`", reason):
        name = named(f"{place}.{missing[1]}".strip("."))
        return RequestError(400, f"{name!r} is missing", param=name)
    names = [json.dumps(value).strip('"') or '""' for each in types for value in getattr(each, "values", ())]
    if names and any(isinstance(each, inspect.StructType) for each in types):
        names.append("an object")
    expected = re.match(r"Expected (.*?)(, got .*)?$", reason)
    accepted = ", ".join(names) or (expected[1].replace("`", "") if expected else "a smaller number")
    value, name = shown(_value(given, place)), named(place)
    return RequestError(400, f"{name!r} is {value}; accepted: {accepted}", param=name)


def _types_at(kind: type[Struct], place: str) -> Sequence[inspect.Type]:
    """What may stand at a path such as messages[0].role."""
    found = _variants(inspect.type_info(kind))
    for key, _ in re.findall(PATH, place):
        inner: list[inspect.Type] = []
        for each in found:
            if isinstance(each, inspect.StructType):
                inner += [field.type for field in each.fields if field.encode_name == key]
                inner += [inspect.LiteralType((each.tag,))] if key == each.tag_field else []
            elif isinstance(each, inspect.DictType):
                inner.append(each.value_type)
            elif isinstance(each, inspect.ListType):
                inner.append(each.item_type)
        found = [variant for each in inner for variant in _variants(each)]
    return found


def _variants(kind: inspect.Type) -> list[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _variants(kind.type)
    return list(kind.types) if isinstance(kind, inspect.UnionType) else [kind]


def _value(given: Any, place: str) -> Any:
    """What stands at a path such as messages[0].role; its nearest known parent where the path is no index."""
    for key, index in re.findall(PATH, place):
        if isinstance(given, dict) and key in given:
            given = given[key]
        elif isinstance(given, list) and index.isdigit() and int(index) < len(given):
            given = given[int(index)]
    return given
