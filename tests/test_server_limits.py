"""`edgekv serve` under thousands of clients that say nothing, little, leave, read slowly or come all at once."""

import asyncio
import contextlib
import json
import pathlib
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import tracemalloc
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import pytest
from helpers import Cli, until
from serving import DEMO, Server, chat, get, post, samples, serving

from edgekv.cli import main
from edgekv.server.app import Guard
from edgekv.server.engine import Metrics
from edgekv.server.limits import UNCOUNTED, BodyMemory, BodyShare
from edgekv.server.requests import parse_json

N_BAD = 2000
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(server: Server) -> socket.socket:
    host, port = urlsplit(server.url).netloc.split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def send(client: socket.socket, **fields: Any) -> None:
    body = json.dumps({"model": "demo", "prompt": "A long story", "max_tokens": 900, **fields}).encode()
    client.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)


def is_well(server: Server) -> bool:
    """Returns whether a new client is answered; the time bound only keeps the test finite."""
    return get(server, "/health")["status"] == "ok"


def metrics(server: Server, **headers: str) -> dict[str, float]:
    request = urllib.request.Request(f"{server.url}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return samples(answer.read().decode())


def settled(server: Server) -> dict[str, float]:
    """Returns the metrics once nothing is being answered."""
    until(lambda: (now := metrics(server))["edgekv_active"] + now["edgekv_queue_length"] == 0)
    return metrics(server)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("limits")


@pytest.fixture(scope="module")
def server(folder: pathlib.Path) -> Iterator[Server]:
    """A server with few file descriptors, as a service has them."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024)); "
        "from edgekv.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    options = "--kv", "onebit", "--client-timeout", 3, "--queue", 8, "--cache-ram", "100M"
    with serving(folder, *options, program=("-c", code)) as running:
        yield running


@pytest.fixture
def descriptors() -> Iterator[int]:
    """How many bad connections this process can hold."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = before[1] if before[1] != resource.RLIM_INFINITY else N_BAD + 500
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(soft, N_BAD + 500)), before[1]))
    yield min(N_BAD, soft - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def bad(server: Server, kind: int) -> socket.socket:
    client = connect(server)
    # Half-open: nothing, ever. Slow: some of a head, some of a body. Vanishing: a reset.
    client.sendall((b"", b"GET /health HTTP/1.1\r\nHo", HEAD + b"Content-Length: 100000\r\n\r\n{", HEAD)[kind])
    if kind == 3:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    return client


def test_thousands_of_bad_clients_shut_nobody_out(server: Server, folder: pathlib.Path, descriptors: int) -> None:
    assert is_well(server)
    assert "demo, 1,024 tokens, cache " in (folder / "log").read_text()
    memory, held = psutil.Process(server.process.pid).memory_info().rss, []
    for i in range(descriptors):
        held.append(bad(server, i % 4))
        if i % 500 == 499:
            assert is_well(server)
    assert post(server, "/v1/completions", b'{"prompt": [1, 2, 3, 4, 5], "max_tokens": 2}')[0] == 200
    assert psutil.Process(server.process.pid).memory_info().rss < memory + (200 << 20)
    for client in held:
        client.close()
    assert is_well(server)
    log = (folder / "log").read_text()
    assert len(log.splitlines()) < 30
    assert "Traceback" not in log


def trickle(server: Server, begin: bytes, more: bytes, reads: bool = True) -> bytes:
    """Sends without an end, until the server closes the connection; returns what it answered."""
    answer, deadline = b"", time.monotonic() + 60
    with connect(server) as client, contextlib.suppress(ConnectionError):
        client.sendall(begin)
        client.settimeout(0.5)
        piece = b"none yet"
        while piece:
            assert time.monotonic() < deadline, "the server still listens"
            with contextlib.suppress(TimeoutError):
                client.sendall(more)
                if reads:
                    answer += (piece := client.recv(4096))
    return answer


def test_who_sends_or_reads_too_slowly_is_cut_off(server: Server) -> None:
    """A byte every so often, each in time, of a head and of a body; requests whose answers are never read."""
    unread = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100
    with ThreadPoolExecutor(3) as threads:
        head = threads.submit(trickle, server, b"GET /health HTTP/1.1\r\nX: ", b" ")
        body = threads.submit(trickle, server, HEAD + b"Content-Length: 100\r\n\r\n{", b" ")
        pages = threads.submit(trickle, server, b"", unread, reads=False)
        assert (head.result(), pages.result()) == (b"", b"")
        assert b" 408 " in body.result()


def test_a_client_that_vanishes_frees_its_place(server: Server, client: openai.OpenAI) -> None:
    before = settled(server)["edgekv_generated_tokens_total"]
    stream = chat(client, "Tell me a long story", max_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
    after = settled(server)["edgekv_generated_tokens_total"]
    assert after - before < 900
    with connect(server) as gone, connect(server) as slow:
        send(gone)
        send(slow, stream=True, max_tokens=200)  # and reads nothing: others are answered meanwhile
        time.sleep(0.3)
        gone.close()
        assert chat(client, "Quick?", max_tokens=3).choices[0].message.content
    assert settled(server)["edgekv_generated_tokens_total"] - after < 900


def test_200_requests_at_once(server: Server) -> None:
    """As many as may wait are answered, the others get 429 at once; the memory stays as it was."""
    process = psutil.Process(server.process.pid)
    settled(server)
    before = process.memory_info().rss

    async def ask(client: openai.AsyncOpenAI, i: int) -> tuple[object, ...]:
        try:
            await client.completions.create(model="demo", prompt=f"Request {i}", max_tokens=8)
        except openai.RateLimitError as error:
            return error.status_code, error.type, error.code
        return 200, None, None

    async def storm() -> list[tuple[object, ...]]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=120) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(200)))

    counts = Counter(asyncio.run(storm()))
    answered, refused = (200, None, None), (429, "rate_limit_error", "queue_full")
    assert set(counts) == {answered, refused}
    assert counts[answered] >= 8
    assert is_well(server)
    settled(server)
    assert process.memory_info().rss - before < 100 << 20
    assert metrics(server)["edgekv_cache_bytes"] <= 100 << 20


ITEMS = ("[]", "{}", "[[]]", '{"a":0}', "123456", "1.5", '"ab"', '"\\ud83d\\ude00 ab"', '{"%d":[1]}', "null")


def test_what_a_body_takes_once_parsed_is_bounded_before() -> None:
    for item in ITEMS:
        data = ("[" + ",".join(item.replace("%d", str(i)) for i in range(20_000)) + "]").encode()
        share = BodyShare(BodyMemory(1 << 30))
        share.parse(data)
        tracemalloc.start()
        value = parse_json(data)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(value) == 20_000
        assert size - len(data) <= share.taken + UNCOUNTED <= 10 * size, item


def test_a_key_and_its_scheme() -> None:
    """The key may be any bytes of a command line."""
    for key, header, status in (
        ("secret", b"Bearer secret", None),
        ("secret", b"Basic secret", 401),
        ("secret", b"Bearer", 401),
        ("\udcff", b"Bearer \xff", None),
        ("\udcff", b"Bearer \xfe", 401),
    ):
        guard = Guard(None, Metrics().requests, key, None)
        refusal = guard._refusal({"path": "/metrics", "headers": [(b"authorization", header)]})
        assert (refusal and refusal.status) == status, header


# The command: a port that is taken, libraries that are missing, a key, an end


def test_a_port_that_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", str(DEMO), "--port", port, "--ctx", "64"]) == 2
    said = capfd.readouterr().err
    assert f"--port {port}: can't listen there: Address already in use; give an address" in said
    assert said.count("\n") == 1  # before the model is read


def test_without_its_libraries(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'edgekv[serve]'" in cli("serve", "--model", DEMO, status=2).err
    code = "import sys, edgekv.cli; print({'starlette', 'uvicorn', 'jinja2'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_key_and_an_end(tmp_path: pathlib.Path, cli: Cli) -> None:
    """Beyond this machine a key is needed. SIGTERM: what is being answered, and what waits, ends with an error."""
    assert "set --api-key KEY" in cli("serve", "--model", DEMO, "--host", "0.0.0.0", status=2).err
    body = {"model": "demo", "prompt": "A long story", "max_tokens": 900}
    key = {"Authorization": "Bearer s3cret"}
    options = ["--host", "0.0.0.0", "--api-key", "s3cret"]
    with serving(tmp_path, *options) as (url, process), ThreadPoolExecutor(1) as threads:
        server = Server(f"http://127.0.0.1:{urlsplit(url).port}", process)
        for wrong in ("wrong", "-", "s3cre"):
            status, answer = post(server, "/v1/completions", b"{}", Authorization=f"Bearer {wrong}")
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert is_well(server)
        with pytest.raises(urllib.error.HTTPError, match="401") as error:
            get(server, "/metrics")
        error.value.close()
        stream, head = json.dumps(body | {"stream": True}).encode(), {"Content-Type": "application/json", **key}
        request = urllib.request.Request(f"{server.url}/v1/completions", stream, head)
        with connect(server) as slow, urllib.request.urlopen(request, timeout=60) as answer:
            slow.sendall(HEAD + b"Content-Length: 9\r\n\r\n{")
            answer.readline()
            whole = threads.submit(post, server, "/v1/completions", json.dumps(body).encode(), **key)
            while metrics(server, **key)["edgekv_queue_length"] < 1:
                pass
            process.terminate()
            *_, event, last = filter(None, answer.read().decode().split("\n\n"))
        assert json.loads(event[6:])["error"]["code"] == "shutting_down"
        assert last == "data: [DONE]"
        status, refusal = whole.result()
        assert (status, refusal["error"]["code"]) == (503, "shutting_down")
        assert process.wait(4) == -signal.SIGTERM
        assert url in (tmp_path / "log").read_text().splitlines()[-1]  # nothing after it
