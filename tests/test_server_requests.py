"""What a request to `edgekv serve` may say, and how each other one is refused in one line."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from serving import Server, post, serving

from edgekv.server.checked_request import check_chat
from edgekv.server.protocol import ChatRequest, RequestError, read

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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), "--kv", "onebit") as running:
        yield running


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_said_in_one_line(name: str, server: Server) -> None:
    fields, param, message = BAD[name]
    body = {"model": "demo", "messages": USER, **fields} if isinstance(fields, dict) else fields
    got, answer = post(server, "/v1/chat/completions", json.dumps(body).encode())
    assert got == 400, answer
    assert message in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", param)


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
def test_each_endpoint_names_its_own_fields(name: str, server: Server) -> None:
    path, fields, param, message = ELSEWHERE[name]
    got, answer = post(server, f"/v1/{path}", json.dumps({"model": "demo", **fields}).encode())
    assert (got, answer["error"]["param"]) == (400, param), answer
    assert message in answer["error"]["message"]


def test_the_type_of_a_body_has_no_case(server: Server) -> None:
    body = b'{"model": "demo", "prompt": "x", "max_tokens": 1}'
    for kind in ("APPLICATION/JSON", "Application/Json; charset=UTF-8"):
        assert post(server, "/v1/completions", body, **{"Content-Type": kind})[0] == 200


def test_a_body_without_end(server: Server) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "x" * 2_000_000}]}
    got, answer = post(server, "/v1/chat/completions", json.dumps(body).encode())
    assert got == 413
    assert "1048576 bytes" in answer["error"]["message"]


BAD_BYTES = {
    "not JSON": (b"{", {}, 400, "not valid JSON"),
    "not UTF-8": (b"\xff\xfe{", {}, 400, "not valid JSON"),
    "deep": (b"[" * 100_000, {}, 400, "not valid JSON"),
    "rather deep": (
        b'{"model": "m", "prompt": "x", "user": ' + b"[" * 200 + b"]" * 200 + b"}",
        {},
        400,
        "more than 128",
    ),
    "another type": (b"{}", {"Content-Type": "text/plain"}, 415, "application/json"),
    "empty": (b"", {}, 400, "not valid JSON"),
    "NaN": (b'{"model": "demo", "prompt": "x", "metadata": NaN}', {}, 400, "NaN is no number"),
    "infinity": (b'{"model": "demo", "prompt": "x", "metadata": [-Infinity]}', {}, 400, "-Infinity is no number"),
    "a number without bound": (b'{"model": "demo", "prompt": "x", "top_p": 1e999}', {}, 400, "top_p=inf"),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_bodies_that_are_no_json(name: str, server: Server) -> None:
    body, headers, status, message = BAD_BYTES[name]
    got, answer = post(server, "/v1/completions", body, **headers)
    assert got == status
    assert message in answer["error"]["message"]


@pytest.mark.parametrize("prompt", [["a", 1], [], {"a": 1}, [1.5], [True], [99999], [-1], [["a"]], [[]], 3])
def test_bad_prompts(prompt: object, server: Server) -> None:
    got, answer = post(server, "/v1/completions", json.dumps({"model": "demo", "prompt": prompt}).encode())
    assert got == 400
    assert (
        "'prompt" in answer["error"]["message"] or "outside the model's vocabulary" in answer["error"]["message"]
    )


def test_wrong_paths_and_methods(server: Server) -> None:
    for path, method, status in (("/nope", "GET", 404), ("/v1/completions", "GET", 405), ("/health", "POST", 405)):
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
        connection.request(method, path)
        answer = connection.getresponse()
        assert answer.status == status
        assert json.loads(answer.read())["error"]["message"]
        connection.close()


def test_a_name_from_elsewhere_is_refused(server: Server) -> None:
    """A page on another site that points its own name here."""
    request = urllib.request.Request(f"{server.url}/health", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403") as error:
        urllib.request.urlopen(request, timeout=30)
    error.value.close()


def test_host_names_have_no_case(server: Server) -> None:
    host = f"LocalHost:{urlsplit(server.url).port}"
    request = urllib.request.Request(f"{server.url}/health", headers={"Host": host})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


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
    ask = check_chat(read(body, ChatRequest))
    assert ask.messages == [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]
    assert (ask.sampling.temperature, ask.sampling.top_p, ask.sampling.seed) == (1.0, 0.5, 2**64 - 3)
    assert (ask.stop, ask.include_usage, ask.schema) == (("x",), True, {"type": "object"})
    with pytest.raises(RequestError, match="unknown field 'stream_options"):
        check_chat(read(body | {"stream_options": {"x": 1}}, ChatRequest))
