"""Starts `edgekv serve` as a user does, and asks it, for the tests that talk to it."""

import contextlib
import json
import pathlib
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import openai

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "models" / "demo"
TEMPLATE = """\
{%- for message in messages %}{{ message.role + ': ' + message.content | trim + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


class Server(NamedTuple):
    url: str
    process: subprocess.Popen[str]


@contextlib.contextmanager
def serving(
    folder: pathlib.Path, *options: object, template: str = TEMPLATE, model: pathlib.Path = DEMO
) -> Iterator[Server]:
    """A model on a free port, with a template; ends with the block."""
    file = folder / "template.jinja"
    file.write_text(template)
    command = [sys.executable, "-m", "edgekv", "serve", "--model", str(model), "--port", "0", "--ctx", "1024"]
    command += ["--chat-template", str(file), *map(str, options)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while (line := process.stderr.readline()) and not (found := re.search(r"(http://\S+)", line)):
            said += line
        assert line, said
        assert found
        try:
            yield Server(found[1], process)
        finally:
            process.terminate()
            process.wait(30)


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


def chat(client: "openai.OpenAI", *messages: str, **options: Any) -> Any:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    options = {"max_tokens": 20, "temperature": 0} | options
    return client.chat.completions.create(model="demo", messages=turns, **options)
