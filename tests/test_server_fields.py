"""What a request may ask for beside text: OpenAI's own client, and sums done again by hand."""

import base64
import json
import pathlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from serving import DEMO, Server, serving

from edgekv import Session
from edgekv.cli import main

PROMPT = "It was a dark night when the old man"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--strict-model", "--cors", "https://app.example", "--queue", 2]
    with serving(tmp_path_factory.mktemp("fields"), *options) as running:
        yield running


@pytest.fixture(scope="module")
def session() -> Session:
    return Session.load(DEMO, ctx=1024)


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    return client.completions.create(
        **{"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0} | options
    )


def chat(client: openai.OpenAI, **options: Any) -> Any:
    messages = [{"role": "user", "content": "Tell me of the sea."}]
    return client.chat.completions.create(
        **{"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0} | options
    )


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
        chat(client, n=128, logprobs=True, top_logprobs=20, max_tokens=900)


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    whole = chat(client, logprobs=True, top_logprobs=4)
    content = whole.choices[0].logprobs.content
    assert len(content) == 8
    assert "".join(entry.token for entry in content) == whole.choices[0].message.content
    for entry in content:  # greedy: the likeliest was chosen
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert bytes(entry.bytes).decode() == entry.token
        assert sum(np.exp(top.logprob) for top in entry.top_logprobs) <= 1
    chunks = list(chat(client, logprobs=True, top_logprobs=4, stream=True))
    streamed = [entry for chunk in chunks if (found := chunk.choices[0].logprobs) for entry in found.content]
    assert streamed == content
    assert chat(client).choices[0].logprobs is None


def test_log_probabilities_end_before_a_stop(client: openai.OpenAI) -> None:
    whole = chat(client, logprobs=True)
    third = whole.choices[0].logprobs.content[3].token
    stopped = chat(client, logprobs=True, stop=[third])
    tokens = [entry.token for entry in stopped.choices[0].logprobs.content]
    assert "".join(tokens).startswith(stopped.choices[0].message.content)
    assert len(tokens) <= 4


def test_several_answers(client: openai.OpenAI) -> None:
    answer = chat(client, n=3, temperature=1, seed=5)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert answer.usage.completion_tokens == 24
    again = [chat(client, temperature=1, seed=5 + i).choices[0].message.content for i in range(3)]
    assert again == texts
    streamed = ["", "", ""]
    for chunk in chat(client, n=3, temperature=1, seed=5, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert answer.usage.prompt_tokens == chat(client).usage.prompt_tokens


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
    assert whole.output_text == chat(client).choices[0].message.content
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


def test_only_the_true_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'demo'"):
        complete(client, model="gpt-9")
    with pytest.raises(openai.NotFoundError, match="this server has 'demo'"):
        client.embeddings.create(model="gpt-9", input="x")


def test_progress_and_timings(server: Server) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "word " * 300}],
        "max_tokens": 12,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
        "timings_per_token": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        lines = answer.read().decode().split("\n\n")
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


def test_props(server: Server) -> None:
    with urllib.request.urlopen(f"{server.url}/props", timeout=30) as answer:
        props = json.loads(answer.read())
    assert props["default_generation_settings"]["n_ctx"] == props["ctx"] == 1024
    assert props["modalities"] == {"vision": False, "audio": False}
    assert "message.role" in props["chat_template"]
    assert props["model"]["n_layers"] > 0


def test_a_page_elsewhere_may_call_if_it_is_named(server: Server) -> None:
    def asked(origin: str, method: str) -> tuple[int, str | None]:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        headers |= {"Access-Control-Request-Headers": "authorization, content-type"}
        request = urllib.request.Request(f"{server.url}/v1/models", headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.headers["Access-Control-Allow-Origin"]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers["Access-Control-Allow-Origin"]

    assert asked("https://app.example", "OPTIONS") == (200, "https://app.example")
    assert asked("https://app.example", "GET") == (200, "https://app.example")
    assert asked("https://evil.example", "OPTIONS") == (400, None)
    assert asked("https://evil.example", "GET") == (200, None)


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/path", "file:///x", ""])
def test_what_is_no_origin(origin: str, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--model", str(DEMO), "--cors", origin])
    assert "is no origin" in capsys.readouterr().err
