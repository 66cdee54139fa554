"""What a request to `edgekv serve` may say, and how each other one is refused in one line."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import DEMO, asked
from starlette.testclient import TestClient

from edgekv import SamplingParams, Session
from edgekv.errors import ConfigError
from edgekv.server.requests import ChatRequest, CompletionRequest, RequestError, parse_json, read

USER = [{"role": "user", "content": "x"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}
SEEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
BAD: dict[str, tuple[Any, str | None, str]] = {  # fields, who is to blame, what is said
    "no object": ([1], None, "JSON list"),
    "unknown field": ({"mirostat": 2}, "mirostat", "unknown field 'mirostat'; accepted: "),
    "no messages": ({"messages": None}, "messages", "is missing"),
    "no model": ({"model": None}, "model", "is missing"),
    "empty messages": ({"messages": []}, "messages", "length >= 1"),
    "a message that is a text": ({"messages": ["x"]}, "messages[0]", "is 'x'"),
    "a role": (
        {"messages": [{"role": "robot", "content": "x"}]},
        "messages[0].role",
        "assistant, developer, system, tool, user",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    "an odd field": ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "unknown"),
    "an image from elsewhere": (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "image_url",
        "data:image/png",
    ),
    "an image that it can't see": (
        {"messages": [{"role": "user", "content": [SEEN]}]},
        "messages",
        "takes no images",
    ),
    "a part": (
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
        "messages[0].content[0].type",
        "accepted: text, image_url",
    ),
    "a user's call": (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [FUNCTION]}]},
        "messages[0]",
        "only an assistant's",
    ),
    "a tool without a name": ({"tools": [{"function": {}}]}, "tools[0].function.name", "is missing"),
    "a tool's name": ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "matching regex"),
    "a choice of no tool": ({"tool_choice": "required"}, "tool_choice", "a tool that"),
    "a choice of another": (
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "a tool that",
    ),
    "a tool's schema": (
        {"tools": [{"function": {"name": "f", "parameters": {"type": 3}}}], "tool_choice": "required"},
        "tools",
        "can't be followed",
    ),
    "a choice of nothing": ({"tool_choice": "may"}, "tool_choice", "accepted: auto, none, required, an object"),
    "a field within": (
        {"stream_options": {"x": 1}},
        "stream_options.x",
        "accepted: include_obfuscation, include_usage",
    ),
    "a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
        "response_format",
        "can't be followed",
    ),
    "a number beyond all": ({"temperature": 10**400}, "temperature", "a smaller number"),
    "too many answers": ({"n": 1000}, "n", "<= 128"),
    "a bias": ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    "a bias beyond the vocabulary": ({"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs", "needs"),
    "a penalty": ({"frequency_penalty": 9}, "frequency_penalty", "from -2 to 2"),
    "temperature": ({"temperature": -1}, "temperature", "temperature=-1.0"),
    "a text as number": ({"temperature": "hot"}, "temperature", "is 'hot'; accepted: float"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens", "1 or more"),
    "stream": ({"stream": "yes"}, "stream", "accepted: bool"),
    "stop": ({"stop": [""]}, "stop[0]", ">= 1"),
    "a template's own": ({"chat_template_kwargs": {"messages": []}}, "messages", "which the server does"),
    "a huge prompt": ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages", "context is 1024"),
}


@pytest.fixture(scope="module")
def http() -> Iterator[TestClient]:
    with Session.load(DEMO, ctx=1024) as session, asked(session) as http:
        yield http


def refusal(http: TestClient, path: str, body: Any) -> tuple[int, str | None, str]:
    """Status, field and message of the answer; the message is one line."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post(f"/v1/{path}", content=data, headers={"Content-Type": "application/json"})
    error = answer.json().get("error", {"param": None, "message": "answered"})
    assert "\n" not in error["message"]
    assert answer.status_code == 200 or error["type"] == "invalid_request_error"
    return answer.status_code, error["param"], error["message"]


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_said_in_one_line(name: str, http: TestClient) -> None:
    fields, param, message = BAD[name]
    body = {"model": "demo", "messages": USER, **fields} if isinstance(fields, dict) else fields
    status, field, said = refusal(http, "chat/completions", body)
    assert (status, field) == (400, param), said
    assert message in said


ELSEWHERE: dict[str, tuple[str, dict[str, Any], str, str]] = {  # path, fields, who is to blame, what is said
    "echo": ("completions", {"prompt": [5, 99999], "echo": True, "logprobs": 1}, "prompt", "vocabulary"),
    "best_of": ("completions", {"prompt": "x", "best_of": 2}, "best_of", "accepted: 1"),
    "embedded": ("embeddings", {"input": "word " * 5000}, "input", "context is 1024"),
    "embedded ids": ("embeddings", {"input": [[99999]]}, "input", "vocabulary"),
    "a form": ("embeddings", {"input": "x", "encoding_format": "f"}, "encoding_format", "accepted: base64, float"),
    "a long input": ("responses", {"input": "word " * 5000}, "input", "context is 1024"),
    "no content": ("responses", {"instructions": "x", "input": [{"role": "user"}]}, "input[0].content", "missing"),
    "a role": (
        "responses",
        {"input": [{"role": "robot", "content": "x"}]},
        "input[0].role",
        "assistant, developer",
    ),
    "a part": ("responses", {"input": [{"role": "user", "content": [3]}]}, "input[0].content[0]", "input_text"),
    "an item": ("responses", {"input": [{"type": "web"}]}, "input[0].type", "function_call_output"),
    "a call": ("responses", {"input": [{"type": "function_call", "name": 3}]}, "input[0].name", "accepted: str"),
    "an image": (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": SEEN["image_url"]["url"]}]}]},
        "input",
        "takes no images",
    ),
    "most": ("responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens", ">= 1"),
    "top_p": ("responses", {"input": "x", "top_p": 2}, "top_p", "top_p=2"),
    "a tool": ("responses", {"input": "x", "tools": [{"type": "web"}]}, "tools[0].type", "accepted: function"),
    "a tool's name": (
        "responses",
        {"input": "x", "tools": [{"type": "function", "name": "a b"}]},
        "tools[0].name",
        "matching regex",
    ),
    "no schema": (
        "responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}},
        "text.format.schema",
        "is missing",
    ),
    "a schema": (
        "responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 3}}}},
        "text.format",
        "can't be followed",
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_each_endpoint_names_its_own_fields(name: str, http: TestClient) -> None:
    path, fields, param, message = ELSEWHERE[name]
    status, field, said = refusal(http, path, {"model": "demo", **fields})
    assert (status, field) == (400, param), said
    assert message in said


def test_the_type_and_size_of_a_body(http: TestClient) -> None:
    body = b'{"model": "demo", "prompt": "x", "max_tokens": 1}'
    for kind, status in {
        "APPLICATION/JSON": 200,
        "Application/Json; charset=UTF-8": 200,
        "text/plain": 415,
    }.items():
        assert http.post("/v1/completions", content=body, headers={"Content-Type": kind}).status_code == status
    long = {"model": "demo", "messages": [{"role": "user", "content": "x" * 2_000_000}]}
    status, _, said = refusal(http, "chat/completions", long)
    assert (status, "1048576 bytes" in said) == (413, True)


HUGE = b"1" + b"0" * 400
BODIES = [  # of completions, with what is said of them
    (b"{", "not valid JSON"),
    (b"\xff\xfe{", "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"model": "m", "prompt": "x", "user": ' + b"[" * 200 + b"]" * 200 + b"}", "more than 128"),
    (b"", "not valid JSON"),
    (b'{"model": "demo", "prompt": "x", "metadata": NaN}', "not valid JSON"),
    (b'{"model": "demo", "prompt": "x", "metadata": [-Infinity]}', "not valid JSON"),
    (b'{"model": "demo", "prompt": "x", "top_p": 1e999}', "out of range"),
]
BODIES += [
    (json.dumps({"model": "demo", "prompt": prompt, "max_tokens": 1}).encode(), "")
    for prompt in (["a", 1], [], {"a": 1}, [1.5], [True], [99999], [-1], [["a"]], [[]], 3, [10**400], "\ud800")
]
FIELDS = [  # of chats
    b'"temperature": ' + HUGE,
    b'"seed": ' + HUGE,
    b'"top_k": ' + HUGE,
    b'"max_tokens": 1e999',
    b'"temperature": NaN',
    b'"stop": "\\ud800"',
    b'"user": "\\udfff"',
    b'"messages": [{"role": [], "content": "x"}]',
    b'"messages": [{"role": {}, "content": "x"}]',
    b'"messages": [{"role": "user", "content": "\\ud83d"}]',
    b'"response_format": {"type": []}',
    b'"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}',
    b'"stream_options": {"include_usage": []}',
    b'"\\ud800": 1',
    b'"model": "\\ud800"',
    b'"max_tokens": ' + b"9" * 5000,
    b'"metadata": ' + b"[" * 5000 + b"]" * 5000,
    b'"stop": "\xff"',
]


def test_odd_bodies_are_the_clients_fault(http: TestClient) -> None:
    for body, message in BODIES:
        status, _, said = refusal(http, "completions", body)
        assert (status, message in said) == (400, True), (body[:60], said)
    begin = b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, '
    for field in FIELDS:
        body = begin + field + b"}"
        assert refusal(http, "chat/completions", body)[0] == 400, field[:60]


def test_a_valid_pair_of_surrogates_is_a_character() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00"}') == {"a": "\N{GRINNING FACE}"}


def test_of_two_values_of_a_key_the_last_counts() -> None:
    assert parse_json(b'{"n": 1, "a": {"n": 1, "n": 2}, "n": 3}') == {"n": 3, "a": {"n": 2}}


def test_numbers_beyond_all_bounds_are_refused_in_python_too() -> None:
    with pytest.raises(ConfigError):
        SamplingParams(temperature=10**400)
    with pytest.raises(RequestError):
        read({"model": "m", "prompt": "x", "temperature": 10**400}, CompletionRequest)


def test_wrong_paths_methods_and_names(http: TestClient) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)):
        answer = http.request(method, path)
        assert (answer.status_code, bool(answer.json()["error"]["message"])) == (status, True)
    for host, status in {"evil.example": 403, "LocalHost:80": 200, "[::1]:80": 403}.items():
        assert http.get("/health", headers={"Host": host}).status_code == status


def test_every_accepted_field_of_a_request() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c", "name": "d"},
        ],
        "temperature": None,
        "top_p": 0.5,
        "seed": -3,
        "stop": "x",
        "n": 1,
        "user": "someone",
        "logit_bias": {},
        "response_format": {"type": "json_object"},
        "stream_options": {"include_usage": True},
    }
    ask = read(body, ChatRequest)
    assert ask.turns() == [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]
    ask.fill(SamplingParams(temperature=0.25))
    params = ask.sampling()
    assert (params.temperature, params.top_p, params.seed) == (0.25, 0.5, 2**64 - 3)
    assert (ask.stops, ask.schema) == (("x",), {"type": "object"})
    with pytest.raises(RequestError, match="unknown field 'stream_options"):
        read(body | {"stream_options": {"x": 1}}, ChatRequest)
