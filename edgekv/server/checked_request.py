"""From a request's fields to what the engine is asked for, the same for every endpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edgekv.errors import ConfigError
from edgekv.server.protocol import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MAX_CHOICES,
    MAX_IMAGES,
    ChatRequest,
    CompletionRequest,
    Function,
    ImagePart,
    Message,
    NamedTool,
    RequestError,
    ResponseFormat,
    SharedFields,
    listed,
)
from edgekv.session.sampling_params import SamplingParams
from edgekv.tokenizer import as_text
from edgekv.vision.prompt import PLACEHOLDER

LOGPROB_BYTES = 200  # of one, with its token, as Python's objects and as JSON
FIXED_NAMES = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


@dataclasses.dataclass(frozen=True)
class Tools:
    """What the model is told of, and what of it can be called: `callable`, perhaps nothing.

    forced: at least one call, and nothing else. several: more than one call may come.
    """

    functions: tuple[Function, ...]
    callable: tuple[Function, ...]
    forced: bool
    several: bool


@dataclasses.dataclass(frozen=True)
class CheckedRequest:
    """A checked request: ``messages`` of a chat, as templates know them, or ``prompts`` (texts or token ids).

    n: answers per prompt. max_tokens: None: the server's own. n_logprobs: None: none; else how many of the
    likeliest tokens beside each chosen one. images: data URLs in the order of the messages. template_names:
    variables for the chat template. fields: as protocol.CHAT_FIELDS, of the endpoint that was asked. sent: what of
    the request comes back with its answer.
    """

    sampling: SamplingParams
    messages: list[dict[str, Any]] | None = None
    prompts: tuple[str | list[int], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    return_progress: bool = False
    timings: bool = False
    n: int = 1
    echo: bool = False
    n_logprobs: int | None = None
    schema: dict[str, Any] | None = None
    tools: Tools | None = None
    images: tuple[str, ...] = ()
    template_names: dict[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, str] = dataclasses.field(default_factory=lambda: CHAT_FIELDS)
    sent: dict[str, Any] = dataclasses.field(default_factory=dict)

    def encoded(self) -> CheckedRequest:
        """Without what only its prompts were made of."""
        return dataclasses.replace(
            self, messages=None if self.messages is None else [], prompts=(), images=(), template_names={}
        )

    @property
    def keeps_objects(self) -> bool:
        """Whether anything of the request's JSON but texts is needed for its answer."""
        return bool(self.schema or self.tools or self.sent or self.sampling.logit_bias)

    def logprob_bytes(self, lengths: Iterable[int], ctx: int, max_new_tokens: int) -> int:
        """What log probabilities may take. lengths: of prompts; max_new_tokens: where the request has no limit."""
        if self.n_logprobs is None:
            return 0
        most = max_new_tokens if self.max_tokens is None else self.max_tokens
        n_tokens = sum(min(most, ctx - length + 1) + (length if self.echo else 0) for length in lengths)
        return LOGPROB_BYTES * (1 + self.n_logprobs) * self.n * n_tokens

    def sampling_of(self, choice: int) -> SamplingParams:
        """The settings of the n-th answer: a seed counts up."""
        seed = self.sampling.seed
        return self.sampling if seed is None else dataclasses.replace(self.sampling, seed=seed + choice)


def check_chat(
    request: ChatRequest, fields: Mapping[str, str] = CHAT_FIELDS, places: Sequence[str] = ()
) -> CheckedRequest:
    """Raises RequestError. places: what errors call the messages; fields: as a `CheckedRequest`'s."""
    names = dict(request.chat_template_kwargs or {})
    if fixed := [name for name in names if name in FIXED_NAMES]:
        raise RequestError(400, f"chat_template_kwargs sets {fixed[0]!r}, which the server does", param=fixed[0])
    if request.reasoning_effort is not None:
        names.setdefault("reasoning_effort", request.reasoning_effort)
        names.setdefault("enable_thinking", request.reasoning_effort != "none")
    images = [part.image_url.url for m in request.messages for part in _parts(m) if isinstance(part, ImagePart)]
    if len(images) > MAX_IMAGES:
        raise RequestError(400, f"{len(images)} images; accepted: up to {MAX_IMAGES}", param=fields["images"])
    if request.max_tokens == 0:
        raise RequestError(400, "'max_tokens' is 0; accepted: a whole number of 1 or more", param="max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise RequestError(400, "'top_logprobs' needs \"logprobs\": true", param="top_logprobs")
    return dataclasses.replace(
        _shared(request, fields),
        messages=[
            as_turn(message, places[i] if places else f"messages[{i}]")
            for i, message in enumerate(request.messages)
        ],
        max_tokens=request.max_completion_tokens or request.max_tokens,
        n_logprobs=request.top_logprobs if request.logprobs else None,
        tools=_tools(request),
        images=tuple(images),
        template_names=names,
    )


def check_completion(request: CompletionRequest) -> CheckedRequest:
    """Raises RequestError."""
    prompts = tuple(listed(request.prompt, "prompt"))
    if len(prompts) * request.n > MAX_CHOICES:
        many = f"{len(prompts)} prompts with n={request.n} are more than {MAX_CHOICES} answers"
        raise RequestError(400, f"{many}: ask in parts", param="n")
    if request.max_tokens == 0 and not request.echo:
        raise RequestError(400, "'max_tokens' is 0; accepted: 1 or more, 0 with echo", param="max_tokens")
    max_tokens = request.max_tokens
    return dataclasses.replace(
        _shared(request, COMPLETION_FIELDS),
        prompts=prompts,
        max_tokens=max_tokens,
        echo=request.echo,
        n_logprobs=request.logprobs,
    )


def _shared(request: SharedFields, fields: Mapping[str, str]) -> CheckedRequest:
    given = {name: getattr(request, name) for name in SAMPLING}
    try:
        sampling = SamplingParams(
            **given,
            seed=None if request.seed is None else request.seed % (1 << 64),
            logit_bias=request.logit_bias or None,  # type: ignore[arg-type]
        )
    except ConfigError as error:
        raise RequestError(400, str(error), param=error.field) from None
    stop = request.stop or ()
    return CheckedRequest(
        sampling,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=request.stream,
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        return_progress=request.return_progress,
        timings=request.timings_per_token,
        n=request.n,
        schema=_schema(request.response_format),
        fields=fields,
    )


def _schema(form: ResponseFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None:
        raise RequestError(400, "'response_format.json_schema' is missing", param="response_format")
    return form.json_schema.schema


def _tools(request: ChatRequest) -> Tools | None:
    """The prompt has all tools whatever the choice: what is cached of it serves the next request too."""
    choice, told = request.tool_choice, tuple(tool.function for tool in request.tools or ())
    can, several = told, request.parallel_tool_calls
    if isinstance(choice, NamedTool):
        can = tuple(function for function in told if function.name == choice.function.name)
    if choice == "required" or isinstance(choice, NamedTool):
        if not can:
            raise RequestError(400, "'tool_choice' asks for a tool that 'tools' has not", param="tool_choice")
        return Tools(told, can, forced=True, several=several is True)
    return Tools(told, can if choice == "auto" else (), False, several is not False) if told else None


def _parts(message: Message) -> list[Any]:
    return message.content if isinstance(message.content, list) else []


def as_turn(message: Message, name: str) -> dict[str, Any]:
    """A message as chat templates know it: one text, with a mark for each image, and arguments as objects."""
    role = "system" if message.role == "developer" else message.role
    if message.content is None and role != "assistant":
        raise RequestError(400, f"'{name}.content' is missing", param=f"{name}.content")
    turn: dict[str, Any] = {"role": role, "content": _content(message)}
    if any(isinstance(part, ImagePart) for part in _parts(message)):
        turn["images"] = True
    if message.reasoning_content:
        turn["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        if role != "assistant":
            raise RequestError(400, f"{name} has 'tool_calls'; only an assistant's has", param=name)
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if role == "tool":
        turn["tool_call_id"] = message.tool_call_id or ""
        if message.name:
            turn["name"] = message.name
    return turn


def _content(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(
        f"{PLACEHOLDER}\n" if isinstance(part, ImagePart) else as_text(part.text, [PLACEHOLDER])
        for part in message.content or ()
    )


def _arguments(text: str) -> Any:
    """The object that the JSON holds: templates write it themselves. What is none stays a text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
