"""Answers of the server to OpenAI's own client, and to plain HTTP; sums done again by hand."""

import base64
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import DEMO, asked, chat, openai_client
from starlette.testclient import TestClient

from edgekv import Session
from edgekv.engine.model import sampling_defaults
from edgekv.power.sampler import Estimate

PROMPT = "It was a dark night when the old man"
SEA = "Tell me of the sea."


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session.load(DEMO, kv="onebit", ctx=1024) as session:
        yield session


@pytest.fixture(scope="module")
def http(session: Session) -> Iterator[TestClient]:
    options: Any = {"pool_bytes": 100 << 20, "power": Estimate(5), "origins": ["https://app.example"]}
    with asked(session, queue_limit=2, **options) as http:
        yield http


@pytest.fixture(scope="module")
def client(http: TestClient) -> Iterator[openai.OpenAI]:
    with openai_client(http) as client:
        yield client


def test_a_completion_is_the_sessions_text(client: openai.OpenAI, session: Session) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0)
    own = session.fork()
    greedy = dataclasses.replace(sampling_defaults(session.model), temperature=0.0)
    expected = "".join(step.text for step in own.generate(PROMPT, max_new_tokens=24, sampling=greedy))
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (24, len(own.tokens) - 24)
    ids = own.tokens[: answer.usage.prompt_tokens]
    again = client.completions.create(model="demo", prompt=ids, max_tokens=24, temperature=0)
    assert again.choices[0].text == expected


def test_a_stream_brings_the_same_text(client: openai.OpenAI) -> None:
    whole = chat(client, SEA)
    chunks = list(chat(client, SEA, stream=True, stream_options={"include_usage": True}))
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


def test_cached_tokens_are_counted_once(http: TestClient) -> None:
    """One count for usage and timings: what the scheme lost by the rewind is read again, and not cached."""
    for text in ("one " * 300, "one " * 150 + "two " * 20):
        body = {"model": "demo", "prompt": text, "max_tokens": 2, "timings_per_token": True}
        answer = http.post("/v1/completions", json=body).json()
        timings, usage = answer["timings"], answer["usage"]
        assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["cache_n"] < 150


def test_models_and_health(client: openai.OpenAI, http: TestClient) -> None:
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
    assert http.get("/health").json()["status"] == "ok"


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


def test_metrics_are_prometheus(http: TestClient, client: openai.OpenAI) -> None:
    before = samples(http)
    chat(client, "Count me", max_tokens=6)
    after = samples(http)
    assert after["edgekv_generated_tokens_total"] == before["edgekv_generated_tokens_total"] + 6
    assert after["edgekv_tokens_per_second"] > 0
    assert after["edgekv_estimated_watts"] == pytest.approx(5)
    assert after["edgekv_estimated_millijoules_per_token"] > 0
    assert "edgekv_watts" not in after  # stated, not measured
    assert 0 < after["edgekv_cache_bytes"] <= 100 << 20
    assert http.get("/stats").json()["edgekv_sessions"] == after["edgekv_sessions"]


def samples(http: TestClient) -> dict[str, float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    asks = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return client.completions.create(**asks | options)


def sea(client: openai.OpenAI, **options: Any) -> Any:
    return chat(client, SEA, **{"max_tokens": 8} | options)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_an_echo_has_the_prompts_log_probabilities(client: openai.OpenAI, session: Session) -> None:
    """As programs ask that measure a model: echo, log probabilities, and no token more."""
    ids = session.encode(PROMPT)
    answer = complete(client, PROMPT, echo=True, logprobs=3, max_tokens=0)
    choice, expected = answer.choices[0], log_softmax(session.logits(ids))
    session.reset()
    assert choice.text == PROMPT
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
    found = choice.logprobs
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(
        [float(expected[i, token]) for i, token in enumerate(ids[1:])], abs=0.02
    )
    assert [len(top) for top in found.top_logprobs[1:]] == [3] * (len(ids) - 1)
    assert len(found.tokens) == len(found.text_offset) == len(ids)
    more = complete(client, ids, echo=True, logprobs=0, max_tokens=3)
    assert more.usage.prompt_tokens_details.cached_tokens == 0  # its echo read all of it
    assert more.choices[0].text.startswith(PROMPT)
    assert len(more.choices[0].logprobs.tokens) == len(ids) + 3
    assert complete(client, PROMPT, echo=True).choices[0].text == PROMPT + complete(client, PROMPT).choices[0].text


def test_log_probabilities_take_memory_of_the_request(client: openai.OpenAI) -> None:
    """A request of 1 MB could else ask for gigabytes of them."""
    options: Any = {"prompt": [[5] * 900] * 100, "echo": True, "max_tokens": 0}
    with pytest.raises(openai.APIStatusError, match="or ask for fewer") as error:
        complete(client, **options, logprobs=20)
    assert error.value.status_code == 413
    with pytest.raises(openai.APIStatusError, match="or ask for fewer"):
        sea(client, n=128, logprobs=True, top_logprobs=20, max_tokens=900)


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


def test_log_probabilities_end_before_a_stop(client: openai.OpenAI) -> None:
    whole = sea(client, logprobs=True)
    third = whole.choices[0].logprobs.content[3].token
    stopped = sea(client, logprobs=True, stop=[third])
    tokens = [entry.token for entry in stopped.choices[0].logprobs.content]
    assert "".join(tokens).startswith(stopped.choices[0].message.content)
    assert len(tokens) <= 4


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


def test_lists_of_prompts(client: openai.OpenAI, session: Session) -> None:
    """More answers than requests may wait."""
    prompts = ["Once", "The sea", "A man"]
    answer = complete(client, prompts, n=2, seed=3, temperature=1)
    assert [choice.index for choice in answer.choices] == list(range(6))
    singly = [complete(client, prompt, seed=3 + i, temperature=1) for prompt in prompts for i in range(2)]
    assert [choice.text for choice in answer.choices] == [each.choices[0].text for each in singly]
    assert answer.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in singly) / 2
    ids = [session.encode(prompt) for prompt in prompts]
    texts = [choice.text for choice in complete(client, ids).choices]
    assert texts == [complete(client, prompt).choices[0].text for prompt in prompts]
    assert complete(client, prompts, stream=True) is not None


def test_penalties_and_biases(client: openai.OpenAI, session: Session) -> None:
    plain = complete(client, max_tokens=60).choices[0].text
    penalised = complete(client, max_tokens=60, frequency_penalty=1.5, presence_penalty=1).choices[0].text
    assert plain != penalised
    assert len(set(penalised.split())) > len(set(plain.split()))
    token = session.require_tokenizer().encode("a sea", bos=False)[-1]
    forced = complete(client, logit_bias={str(token): 100}, max_tokens=4).choices[0].text
    assert forced.count("sea") == 4


def test_embeddings(client: openai.OpenAI, session: Session) -> None:
    """The client asks for base64 by itself."""
    answer = client.embeddings.create(model="demo", input=["The sea was calm.", "A ship."])
    expected = [session.embed("The sea was calm."), session.embed("A ship.")]
    for found, vector in zip(answer.data, expected, strict=True):
        assert found.embedding == pytest.approx(vector.tolist(), abs=1e-6)
    assert answer.usage.total_tokens == sum(len(session.encode(text)) for text in ("The sea was calm.", "A ship."))
    ids = session.encode("A ship.")
    floats = client.embeddings.create(model="demo", input=ids, encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(expected[1].tolist(), abs=1e-6)
    raw = client.embeddings.with_raw_response.create(model="demo", input="A ship.", encoding_format="base64")
    packed = json.loads(raw.text)["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4") == pytest.approx(expected[1], abs=1e-6)
    for bad in (
        {"input": []},
        {"input": ["x", [1]]},
        {"input": "x", "dimensions": 5},
        {"input": [[]]},
    ):
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="demo", **bad)
    with pytest.raises(openai.BadRequestError, match="context is 1024"):
        client.embeddings.create(model="demo", input="word " * 3000)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.embeddings.create(model="demo", input=[99999])


def test_responses(client: openai.OpenAI) -> None:
    whole: Any = client.responses.create(
        model="demo", input="Tell me of the sea.", temperature=0, max_output_tokens=8
    )
    assert whole.output_text == sea(client).choices[0].message.content
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 8
    with client.responses.stream(
        model="demo",
        input=[{"role": "user", "content": "Tell me of the sea."}],
        temperature=0,
        max_output_tokens=8,
    ) as stream:
        events = list(stream)
        final = stream.get_final_response() if events[-1].type == "response.completed" else None
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert final is None
    assert events[-1].type == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    parts = [{"type": "input_text", "text": "Tell me "}, {"type": "input_text", "text": "of the sea."}]
    told: Any = client.responses.create(
        model="demo",
        instructions="Be brief.",
        input=[{"role": "user", "content": parts}, *[item.model_dump() for item in whole.output]],
        max_output_tokens=4,
    )
    assert told.usage.input_tokens > whole.usage.input_tokens
    sent: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 4,
        "metadata": {"who": "me"},
        "temperature": 0.25,
        "tool_choice": {"type": "function", "name": "f"},
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
        "top_p": 0.5,
        "text": {"format": {"type": "text"}},
    }
    for options in (sent, {**sent, "tool_choice": "none", "reasoning": {"effort": "low"}}):
        back = client.responses.create(model="demo", input="x", **options).model_dump(exclude_none=True)
        assert {name: back[name] for name in options} == options
    with pytest.raises(openai.BadRequestError, match="nothing is stored"):
        client.responses.create(model="demo", input="x", previous_response_id="resp_1")
    for bad in ([{"type": "web_search_call"}], [{"role": "user", "content": [{"type": "input_audio"}]}], []):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="demo", input=bad)


def test_a_response_of_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    answer = client.responses.create(model="demo", input="How many?", text=form, temperature=0)
    assert answer.status == "completed"
    assert 1 <= json.loads(answer.output_text)["n"] <= 9


def test_only_the_true_name(session: Session) -> None:
    with asked(session, strict_model=True) as http, openai_client(http) as client:
        with pytest.raises(openai.NotFoundError, match="this server has 'demo'"):
            complete(client, model="gpt-9")
        with pytest.raises(openai.NotFoundError, match="this server has 'demo'"):
            client.embeddings.create(model="gpt-9", input="x")


def test_progress_and_timings(http: TestClient) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "word " * 300}],
        "max_tokens": 12,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
        "timings_per_token": True,
    }
    lines = http.post("/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress[-1]["processed"] == progress[-1]["total"] > 300
    timings = [chunk["timings"] for chunk in chunks if "timings" in chunk]
    assert timings[-1]["predicted_n"] == 12
    usage = next(chunk["usage"] for chunk in chunks if "usage" in chunk)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert timings[-1]["cache_n"] == progress[-1]["cache"] == cached < usage["prompt_tokens"]
    assert timings[-1]["prompt_n"] + timings[-1]["cache_n"] == progress[-1]["total"] == usage["prompt_tokens"]
    assert 0 < timings[-1]["kv_cache_bytes"] <= timings[-1]["kv_cache_f16_bytes"]
    assert timings[-1]["prompt_ms"] > 0


def test_props(http: TestClient) -> None:
    props = http.get("/props").json()
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == props["ctx"] == 1024
    assert settings["params"] == {"max_tokens": 64, "temperature": 1.0, "top_p": 0.95}
    assert props["modalities"] == {"vision": False, "audio": False}
    assert "message.role" in props["chat_template"]
    assert props["model"]["n_layers"] > 0


def test_a_page_elsewhere_may_call_if_it_is_named(http: TestClient) -> None:
    def called(origin: str, method: str) -> tuple[int, str | None]:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        headers |= {"Access-Control-Request-Headers": "authorization, content-type"}
        answer = http.request(method, "/v1/models", headers=headers)
        return answer.status_code, answer.headers.get("Access-Control-Allow-Origin")

    assert called("https://app.example", "OPTIONS") == (200, "https://app.example")
    assert called("https://app.example", "GET") == (200, "https://app.example")
    assert called("https://evil.example", "OPTIONS") == (400, None)
    assert called("https://evil.example", "GET") == (200, None)


def test_what_is_not_said_is_as_the_model_has_it(
    client: openai.OpenAI, http: TestClient, session: Session
) -> None:
    """Its generation_config, else what `edgekv run` takes: null is as good as absent, a value holds."""
    asks: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "seed": 4}
    own: Any = {"temperature": 1, "repetition_penalty": 1.1, "top_p": 0.95, "top_k": 40, "min_p": 0.05}
    texts = [
        http.post("/v1/completions", json={**asks, **more}).json()["choices"][0]["text"]
        for more in ({}, dict.fromkeys(own), own, {**own, "temperature": 0})
    ]
    assert texts[0] == texts[1] == texts[2] != texts[3]
