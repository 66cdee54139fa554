"""Chat templates that want all memory, all time, or to break the compiler: one line each, and the next works."""

import json
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from edgekv import child
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.text import load_tokenizer, template
from edgekv.text.template import ChatTemplate, find_template

DEMO = pathlib.Path(__file__).resolve().parent.parent / "models" / "demo"
MESSAGES = [{"role": "user", "content": "x"}]
FINE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "SECONDS", 1.0)


def close() -> None:
    if template._child:
        template._child.close()


def rendered(source: str) -> str:
    return ChatTemplate(source, load_tokenizer(DEMO)).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**10 }}",
        "{% for i in range(10**5) %}{% for j in range(10**5) %}{% set x = i * j %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ messages[0].content.ljust(10**11) }}",
        "{{ ('x' * 10**6) | replace('x', 'x' * 10**6) }}",
        "{{ range(10**5) | batch(10**9, 'x') | list }}",
        "{{ 9**(9**9) }}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{{ messages[0].content.__class__.__mro__ }}{{ undefined.attribute }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 90 + "]" * 90 + "1" * 100000 + " }}",
        "{% if x %}" * 500,
        "{{",
    ],
)
def test_hostile_templates_end_in_a_line(short: None, source: str) -> None:
    with pytest.raises(EdgeKVError) as error:
        rendered(source)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert rendered(FINE) == "user: x\n"


@pytest.mark.parametrize("started", [True, False])
def test_an_interrupted_text_is_not_the_next_ones(monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    def interrupt(*_: object) -> bytes:
        raise KeyboardInterrupt

    close()
    if started:
        rendered(FINE)
    with monkeypatch.context() as patch:
        patch.setattr(child.BoundedChild, "_received", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rendered("the first")
    assert rendered(FINE) == "user: x\n"


def test_a_process_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    close()
    with pytest.raises(EdgeKVError, match="does not start"):
        rendered(FINE)


@pytest.mark.parametrize("declared", ['[{"template": "x"}]', "[3]", '[{"name": [], "template": 1}]', "[" * 9000])
def test_odd_declarations_are_a_config_error(tmp_path: pathlib.Path, declared: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(f'{{"chat_template": {declared}}}')
    with pytest.raises(ConfigError, match="can't be read"):
        find_template(tmp_path)


def test_a_worker_without_its_renderer_ends_by_itself() -> None:
    """Its renderer may be killed while a template runs in circles."""
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    patched = "from edgekv import child; child.ALONE_SECONDS = 1; child.main('edgekv.text.sandbox')"
    request = json.dumps({"source": endless, "names": {}}).encode()
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen([sys.executable, "-c", patched], stdin=theirs.fileno()) as process:
        for each in (b"", request):
            ours.sendall(child.LENGTH.pack(len(each)) + each)
        assert process.wait(60) == -signal.SIGALRM
