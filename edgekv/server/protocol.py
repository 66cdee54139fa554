"""Requests of OpenAI's API, checked field by field.

Source: https://platform.openai.com/docs/api-reference (chat/completions and completions).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from edgekv.errors import ConfigError, EdgeKVError
from edgekv.session.sampling_params import SamplingParams

MAX_MESSAGES, MAX_STOPS = 4096, 16
MAX_NUMBER = 1 << 63  # beyond, Python's whole numbers don't fit where they go
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class RequestError(EdgeKVError):
    """A request that can't be served: HTTP status, OpenAI's error code, and the field that is to blame."""

    def __init__(self, status: int, message: str, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message, field=param)
        self.status, self.code, self.param = status, code, param

    def as_json(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Ask:
    """A checked request: ``messages`` of a chat, or the ``prompt`` of a completion (text or token ids)."""

    messages: list[dict[str, Any]] | None
    prompt: str | list[int] | None
    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    schema: dict[str, Any] | None = None


Check = Callable[[str, Any], Any]


def _refuse(name: str, value: Any, accepted: str) -> RequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return RequestError(400, f"{name!r} is {shown}; accepted: {accepted}", param=name)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -MAX_NUMBER < value < MAX_NUMBER:
        raise _refuse(name, value, "a number")
    return float(value)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_NUMBER:
        raise _refuse(name, value, "a whole number of 0 or more")
    return value


def _positive(name: str, value: Any) -> int:
    if _count(name, value) == 0:
        raise _refuse(name, value, "a whole number of 1 or more")
    return int(value)


def _seed(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -MAX_NUMBER < value < MAX_NUMBER:
        raise _refuse(name, value, "a whole number of 64 bits")
    return abs(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "true or false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refuse(name, value, "a text")
    return value


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)) or len(stops) > MAX_STOPS:
        raise _refuse(name, value, f"a text, or a list of at most {MAX_STOPS}")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise _refuse(name, value, "texts that are not empty")
    return tuple(stops)


def _include_usage(name: str, value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() <= {"include_usage", "include_obfuscation"}:
        raise _refuse(name, value, '{"include_usage": true}')
    return _flag(f"{name}.include_usage", value.get("include_usage", False))


def _prompt(name: str, value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) or (isinstance(value, list) and value and all(_is_id(i) for i in value)):
        return value
    raise _refuse(name, value, "one text, or the ids of its tokens")


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_NUMBER


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise _refuse(name, value, f"a list of 1 to {MAX_MESSAGES} messages")
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _refuse(name, message, '{"role": ..., "content": ...}')
    unknown = sorted(key for key, v in message.items() if key not in ("role", "content", "name") and v)
    if unknown:
        raise RequestError(400, f"{name} has {unknown[0]!r}; accepted: role, content, name", param=name)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _refuse(f"{name}.role", role, ", ".join(ROLES))
    return {"role": ROLES[role], "content": _content(f"{name}.content", message.get("content"))}


def _content(name: str, value: Any) -> str:
    """A text, or a list of text parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in value
    ):
        return "".join(part["text"] for part in value)
    raise _refuse(name, value, 'a text, or parts {"type": "text", "text": ...}')


def _schema(name: str, value: Any) -> dict[str, Any] | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise _refuse(name, value, '{"type": "text"}, "json_object", or "json_schema" with a schema')
    found: dict[str, Any] = schema["schema"]
    return found


def _only(*accepted: Any) -> Check:
    """A field that we know and can't do: its neutral values alone."""

    def check(name: str, value: Any) -> None:
        if value not in accepted:
            raise _refuse(name, value, f"{accepted[0]!r} (this server has no more)")

    return check


def _ignore(name: str, value: Any) -> None:
    """A field that changes nothing here."""


COMMON: dict[str, Check] = {
    "model": _text,
    "stream": _flag,
    "stream_options": _include_usage,
    "max_tokens": _positive,
    "temperature": _number,
    "top_p": _number,
    "top_k": _count,
    "min_p": _number,
    "repetition_penalty": _number,
    "seed": _seed,
    "stop": _stops,
    "response_format": _schema,
    "n": _only(1),
    "frequency_penalty": _only(0),
    "presence_penalty": _only(0),
    "logit_bias": _only({}),
    "user": _ignore,
    "metadata": _ignore,
    "store": _ignore,
    "service_tier": _ignore,
    "safety_identifier": _ignore,
    "prompt_cache_key": _ignore,
}
FIELDS: dict[str, dict[str, Check]] = {
    "chat": COMMON
    | {
        "messages": _messages,
        "max_completion_tokens": _positive,
        "logprobs": _only(False),
        "top_logprobs": _only(0),
        "tools": _only([]),
        "tool_choice": _only("none", "auto"),
        "parallel_tool_calls": _ignore,
        "modalities": _only(["text"]),
    },
    "completion": COMMON
    | {"prompt": _prompt, "echo": _only(False), "suffix": _only(""), "best_of": _only(1), "logprobs": _only(0)},
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}  # OpenAI's: no filter


def parse(body: Any, kind: str, served: str) -> Ask:
    """The request of endpoint ``kind`` (chat or completion) for the model ``served``. Raises RequestError."""
    if not isinstance(body, dict):
        raise RequestError(400, f"the body is a JSON {type(body).__name__}; send an object")
    fields = FIELDS[kind]
    for name in body:
        if name not in fields:
            raise RequestError(
                400, f"unknown field {name[:60]!r}; accepted: {', '.join(sorted(fields))}", param=name[:60]
            )
    values = {name: fields[name](name, value) for name, value in body.items() if value is not None}
    asked = "messages" if kind == "chat" else "prompt"
    for name in ("model", asked):
        if name not in values:
            raise RequestError(400, f"{name!r} is missing", param=name)
    if values["model"] != served:
        raise RequestError(
            404,
            f"the model {values['model'][:60]!r} does not exist; this server has {served!r}",
            "model_not_found",
        )
    try:
        sampling = SamplingParams(**DEFAULTS | {name: values[name] for name in SAMPLING if name in values})
    except ConfigError as error:
        raise RequestError(400, str(error), param=error.field) from None
    return Ask(
        messages=values.get("messages"),
        prompt=values.get("prompt"),
        sampling=sampling,
        max_tokens=values.get("max_completion_tokens", values.get("max_tokens")),
        stop=values.get("stop", ()),
        stream=values.get("stream", False),
        include_usage=values.get("stream_options", False),
        schema=values.get("response_format"),
    )
