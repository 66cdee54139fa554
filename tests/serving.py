"""Servers for the tests that talk to one: `edgekv serve` in a process, or its endpoints without a socket."""

import contextlib
import json
import pathlib
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import openai
    from starlette.testclient import TestClient

    from edgekv import Session
    from edgekv.server.engine import Engine
    from edgekv.server.limits import ServerLimits

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "models" / "demo"
TEMPLATE = """\
{%- for message in messages %}{{ message.role + ': ' + message.content | trim + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


# As Qwen's: tools in the system's turn, calls and their results in marks.
TOOL_TEMPLATE = """\
{%- if tools %}tools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}
{%- for message in messages %}{{ message.role + ': ' + message.content }}
{%- for call in message.tool_calls %}\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% if enable_thinking %}<think>\n{% endif %}{% endif %}"""


class Server(NamedTuple):
    url: str
    process: subprocess.Popen[str]


@contextlib.contextmanager
def serving(
    folder: pathlib.Path, *options: object, template: str = TEMPLATE, program: Sequence[str] = ("-m", "edgekv")
) -> Iterator[Server]:
    """Serves the demo model on a free port until the block ends; what it says is in folder/log."""
    file, log = folder / "template.jinja", folder / "log"
    file.write_text(template)
    command = [sys.executable, *program, "serve", "--model", DEMO, "--port", 0, "--ctx", 1024]
    command += ["--chat-template", file, *options]
    with log.open("w") as said, subprocess.Popen(list(map(str, command)), stderr=said, text=True) as process:
        try:
            while not (found := re.search(r"(http://\S+)\s", log.read_text())):
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            yield Server(found[1], process)
        finally:
            process.terminate()
            process.wait(30)


def engine_of(session: "Session", template: str = TEMPLATE, **options: Any) -> "Engine":
    from edgekv.server.engine import Engine
    from edgekv.text.template import ChatTemplate

    written = ChatTemplate(template, session.require_tokenizer())
    return Engine(session, written, **{"queue_limit": 4, "pool_bytes": 0, "max_new_tokens": 64} | options)


@contextlib.contextmanager
def open_endpoints(
    session: "Session",
    template: str = TEMPLATE,
    *,
    raising: bool = False,
    limits: "ServerLimits | None" = None,
    origins: Sequence[str] = (),
    **options: Any,
) -> "Iterator[TestClient]":
    """Opens the endpoints without a process or a socket. raising: an endpoint's fault, in place of its answer."""
    from starlette.testclient import TestClient

    from edgekv.server.app import build_app
    from edgekv.server.limits import ServerLimits

    app = build_app(
        engine_of(session.fork(), template, **options),  # what the last one's threads still make is not in its way
        "demo",
        api_key=None,
        hosts=["localhost"],
        limits=limits or ServerLimits(),
        origins=origins,
    )
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=raising) as client:
        yield client


@contextlib.contextmanager
def openai_client(http: "TestClient") -> "Iterator[openai.OpenAI]":
    """Opens OpenAI's own client of the endpoints."""
    import openai  # takes a second

    yield openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)


def get(server: Server, path: str) -> Any:
    with urllib.request.urlopen(server.url + path, timeout=60) as answer:
        return json.loads(answer.read())


def samples(text: str) -> dict[str, float]:
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def post(server: Server, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(server.url + path, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def chat(client: "openai.OpenAI", *messages: str, **options: Any) -> Any:
    """Asks for an answer to messages of user and assistant in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    options = {"max_tokens": 20, "temperature": 0} | options
    return client.chat.completions.create(model="demo", messages=turns, **options)
