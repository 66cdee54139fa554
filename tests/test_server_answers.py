"""Answers of `edgekv serve` to OpenAI's own client: texts, streams, models, schemas, metrics."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import DEMO, Server, chat, get, post, serving

from edgekv import Session

PROMPT = "It was a dark night when the old man"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--kv", "onebit", "--prefix-cache", "100M", "--power-estimate", 5]
    with serving(tmp_path_factory.mktemp("server"), *options) as running:
        yield running


def test_a_completion_is_the_sessions_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0)
    session = Session.load(DEMO, kv="onebit", ctx=1024)
    expected = "".join(step.text for step in session.generate(PROMPT, max_new_tokens=24))
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (24, len(session.tokens) - 24)
    ids = session.tokens[: answer.usage.prompt_tokens]
    again = client.completions.create(model="demo", prompt=ids, max_tokens=24, temperature=0)
    assert again.choices[0].text == expected


def test_a_stream_brings_the_same_text(client: openai.OpenAI) -> None:
    whole = chat(client, "Tell me of the sea.")
    chunks = list(chat(client, "Tell me of the sea.", stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
    pieces = list(client.completions.create(model="demo", prompt="Once", max_tokens=5, stream=True, temperature=0))
    assert pieces[-1].choices[0].finish_reason == "length"
    assert len(pieces) > 3


def test_stop_seed_and_sampling(client: openai.OpenAI) -> None:
    texts = [chat(client, "Hello", temperature=1, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    whole = chat(client, "Hello").choices[0].message.content
    word = whole.split()[3]
    stopped = chat(client, "Hello", stop=[word])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == whole[: whole.index(word)]
    limited = chat(client, "Hello", max_tokens=openai.omit, max_completion_tokens=3)
    assert limited.usage.completion_tokens == 3


def test_the_second_turn_reads_only_what_is_new(client: openai.OpenAI) -> None:
    """Two conversations in turn, each longer than the other's beginning: both find their own cache."""
    system = {"role": "system", "content": "You are a sailor. " * 20}
    talks: list[list[Any]] = [
        [system, {"role": "user", "content": f"Talk {i}: what is a ship?"}] for i in range(2)
    ]
    cached: list[list[int]] = [[], []]
    for turn in range(3):
        for talk, reads in zip(talks, cached, strict=True):
            answer = client.chat.completions.create(
                model="demo", messages=talk, max_tokens=12, temperature=0.7, seed=turn
            )
            assert answer.usage is not None
            reads.append(answer.usage.prompt_tokens_details.cached_tokens)
            talk.append({"role": "assistant", "content": answer.choices[0].message.content})
            talk.append({"role": "user", "content": "And then?"})
            total = answer.usage.prompt_tokens
    assert cached[1][0] > 60  # the system message, from the other conversation
    for reads in cached:
        assert reads[2] > reads[1] > 60
        assert reads[2] > total - 30


def test_cached_tokens_are_counted_once(server: Server) -> None:
    """One count for usage and timings: what the scheme lost by the rewind is read again, and not cached."""
    for text in ("one " * 300, "one " * 150 + "two " * 20):
        body = {"model": "demo", "prompt": text, "max_tokens": 2, "timings_per_token": True}
        status, answer = post(server, "/v1/completions", json.dumps(body).encode())
        assert status == 200
        timings, usage = answer["timings"], answer["usage"]
        assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["cache_n"] < 150


def test_models_and_health(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "edgekv"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-9")
    raw = client.completions.with_raw_response.create(model='gpt-9\u00df"', prompt="x", max_tokens=1)
    assert raw.headers["warning"] == '299 edgekv "there is no model gpt-9??: demo answers"'
    assert raw.parse().model == "demo"
    assert (
        "warning"
        not in client.completions.with_raw_response.create(model="demo", prompt="x", max_tokens=1).headers
    )
    assert get(server, "/health")["status"] == "ok"


def test_a_json_schema_is_followed(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for seed in range(3):
        answer = chat(client, "Who?", response_format=form, temperature=1, seed=seed, max_tokens=80)
        value = json.loads(answer.choices[0].message.content)
        assert set(value) == {"name", "age"}
        assert answer.choices[0].finish_reason == "stop"
    form["json_schema"]["schema"] = {"type": "nonsense"}
    with pytest.raises(openai.BadRequestError, match="JSON schema can't be followed"):
        chat(client, "Who?", response_format=form)


def test_metrics_are_prometheus(server: Server, client: openai.OpenAI) -> None:
    before = samples(server)
    chat(client, "Count me", max_tokens=6)
    after = samples(server)
    assert after["edgekv_generated_tokens_total"] == before["edgekv_generated_tokens_total"] + 6
    assert after["edgekv_tokens_per_second"] > 0
    assert after["edgekv_estimated_watts"] == pytest.approx(5)
    assert after["edgekv_estimated_millijoules_per_token"] > 0
    assert "edgekv_watts" not in after  # stated, not measured
    assert 0 < after["edgekv_cache_bytes"] <= 100 << 20
    assert get(server, "/stats")["edgekv_sessions"] == after["edgekv_sessions"]


def samples(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}
