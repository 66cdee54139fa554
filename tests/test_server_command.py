"""`edgekv serve` as a command: its options, its key, a port that is taken, libraries that are missing."""

import json
import pathlib
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from serving import DEMO, Server, get, post, serving

from edgekv.cli import main


def test_a_port_that_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", str(DEMO), "--port", port, "--ctx", "64"]) == 2
    assert "can't listen there" in capfd.readouterr().err


def test_without_its_libraries(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And help loads none of them."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "--model", str(DEMO)]) == 2
    assert "pip install 'edgekv[serve]'" in capsys.readouterr().err
    code = "import sys, edgekv.cli; print({'starlette', 'uvicorn', 'jinja2'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_key_and_an_end(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beyond this machine a key is needed. SIGTERM: what is being answered, and what waits, ends with an error."""
    assert main(["serve", "--model", str(DEMO), "--host", "0.0.0.0"]) == 2
    assert "set --api-key KEY" in capsys.readouterr().err
    body = {"model": "demo", "prompt": "A long story", "max_tokens": 900}
    key = {"Authorization": "Bearer s3cret"}
    options = ["--host", "0.0.0.0", "--api-key", "s3cret"]
    with serving(tmp_path, *options) as (url, process), ThreadPoolExecutor(1) as threads:
        server = Server(f"http://127.0.0.1:{urlsplit(url).port}", process)
        for wrong in ("wrong", "-", "s3cre"):
            status, answer = post(server, "/v1/completions", b"{}", Authorization=f"Bearer {wrong}")
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert get(server, "/health")["status"] == "ok"
        with pytest.raises(urllib.error.HTTPError, match="401") as error:
            get(server, "/metrics")
        error.value.close()
        stream, head = json.dumps(body | {"stream": True}).encode(), {"Content-Type": "application/json", **key}
        slow = socket.create_connection(("127.0.0.1", urlsplit(url).port))
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        with (
            slow,
            urllib.request.urlopen(
                urllib.request.Request(f"{server.url}/v1/completions", stream, head), timeout=60
            ) as answer,
        ):
            answer.readline()
            whole = threads.submit(post, server, "/v1/completions", json.dumps(body).encode(), **key)
            stats = urllib.request.Request(f"{server.url}/stats", headers=key)
            while json.load(urllib.request.urlopen(stats, timeout=60))["edgekv_queue_length"] < 1:
                pass
            process.terminate()
            *_, event, last = filter(None, answer.read().decode().split("\n\n"))
        assert json.loads(event[6:])["error"]["code"] == "shutting_down"
        assert last == "data: [DONE]"
        status, refusal = whole.result()
        assert (status, refusal["error"]["code"]) == (503, "shutting_down")
        assert process.wait(4) == -signal.SIGTERM
        assert process.stderr.read() == ""
