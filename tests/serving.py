"""Starts `edgekv serve` as a user does, for the tests that talk to it."""

import contextlib
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

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
