"""`edgekv serve`: OpenAI's own client, clients that misbehave, and what the server may cost."""

import asyncio
import concurrent.futures
import http.client
import json
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import DEMO, Server, serving

from edgekv import SamplingParams, Session
from edgekv.cli import main
from edgekv.server.checked_request import CheckedRequest, check_chat
from edgekv.server.delivery import EventStream
from edgekv.server.jobs import Channel, EncodedPrompt, Piece
from edgekv.server.protocol import ChatRequest, RequestError, read
from edgekv.server.response_builders import CompletionBuilder

PROMPT = "It was a dark night when the old man"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = [
        "--kv",
        "onebit",
        "--queue",
        8,
        "--client-timeout",
        1,
        "--prefix-cache",
        "100M",
        "--power-estimate",
        5,
    ]
    with serving(tmp_path_factory.mktemp("server"), *options) as running:
        yield running


def get(server: Server, path: str) -> Any:
    with urllib.request.urlopen(server.url + path, timeout=60) as answer:
        return json.loads(answer.read())


def post(server: Server, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(server.url + path, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def chat(client: openai.OpenAI, *messages: str, **options: Any) -> Any:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    options = {"max_tokens": 20, "temperature": 0} | options
    return client.chat.completions.create(model="demo", messages=turns, **options)


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
    "a role": ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    "an odd field": ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "unknown"),
    "an image from elsewhere": (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "image_url",
        "data:image/png",
    ),
    "an image that it can't see": (
        {"messages": [{"role": "user", "content": [SEEN]}]},
        "images",
        "takes no images",
    ),
    "a part": (
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
        "messages[0].content[0].type",
        "'audio'",
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


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_said_in_one_line(name: str, server: Server) -> None:
    fields, param, message = BAD[name]
    body = {"model": "demo", "messages": USER, **fields} if isinstance(fields, dict) else fields
    got, answer = post(server, "/v1/chat/completions", json.dumps(body).encode())
    assert got == 400, answer
    assert message in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", param)


def test_a_body_without_end(server: Server) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "x" * 2_000_000}]}
    got, answer = post(server, "/v1/chat/completions", json.dumps(body).encode())
    assert got == 413
    assert "1048576 bytes" in answer["error"]["message"]


BAD_BYTES = {
    "not JSON": (b"{", {}, 400, "not valid JSON"),
    "not UTF-8": (b"\xff\xfe{", {}, 400, "not valid JSON"),
    "deep": (b"[" * 100_000, {}, 400, "not valid JSON"),
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


def settled(server: Server) -> dict[str, Any]:
    """The stats once nothing is being answered."""
    for _ in range(200):
        stats = get(server, "/stats")
        if not stats["edgekv_active"] and not stats["edgekv_queue_length"]:
            return dict(stats)
        time.sleep(0.05)
    raise AssertionError(f"still busy: {stats}")


def test_a_client_that_vanishes_frees_its_place(server: Server, client: openai.OpenAI) -> None:
    before = settled(server)["edgekv_generated_tokens_total"]
    stream = chat(client, "Tell me a long story", max_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
    after = settled(server)["edgekv_generated_tokens_total"]
    assert after - before < 900
    body = json.dumps({"model": "demo", "prompt": "A long story", "max_tokens": 900}).encode()
    host, port = urlsplit(server.url).netloc.split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.3)
    assert settled(server)["edgekv_generated_tokens_total"] - after < 900
    assert chat(client, "Still there?").choices[0].message.content


def test_a_slow_client_holds_nobody_up(server: Server, client: openai.OpenAI) -> None:
    """It asks for a stream and reads nothing: others are answered meanwhile."""
    host, port = urlsplit(server.url).netloc.split(":")
    body = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 900, "stream": True}).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert chat(client, "Quick?", max_tokens=3).choices[0].message.content
        settled(server)


@pytest.mark.parametrize("what", ["reads nothing", "is gone"])
def test_a_stream_ends_with_its_reader(what: str, loaded: Session) -> None:
    """Once the system's buffers are full, sending does not return: after the timeout the job is cancelled."""

    async def run() -> tuple[bool, int]:
        channel, sent = Channel(), 0
        request, prompts = CheckedRequest(SamplingParams()), [EncodedPrompt([1])]
        answers = CompletionBuilder("m", request, prompts, loaded.require_tokenizer())

        async def send(message: Any) -> None:
            nonlocal sent
            sent += 1
            if what == "reads nothing" and sent > 3:
                await asyncio.Event().wait()

        async def receive() -> dict[str, str]:
            await asyncio.sleep(0.1 if what == "is gone" else 60)
            return {"type": "http.disconnect"}

        for i in range(9):
            channel.emit(Piece(0, str(i)))
        await asyncio.wait_for(EventStream(channel, answers, 0.2)({}, receive, send), 30)
        return channel.cancelled.is_set(), sent

    cancelled, sent = asyncio.run(run())
    assert cancelled
    assert sent == (4 if what == "reads nothing" else 10)


def test_a_client_that_sends_slowly_is_answered_408(server: Server) -> None:
    host, port = urlsplit(server.url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        slow.sendall(b"Content-Length: 100\r\n\r\n{")
        assert b" 408 " in slow.recv(4096).split(b"\r\n")[0]


def test_200_requests_at_once(server: Server) -> None:
    """As many as may wait are answered, the others get 429 at once; the memory stays as it was."""
    process = psutil.Process(server.process.pid)
    settled(server)
    before = process.memory_info().rss

    async def ask(client: openai.AsyncOpenAI, i: int) -> int:
        try:
            await client.completions.create(model="demo", prompt=f"Request {i}", max_tokens=8)
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    async def storm() -> list[int]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(200)))

    counts = Counter(asyncio.run(storm()))
    assert set(counts) == {200, 429}
    assert counts[200] >= 8
    assert get(server, "/health")["status"] == "ok"
    settled(server)
    assert process.memory_info().rss - before < 100 << 20
    assert get(server, "/stats")["edgekv_cache_bytes"] <= 100 << 20


def test_requests_wait_for_each_other(client: openai.OpenAI) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda i: chat(client, f"Number {i}", max_tokens=6), range(6)))
    assert all(answer.usage.completion_tokens == 6 for answer in answers)


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


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "soon"])
def test_a_timeout_is_seconds_above_0(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model", str(DEMO), "--client-timeout", seconds])
    assert ended.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.endswith(f"--client-timeout: {seconds!r} is not a number of seconds above 0")


def test_beyond_this_machine_a_key_is_needed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", str(DEMO), "--host", "0.0.0.0"]) == 2
    assert "set --api-key KEY" in capsys.readouterr().err
    with serving(tmp_path, "--host", "0.0.0.0", "--api-key", "s3cret", "--ctx", 128) as server:
        url = f"http://127.0.0.1:{urlsplit(server.url).port}"
        for key in ("wrong", "", "s3cre"):
            wrong = openai.OpenAI(base_url=f"{url}/v1", api_key=key or "-", max_retries=0)
            with wrong, pytest.raises(openai.AuthenticationError, match="key"):
                wrong.models.list()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="s3cret", max_retries=0) as right:
            assert right.completions.create(model="demo", prompt="Once", max_tokens=2).choices[0].text
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="401") as error:
            urllib.request.urlopen(f"{url}/metrics", timeout=30)
        error.value.close()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) in (0, 130)


def test_a_port_that_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", str(DEMO), "--port", port, "--ctx", "64"]) == 2
    assert "can't listen there" in capfd.readouterr().err


def test_without_its_libraries(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "--model", str(DEMO)]) == 2
    assert "pip install 'edgekv[serve]'" in capsys.readouterr().err


def test_help_needs_no_library() -> None:
    code = (
        "import sys; import edgekv.cli; print([m for m in ('starlette', 'uvicorn', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def loaded() -> Session:
    return Session.load(DEMO, ctx=256)


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
    assert (ask.sampling.temperature, ask.sampling.top_p, ask.sampling.seed) == (1.0, 0.5, 3)
    assert (ask.stop, ask.include_usage, ask.schema) == (("x",), True, {"type": "object"})
    with pytest.raises(RequestError, match="unknown field 'stream_options"):
        check_chat(read(body | {"stream_options": {"x": 1}}, ChatRequest))
