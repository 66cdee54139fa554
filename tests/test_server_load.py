"""`edgekv serve` with clients that leave, read slowly or come all at once: others are answered, memory stays."""

import asyncio
import concurrent.futures
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import pytest
from serving import DEMO, Server, chat, get, serving

from edgekv import Session
from edgekv.server.answers import CompletionFormat, EventStream
from edgekv.server.engine import Channel, Piece
from edgekv.server.prompts import EncodedPrompt, RequestEncoder
from edgekv.server.requests import CompletionRequest
from edgekv.text.template import ChatTemplate


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--kv", "onebit", "--queue", 8, "--client-timeout", 1, "--prefix-cache", "100M"]
    with serving(tmp_path_factory.mktemp("server"), *options) as running:
        yield running


@pytest.fixture(scope="module")
def loaded() -> Session:
    return Session.load(DEMO, ctx=256)


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


def test_a_stream_ends_with_its_reader(loaded: Session) -> None:
    """Of a client that reads nothing the connection is closed: test_server_limits."""

    async def run() -> tuple[bool, int]:
        channel, sent = Channel(), 0
        tokenizer = loaded.require_tokenizer()
        encoder = RequestEncoder(ChatTemplate.plain(tokenizer), tokenizer, 256, tokenizer.vocab_size)
        request = CompletionRequest(model="m", prompt="x")
        answers = CompletionFormat("m", request, [EncodedPrompt([1])], encoder)

        async def send(message: Any) -> None:
            nonlocal sent
            sent += 1

        async def receive() -> dict[str, str]:
            await asyncio.sleep(0.1)
            return {"type": "http.disconnect"}

        for i in range(9):
            channel.emit(Piece(0, str(i)))
        await asyncio.wait_for(EventStream(channel, answers)({}, receive, send), 30)
        return channel.cancelled.is_set(), sent

    assert asyncio.run(run()) == (True, 10)


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
