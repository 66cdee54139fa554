"""`edgekv serve` under thousands of clients that say nothing, little, or leave: others are answered."""

import contextlib
import http.client
import json
import pathlib
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from serving import DEMO, TEMPLATE, post

from edgekv.server.app import Guard
from edgekv.server.engine import Metrics
from edgekv.server.limits import SMALL, BodyMemory, BodyShare, BoundedServer, ServerLimits
from edgekv.server.requests import RequestError, parse_json

N_BAD = 2000
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Logged:
    """A server whose log is a file, as a service's is."""

    def __init__(self, url: str, process: "subprocess.Popen[bytes]", log: pathlib.Path) -> None:
        self.url, self.process, self.log = url, process, log

    def connect(self) -> socket.socket:
        host, port = urlsplit(self.url).netloc.split(":")
        return socket.create_connection((host, int(port)), timeout=30)

    def is_well(self) -> None:
        """A new client is answered; how soon is measured by hand, here the bound only keeps the test finite."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    folder = tmp_path_factory.mktemp("limits")
    (folder / "template.jinja").write_text(TEMPLATE)
    log = folder / "log"
    code = (  # few file descriptors, as a service has them
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024)); "
        "from edgekv.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "serve", "--model", DEMO, "--port", 0, "--ctx", 512]
    command += ["--chat-template", folder / "template.jinja", "--client-timeout", 3]
    with log.open("wb") as file, subprocess.Popen(list(map(str, command)), stderr=file) as process:
        try:
            while not (found := re.search(r"(http://\S+)", log.read_text())):
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            yield Logged(found[1], process, log)
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def descriptors() -> Iterator[int]:
    """How many bad connections this process can hold."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = before[1] if before[1] != resource.RLIM_INFINITY else N_BAD + 500
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(soft, N_BAD + 500)), before[1]))
    yield min(N_BAD, soft - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def bad(server: Logged, kind: int) -> socket.socket | None:
    client = server.connect()
    if kind == 0:  # half-open: nothing, ever
        return client
    if kind == 1:  # slow: some of a head
        client.sendall(b"GET /health HTTP/1.1\r\nHo")
        return client
    if kind == 2:  # slow: some of a body
        client.sendall(HEAD + b"Content-Length: 100000\r\n\r\n{")
        return client
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sendall(HEAD)
    client.close()  # vanishing: a reset
    return None


def test_thousands_of_bad_clients_shut_nobody_out(server: Logged, descriptors: int) -> None:
    server.is_well()
    memory = psutil.Process(server.process.pid).memory_info().rss
    held = []
    for i in range(descriptors):
        held.append(bad(server, i % 4))
        if i % 500 == 499:
            server.is_well()
    server.is_well()
    ids = list(range(20))
    status, answer = post(
        server, "/v1/completions", json.dumps({"model": "demo", "prompt": ids, "max_tokens": 2}).encode()
    )
    assert status == 200, answer
    assert psutil.Process(server.process.pid).memory_info().rss < memory + (200 << 20)
    for client in held:
        if client is not None:
            client.close()
    server.is_well()
    assert len(server.log.read_text().splitlines()) < 30
    assert "Traceback" not in server.log.read_text()


def test_what_comes_too_slowly_is_cut_off(server: Logged) -> None:
    """A byte every so often: each is in time, the whole is not."""
    for begin in (b"GET /health HTTP/1.1\r\nX: ", HEAD + b"Content-Length: 100\r\n\r\n{"):
        with server.connect() as client:
            client.sendall(begin)
            answer, deadline = b"", time.monotonic() + 60
            client.settimeout(0.5)
            while time.monotonic() < deadline:
                try:
                    client.sendall(b" ")
                    piece = client.recv(4096)
                    answer += piece
                    if not piece:
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
            else:
                pytest.fail("the server still listens")
            assert b" 408 " in answer or begin.startswith(b"GET")


def test_a_client_that_never_reads_is_cut_off(server: Logged) -> None:
    """Pipelined requests for the page, none of whose answers is read."""
    with server.connect() as client:
        client.settimeout(1)
        deadline = time.monotonic() + 60
        try:
            while time.monotonic() < deadline:
                with contextlib.suppress(TimeoutError):
                    client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        except OSError:
            return
    pytest.fail("the server still writes")


async def hello(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """TCP_NODELAY, which asyncio leaves unset: 44 ms became 0.13 per request of a connection that is kept."""
    running = BoundedServer(hello, ServerLimits())
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    thread = threading.Thread(target=running.run, args=([listener],))
    thread.start()
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in client.recv(4096)
        (connection,) = running.server_state.connections
        option = connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    running.should_exit = True
    thread.join(30)
    assert option


def test_large_bodies_leave_room_for_small_ones() -> None:
    bodies = BodyMemory(1 << 20)
    with closing(BodyShare(bodies)) as first, closing(BodyShare(bodies)) as second:
        first.resize(SMALL + (1 << 20))
        second.resize(SMALL)
        with pytest.raises(RequestError, match="later"):
            second.resize(SMALL + 1)
        with pytest.raises(RequestError, match="shorten"):
            second.resize(SMALL + (1 << 20) + 1)
        first.resize(SMALL)
        second.resize(SMALL + 1)
    assert bodies.free == 1 << 20


ITEMS = (
    "[]",
    "{}",
    "[[]]",
    '{"a":0}',
    "123456",
    "1.5",
    '"ab"',
    '"\\ud83d\\ude00 ab"',
    '"ab \U0001f600"',
    '{"%d":[1]}',
    "null",
)


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
        assert size - len(data) <= share.taken + SMALL <= 10 * size, item


def test_a_key_and_its_scheme() -> None:
    """The key may be any bytes of a command line."""
    for key, header, status in (
        ("secret", b"Bearer secret", None),
        ("secret", b"bearer secret", None),
        ("secret", b"secret", 401),
        ("secret", b"Basic secret", 401),
        ("secret", b"Bearer", 401),
        ("\udcff", b"Bearer \xff", None),
        ("\udcff", b"Bearer \xfe", 401),
    ):
        guard = Guard(hello, Metrics().requests, key, None)
        refusal = guard._refusal({"path": "/stats", "headers": [(b"authorization", header)]})
        assert (refusal and refusal.status) == status, header
