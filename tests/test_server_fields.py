"""Every field of a request to `edgekv serve` changes the answer, or is refused."""

import dataclasses
import functools
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import power_trees as trees
import pytest
from helpers import text_of
from serving import DEMO, chat, open_endpoints, openai_client, samples
from slot_cases import at_once
from starlette.testclient import TestClient

from edgekv import Session
from edgekv.power.energy import SharedMeter

PROMPT, SEA = "It was a dark night when the old man", "Tell me of the sea."
USER = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def http(demo: Session) -> Iterator[TestClient]:
    origins = ["https://app.example"]
    with open_endpoints(demo, queue_limit=2, pool_bytes=100 << 20, origins=origins) as http:
        yield http


@pytest.fixture(scope="module")
def client(http: TestClient) -> Iterator[openai.OpenAI]:
    with openai_client(http) as client:
        yield client


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    asks = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return client.completions.create(**asks | options)


def sea(client: openai.OpenAI, **options: Any) -> Any:
    return chat(client, SEA, **{"max_tokens": 8} | options)


def test_a_completion_is_the_sessions_text(client: openai.OpenAI, demo: Session) -> None:
    answer, own = complete(client, max_tokens=24), demo.fork()
    greedy = dataclasses.replace(demo.model.sampling, temperature=0.0)
    expected = text_of(own.generate(PROMPT, max_new_tokens=24, sampling=greedy))
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "length")
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (24, len(own.tokens) - 24)
    ids = own.tokens[: answer.usage.prompt_tokens]
    assert complete(client, ids, max_tokens=24).choices[0].text == expected


def test_a_stream_brings_the_same_text(client: openai.OpenAI) -> None:
    whole = chat(client, SEA)
    chunks = list(chat(client, SEA, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_stop_seed_and_sampling(client: openai.OpenAI) -> None:
    texts = [chat(client, "Hello", temperature=1, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    whole = chat(client, "Hello").choices[0].message.content
    word = whole.split()[3]
    stopped = chat(client, "Hello", stop=[word])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == whole[: whole.index(word)]
    assert chat(client, "Hello", max_tokens=openai.omit, max_completion_tokens=3).usage.completion_tokens == 3


def test_a_json_schema_is_followed(client: openai.OpenAI) -> None:
    schema: Any = {"type": "object", "properties": {"ship": {"enum": ["cog", "hulk"]}}, "required": ["ship"]}
    named = {"name": "s", "schema": schema | {"additionalProperties": False}}
    form = {"type": "json_schema", "json_schema": named}
    answer = chat(client, "What?", response_format=form, temperature=1, max_tokens=80).choices[0]
    assert json.loads(answer.message.content)["ship"] in ("cog", "hulk")
    assert answer.finish_reason == "stop"


def test_metrics_are_prometheus(http: TestClient, client: openai.OpenAI) -> None:
    before = samples(http.get("/metrics").text)
    chat(client, "Count me", max_tokens=6)
    after = samples(http.get("/metrics").text)
    assert after["edgekv_generated_tokens_total"] == before["edgekv_generated_tokens_total"] + 6
    assert after["edgekv_tokens_per_second"] > 0
    assert not any("watts" in name or "joules" in name for name in after)  # not 0: there is no meter
    assert 0 < after["edgekv_cache_bytes"] <= 100 << 20
    assert after["edgekv_sessions"] > 0


@pytest.mark.parametrize("slots", [1, 2])
def test_the_energy_of_requests_is_told_where_there_is_a_meter(slots: int) -> None:
    """Whole and streamed, alone and beside another; all of it is in the metrics."""
    with Session.load(DEMO, kv="q8", ctx=1024, slots=slots) as session:
        options: Any = {"pool_bytes": 100 << 20, "power": SharedMeter(trees.Steady()), "slots": slots}
        with open_endpoints(session, **options) as http, openai_client(http) as client:
            begun_s = time.perf_counter()
            answers = at_once([functools.partial(sea, client, n=n, max_tokens=100) for n in (1, 2)])
            streams = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 100}
            answers += [list(sea(client, **streams))[-1], complete(client, max_tokens=100)]
            told = [answer.usage.energy_joules for answer in answers]
            seconds, after = time.perf_counter() - begun_s, samples(http.get("/metrics").text)
            assert min(told) > 0
            assert sum(told) == pytest.approx(after["edgekv_energy_joules_total"], abs=0.001)
            assert sum(told) < 4 * seconds * 1.01  # the board's 4 W once, not once for each slot
            assert after["edgekv_watts"] == pytest.approx(4, rel=0.2)
            assert "of rpi-pmic: a made-up board" in http.get("/metrics").text
            assert http.get("/props").json()["power_meter"] == "rpi-pmic: a made-up board"


def test_log_probabilities_take_memory_of_the_request(client: openai.OpenAI) -> None:
    """A request of 1 MB could else ask for gigabytes of them."""
    with pytest.raises(openai.APIStatusError, match="or ask for fewer") as error:
        sea(client, n=128, logprobs=True, top_logprobs=20, max_tokens=900)
    assert error.value.status_code == 413


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    options: Any = {"top_logprobs": 4, "extra_body": {"repetition_penalty": 1}}
    whole = sea(client, logprobs=True, **options)
    content = whole.choices[0].logprobs.content
    assert len(content) == 8
    assert "".join(entry.token for entry in content) == whole.choices[0].message.content
    for entry in content:  # greedy: the likeliest was chosen
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert bytes(entry.bytes).decode() == entry.token
        assert sum(np.exp(top.logprob) for top in entry.top_logprobs) <= 1
    chunks = list(sea(client, logprobs=True, stream=True, **options))
    streamed = [entry for chunk in chunks if (found := chunk.choices[0].logprobs) for entry in found.content]
    assert streamed == content
    assert sea(client).choices[0].logprobs is None


def test_several_answers(client: openai.OpenAI) -> None:
    answer = sea(client, n=3, temperature=1, seed=5)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert answer.usage.completion_tokens == 24
    again = [sea(client, temperature=1, seed=5 + i).choices[0].message.content for i in range(3)]
    assert again == texts
    streamed = ["", "", ""]
    for chunk in sea(client, n=3, temperature=1, seed=5, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert answer.usage.prompt_tokens == sea(client).usage.prompt_tokens


def test_lists_of_prompts(client: openai.OpenAI, demo: Session) -> None:
    """More answers than requests may wait."""
    prompts = ["Once", "The sea", "A man"]
    answer = complete(client, prompts, n=2, seed=3, temperature=1)
    assert [choice.index for choice in answer.choices] == list(range(6))
    singly = [complete(client, prompt, seed=3 + i, temperature=1) for prompt in prompts for i in range(2)]
    assert [choice.text for choice in answer.choices] == [each.choices[0].text for each in singly]
    assert answer.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in singly) / 2
    texts = [choice.text for choice in complete(client, [demo.encode(prompt) for prompt in prompts]).choices]
    assert texts == [complete(client, prompt).choices[0].text for prompt in prompts]


def test_embeddings(client: openai.OpenAI, demo: Session) -> None:
    """The client asks for base64 by itself."""
    texts = ["The sea was calm.", "A ship."]
    answer = client.embeddings.create(model="demo", input=texts)
    for found, text in zip(answer.data, texts, strict=True):
        assert found.embedding == pytest.approx(demo.embed(text).tolist(), abs=1e-6)
    assert answer.usage.total_tokens == sum(len(demo.encode(text)) for text in texts)
    floats = client.embeddings.create(model="demo", input=demo.encode(texts[1]), encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(answer.data[1].embedding, abs=1e-6)


def test_a_page_elsewhere_may_call_if_it_is_named(http: TestClient) -> None:
    headers = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, allowed in (("https://app.example", "https://app.example"), ("https://evil.example", None)):
        for method in ("OPTIONS", "GET"):
            answer = http.request(method, "/v1/models", headers={"Origin": origin, **headers})
            assert answer.headers.get("Access-Control-Allow-Origin") == allowed
            assert answer.status_code == (400 if method == "OPTIONS" and allowed is None else 200)


def test_what_is_unsaid_is_as_the_model_has_it(client: openai.OpenAI, http: TestClient, demo: Session) -> None:
    """Its generation_config, else what `edgekv run` takes: null is as good as absent, a value holds."""
    asks: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "seed": 4}
    own: Any = {"temperature": 1, "repetition_penalty": 1.1, "top_p": 0.95, "top_k": 40, "min_p": 0.05}
    texts = [
        http.post("/v1/completions", json={**asks, **more}).json()["choices"][0]["text"]
        for more in ({}, dict.fromkeys(own), own, {**own, "temperature": 0})
    ]
    assert texts[0] == texts[1] == texts[2] != texts[3]


def message(role: str = "user", content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **more}]}


def schema_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


FUNCTION = {"type": "function", "function": {"name": "f"}}
SEEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
BAD_TOOL = [{"function": {"name": "f", "parameters": {"type": 3}}}]
BAD: list[tuple[Any, str | None, str]] = [  # of chats: fields, which is to blame, what is answered
    ([1], None, "JSON list"),
    ({"mirostat": 2}, "mirostat", "unknown field 'mirostat'; accepted: "),
    (message("robot"), "messages[0].role", "system, developer, user, assistant, tool"),
    (message(content=[IMAGE]), "image_url", "data:image/png"),
    (message(content=[SEEN]), "messages", "takes no images"),
    (message(content=[{"type": "audio"}]), "messages[0].content[0].type", "accepted: text, image_url"),
    (message(tool_calls=[FUNCTION]), "messages[0]", "only an assistant's"),
    ({"tool_choice": "required"}, "tool_choice", "a tool that"),
    ({"tools": BAD_TOOL, "tool_choice": "required"}, "tools", "can't be followed"),
    ({"stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
    (schema_of({"type": 3}), "response_format", "can't be followed"),
    ({"temperature": 10**400}, "temperature", "a smaller number"),
    ({"temperature": "hot"}, "temperature", "accepted: a number or null"),
    (message(content=5), "messages[0].content", "accepted: a text or a list or null"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
    ({"top_logprobs": 2}, "top_logprobs", "needs"),
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"stop": [""]}, "stop[0]", ">= 1"),
    ({"chat_template_kwargs": {"messages": []}}, "messages", "which the server does"),
    (message(content="word " * 5000), "messages", "context is 1024"),
]
ELSEWHERE: list[tuple[str, dict[str, Any], str, str]] = [  # path, fields, which is to blame, what is answered
    ("completions", {"prompt": [5, 99999]}, "prompt", "vocabulary"),
    ("completions", {"prompt": "x", "echo": True}, "echo", "accepted: false"),
    ("completions", {"prompt": "x", "best_of": 2}, "best_of", "<= 1"),
    ("embeddings", {"input": ["x", [1]]}, "input", "a list of up to 128 such"),
    ("embeddings", {"input": "x", "dimensions": 5}, "dimensions", "what this model has"),
    ("embeddings", {"input": "x", "encoding_format": "f"}, "encoding_format", "accepted: float, base64"),
]


def refusal(http: TestClient, path: str, body: Any) -> tuple[int, str | None, str]:
    """Returns status, field and message of the answer; the message is one line."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post(f"/v1/{path}", content=data, headers={"Content-Type": "application/json"})
    error = answer.json().get("error", {"param": None, "message": "answered"})
    assert "\n" not in error["message"]
    assert answer.status_code == 200 or error["type"] == "invalid_request_error"
    return answer.status_code, error["param"], error["message"]


def test_bad_requests_are_refused_in_one_line(http: TestClient) -> None:
    """Each endpoint names its own fields."""
    chats = [
        ("chat/completions", {"messages": USER, **f} if isinstance(f, dict) else f, *rest) for f, *rest in BAD
    ]
    for path, fields, param, message in (*chats, *ELSEWHERE):
        body = {"model": "demo", **fields} if isinstance(fields, dict) else fields
        status, field, text = refusal(http, path, body)
        assert (status, field, message in text) == (400, param, True), (path, fields, text)


def test_the_type_and_size_of_a_body(http: TestClient) -> None:
    for kind, status in (("Application/JSON; charset=UTF-8", 200), ("text/plain", 415)):
        body, headers = b'{"prompt": "x", "max_tokens": 1}', {"Content-Type": kind}  # no model, as curl is used
        answer = http.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == status
    assert "'text/plain'; send Content-Type: application/json" in answer.json()["error"]["message"]
    long = {"model": "demo", "messages": [{"role": "user", "content": "x" * 2_000_000}]}
    assert refusal(http, "chat/completions", long)[0] == 413


HUGE = b"1" + b"0" * 400
DEEP = b"[" * 200 + b"]" * 200
ODD: list[Any] = [["a", 1], [], {"a": 1}, [1.5], [True], [99999], [-1], [[]], 3, [10**400], "\ud800"]
BODIES = [  # of completions
    *(b"{", b"\xff\xfe{", b"[" * 100_000, b"", b'{"model": "demo", "prompt": "x", "metadata": [-Infinity]}'),
    b'{"model": "m", "prompt": "x", "user": ' + DEEP + b"}",
    *(json.dumps({"model": "demo", "prompt": prompt}).encode() for prompt in ODD),
]
FIELDS = [  # of chats
    *(b'"%s": %s' % (name, HUGE) for name in (b"temperature", b"seed", b"top_k")),
    *(b'"max_tokens": 1e999', b'"max_tokens": ' + b"9" * 5000, b'"temperature": NaN'),
    *(b'"%s": "\\ud800"' % name for name in (b"stop", b"user", b"\\ud800")),
    *(b'"messages": [{"role": %s, "content": "x"}]' % role for role in (b"[]", b"{}")),
    *(b'"response_format": {"type": []}', b'"metadata": ' + DEEP, b'"stop": "\xff"'),
]


def test_odd_bodies_are_the_clients_fault(http: TestClient) -> None:
    for body in BODIES:
        assert refusal(http, "completions", body)[0] == 400, body[:60]
    begin = b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, '
    for field in FIELDS:
        assert refusal(http, "chat/completions", begin + field + b"}")[0] == 400, field[:60]


def test_wrong_paths_methods_and_names(http: TestClient) -> None:
    gone, refused = (404, "not_found"), (405, "method_not_allowed")
    for path, expected in (("GET /nope", gone), ("GET /v1/completions", refused), ("POST /health", refused)):
        answer = http.request(*path.split())
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], "GET /v1/models" in error["message"]) == (*expected, True)
    for host, status in {"evil.example": 403, "LocalHost:80": 200, "[::1]:80": 403}.items():
        assert http.get("/health", headers={"Host": host}).status_code == status
