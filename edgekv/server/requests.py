"""Requests of OpenAI's API: structs that msgspec fills from JSON and checks.

Source: https://platform.openai.com/docs/api-reference (chat, completions, embeddings), with the additions of
llama.cpp's server (top_k, min_p, chat_template_kwargs, return_progress, timings_per_token). Null means absent;
absent settings have the model's defaults; undeclared fields are refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Struct

from edgekv.checks import MAX_INT64, Count, Natural, in_words
from edgekv.engine.sampling import SamplingParams
from edgekv.engine.tools import IsFunction, Tool, Tools, json_value
from edgekv.errors import (
    ConfigError,
    ContextError,
    EdgeKVError,
    MemoryBudgetError,
    SessionError,
    as_argument,
    nearest,
    short_repr,
)
from edgekv.text import as_text
from edgekv.text.template import PLACEHOLDER

MAX_MESSAGES, MAX_STOPS, MAX_CHOICES, MAX_TOOLS, MAX_TOP, MAX_IMAGES = 4096, 16, 128, 128, 20, 16
MAX_NESTING = 128  # of nested lists and objects
LOGPROB_BYTES = 200  # of a log probability with its token, as Python objects and JSON
FAILED = "the server failed on this request; its log says why"
SAMPLING = [f.name for f in dataclasses.fields(SamplingParams) if f.name not in ("seed", "repetition_window")]
IGNORED = re.compile("user|metadata|store|service_tier|safety_identifier|prompt_cache_(key|retention)|verbosity")
FIXED_NAMES = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
T = TypeVar("T", bound=Struct)

Stop = Annotated[str, Meta(min_length=1)]
Top = Annotated[int, Meta(ge=0, le=MAX_TOP)]
Texts = str | Annotated[list[str | Natural | list[Natural]], Meta(min_length=1)]
IsText = Annotated[str, Meta(pattern=r"^(text)\Z")]


class RequestError(EdgeKVError):
    """A request that can't be served. status: the HTTP status; code: OpenAI's; param: the field that is wrong."""

    def __init__(self, status: int, message: str, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message, field=param)
        self.status, self.code, self.param = status, code, param
        # OpenAI's clients retry a request that may be served later.
        self.headers = {"Retry-After": "1"} if status in (429, 503) else {}

    def as_json(self) -> dict[str, Any]:
        """Returns OpenAI's error object."""
        client = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else client
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad_field(name: str, value: Any, accepted: str) -> RequestError:
    """Returns the error for a field's value. accepted: a description of the accepted values."""
    return RequestError(400, f"{name!r} is {short_repr(value)}; accepted: {accepted}", param=name)


def request_error(error: BaseException, names: Mapping[str, str] | None = None) -> RequestError:
    """Returns any error as a RequestError: 503 for lack of memory or an interruption, 500 for a fault of edgekv.

    names: the endpoint's fields, by parameters of the library.
    """
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, EdgeKVError):
        return RequestError(500, FAILED, "internal_error")
    if isinstance(error, (MemoryBudgetError, SessionError)):
        code = "overloaded" if isinstance(error, MemoryBudgetError) else "interrupted"
        return RequestError(503, str(error), code)
    code = "context_length_exceeded" if isinstance(error, ContextError) else "invalid_request"
    field_of = dict(names or {})
    text = error.render(lambda name, value: as_argument(field_of.get(name, name), value))
    return RequestError(400, text, code, field_of.get(error.field or "", error.field))


class StrictStruct(Struct, forbid_unknown_fields=True):
    """The base of JSON objects that refuse undeclared fields."""


class ImageUrl(StrictStruct):
    url: str
    detail: str | None = None  # not used


class Part(StrictStruct):
    """A part of a message: a text or an image."""

    type: Annotated[str, Meta(pattern=r"^(text|image_url)\Z")]
    text: str = ""
    image_url: ImageUrl | None = None

    def __post_init__(self) -> None:
        if (self.image_url is None) == (self.type == "image_url"):
            raise ValueError("Expected image_url where that is its type")


class CalledFunction(StrictStruct):
    name: str
    arguments: str = "{}"  # JSON, as the model wrote it

    def as_turn(self) -> dict[str, Any]:
        """Returns the call for chat templates, with its arguments as an object if they are valid JSON."""
        value = json_value(self.arguments)
        return {"name": self.name, "arguments": value if isinstance(value, dict) else self.arguments}


class ToolCall(StrictStruct):
    """A call in an earlier answer; in tool_choice, the tool that must be called."""

    function: CalledFunction
    id: str = ""
    type: IsFunction = "function"
    index: int | None = None


class Message(StrictStruct):
    """A message of a chat. Other fields of OpenAI's own answers are accepted if they are empty."""

    role: Annotated[str, Meta(pattern=r"^(system|developer|user|assistant|tool)\Z")]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None

    @property
    def images(self) -> list[str]:
        """The URLs of the images, in order."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part.image_url.url for part in parts if part.image_url]

    def as_turn(self, field: str) -> dict[str, Any]:
        """Returns the message for chat templates: one text, with a mark for each image, and calls as objects.

        field: the name of the message in errors. Raises RequestError.
        """
        role = "system" if self.role == "developer" else self.role
        if self.content is None and role != "assistant":
            raise RequestError(400, f"'{field}.content' is missing", param=f"{field}.content")
        if self.tool_calls and role != "assistant":
            raise RequestError(400, f"{field} has 'tool_calls'; only an assistant's has", param=field)
        turn: dict[str, Any] = {"role": role, "content": self._text()}
        if self.images:
            turn["images"] = True
        if self.reasoning_content:
            turn["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.as_turn()}
                for call in self.tool_calls
            ]
        if role == "tool":
            turn |= {"tool_call_id": self.tool_call_id or ""} | ({"name": self.name} if self.name else {})
        return turn

    def _text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(
            f"{PLACEHOLDER}\n" if part.image_url else as_text(part.text, [PLACEHOLDER])
            for part in self.content or ()
        )


class JsonSchema(StrictStruct):
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictStruct):
    """The format of the answer: text, any JSON object, or JSON of a schema."""

    type: Annotated[str, Meta(pattern=r"^(text|json_object|json_schema)\Z")]
    json_schema: JsonSchema | None = None


class StreamOptions(StrictStruct):
    include_usage: bool | None = None  # whether a last chunk has the counts
    include_obfuscation: bool | None = None


class Request(StrictStruct, kw_only=True):
    """The fields that chat and text completions share. `SamplingParams` checks the ranges of its settings.

    names: the endpoint's fields, by parameters of the library.
    """

    names: ClassVar[Mapping[str, str]] = {"json_schema": "response_format"}

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_progress: bool = False
    timings_per_token: bool = False
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Meta(ge=-MAX_INT64, le=MAX_INT64)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    response_format: ResponseFormat | None = None

    def __post_init__(self) -> None:
        self.sampling(SamplingParams())
        form = self.response_format
        if form and form.type == "json_schema" and self.schema is None:
            name = "response_format.json_schema.schema"
            raise RequestError(400, f"{name!r} is missing", param=name)

    def sampling(self, defaults: SamplingParams, choice: int = 0) -> SamplingParams:
        """Returns the settings of answer ``choice``, which is added to the seed. defaults: for absent settings."""
        settings = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        seed = None if self.seed is None else self.seed % (1 << 64) + choice
        try:
            return dataclasses.replace(defaults, **settings, seed=seed)
        except ConfigError as error:
            raise RequestError(400, str(error), param=error.field) from None

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: any text."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"type": "object"}
        return form.json_schema.schema if form.json_schema else None

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def n_logprobs(self) -> int | None:
        """The number of likeliest tokens to report beside each token; None: no log probabilities."""
        raise NotImplementedError

    @property
    def tools_allowed(self) -> Tools | None:
        """The tools of the request, if any."""
        return None


class ChatRequest(Request, kw_only=True):
    """The body of POST /v1/chat/completions."""

    names: ClassVar = {"prompt": "messages", "images": "messages", "json_schema": "response_format"}

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Top = 0
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[str, Meta(pattern=r"^(none|auto|required)\Z")] | ToolCall = "auto"
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    modalities: Annotated[list[IsText], Meta(max_length=1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        tools, fixed = self.tools_allowed, [n for n in self.chat_template_kwargs or () if n in FIXED_NAMES]
        if fixed:
            message = f"chat_template_kwargs sets {fixed[0]!r}, which the server does"
            raise RequestError(400, message, param=fixed[0])
        if (n := len(self.images)) > MAX_IMAGES:
            raise RequestError(400, f"{n} images; accepted: up to {MAX_IMAGES}", param=self.names["images"])
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        if self.top_logprobs and not self.logprobs:
            raise RequestError(400, "'top_logprobs' needs \"logprobs\": true", param="top_logprobs")
        if tools and tools.forced and not tools.callable:
            raise RequestError(400, "'tool_choice' asks for a tool that 'tools' has not", param="tool_choice")

    def turns(self) -> list[dict[str, Any]]:
        """Returns the messages as chat templates take them. Raises RequestError."""
        return [message.as_turn(f"messages[{i}]") for i, message in enumerate(self.messages)]

    @property
    def images(self) -> list[str]:
        """Data URLs in the order of the messages."""
        return [url for message in self.messages for url in message.images]

    @property
    def n_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def tools_allowed(self) -> Tools | None:
        """The tools. All are in the prompt whatever tool_choice says, so that the next request finds it cached."""
        choice, functions = self.tool_choice, tuple(tool.function for tool in self.tools or ())
        several, forced = self.parallel_tool_calls, choice not in ("none", "auto")
        if not functions and not forced:
            return None
        can = () if choice == "none" else functions
        if isinstance(choice, ToolCall):
            can = tuple(function for function in functions if function.name == choice.function.name)
        return Tools(functions, can, forced, several is True if forced else several is not False)


class CompletionRequest(Request, kw_only=True):
    """The body of POST /v1/completions. prompt: a text, token ids, or a list of such prompts."""

    prompt: Texts
    logprobs: Top | None = None
    echo: bool = False
    best_of: Annotated[int, Meta(ge=1, le=1)] = 1
    suffix: Annotated[str, Meta(max_length=0)] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.echo:
            raise bad_field("echo", self.echo, "false")
        if (n := len(prompt_list(self.prompt, "prompt"))) * self.n > MAX_CHOICES:
            message = f"{n} prompts with n={self.n} are more than {MAX_CHOICES} answers"
            raise RequestError(400, f"{message}: ask in parts", param="n")

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs


class EmbeddingRequest(StrictStruct, kw_only=True):
    """The body of POST /v1/embeddings."""

    names: ClassVar[Mapping[str, str]] = {"prompt": "input"}
    n: ClassVar = 1
    stream: ClassVar = False

    model: str = ""
    input: Texts
    encoding_format: Annotated[str, Meta(pattern=r"^(float|base64)\Z")] = "float"
    dimensions: Count | None = None


AnyRequest = Request | EmbeddingRequest


def logprob_bytes(request: AnyRequest, lengths: Iterable[int], ctx: int, max_new_tokens: int) -> int:
    """Returns an upper bound of the bytes of a request's log probabilities. lengths: tokens of the prompts."""
    if isinstance(request, EmbeddingRequest) or request.n_logprobs is None:
        return 0
    n_tokens = sum(min(request.max_tokens or max_new_tokens, ctx - length + 1) for length in lengths)
    return LOGPROB_BYTES * (1 + request.n_logprobs) * request.n * n_tokens


def parse_json(data: bytes | bytearray) -> Any:
    """Returns the value of a JSON body; the last value counts if a key is repeated.

    Raises RequestError (400) for invalid JSON (NaN and Infinity included), for half of a surrogate pair, and for
    more than MAX_NESTING nested objects, so that later code can recurse.
    """
    try:
        value = msgspec.json.decode(data)
        level = [value] if data.count(b"[") + data.count(b"{") > MAX_NESTING else []
        for _ in range(MAX_NESTING):
            inner = (x.values() if isinstance(x, dict) else x for x in level)
            level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if level:
            raise ValueError(f"more than {MAX_NESTING} lists and objects within each other")
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not valid JSON ({error})", "invalid_json") from None
    return value


def prompt_list(prompt: str | list[Any], name: str) -> list[str | list[int]]:
    """Returns the list of prompts. Raises RequestError if texts and ids are mixed, or one is empty."""
    if isinstance(prompt, str) or all(isinstance(item, int) for item in prompt):
        return [prompt]
    if len(prompt) > MAX_CHOICES or not all(item != [] and type(item) is type(prompt[0]) for item in prompt):
        raise bad_field(name, prompt, f"a text, the ids of its tokens, or a list of up to {MAX_CHOICES} such")
    return prompt


def parse_request(body: Any, kind: type[T]) -> T:
    """Returns the body as a struct. Raises RequestError (400) with the field, its value and what is accepted."""
    if not isinstance(body, dict):
        raise RequestError(400, f"the body is a JSON {type(body).__name__}; send an object")
    fields = {name: value for name, value in body.items() if value is not None and not IGNORED.fullmatch(name)}
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if field := re.search(r"(unknown|required) field `(.*?)`", reason):
        name = f"{path}.{field[2]}".strip(".")[:60]
        if field[1] == "required":
            raise RequestError(400, f"{name!r} is missing", param=name)
        accepted = "" if path else f"; accepted: {', '.join(sorted(kind.__struct_fields__))}"
        close = nearest(field[2], kind.__struct_fields__)
        hint = f"; did you mean {close}?" if close and not path else ""
        raise RequestError(400, f"unknown field {name!r}{accepted}{hint}", param=name)
    value: Any = fields
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and index.isdigit() and int(index) < len(value):
            value = value[int(index)]
    if texts := re.search(r"matching regex '\^\((.*)\)\\\\Z'", reason):
        raise bad_field(path, value, texts[1].replace("|", ", "))
    expected = re.match(r"Expected (.*?)(, got .*)?$", reason)
    raise bad_field(path, value, in_words(expected[1]) if expected else "a smaller number")
