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

import openai
import pytest
from serving import DEMO, get, post, serving

from edgekv.cli import main


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
        assert server.process.wait(30) == -signal.SIGINT


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


def test_a_service_that_is_stopped_says_so(tmp_path: pathlib.Path) -> None:
    """SIGTERM: what is being answered, and what waits, ends with an error; a slow client holds nothing up."""
    body = {"model": "demo", "prompt": "A long story", "max_tokens": 900}
    with serving(tmp_path) as server, ThreadPoolExecutor(1) as threads:
        host, port = urlsplit(server.url).netloc.split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            request = urllib.request.Request(
                f"{server.url}/v1/completions",
                json.dumps(body | {"stream": True}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.readline()
                whole = threads.submit(post, server, "/v1/completions", json.dumps(body).encode())
                while not get(server, "/stats")["edgekv_queue_length"]:
                    pass
                server.process.terminate()
                *_, error, last = filter(None, answer.read().decode().split("\n\n"))
            assert json.loads(error[6:])["error"]["code"] == "shutting_down"
            assert last == "data: [DONE]"
            status, told = whole.result()
            assert (status, told["error"]["code"]) == (503, "shutting_down")
            assert server.process.wait(4) == -signal.SIGTERM
            assert server.process.stderr is not None
            assert server.process.stderr.read() == ""
