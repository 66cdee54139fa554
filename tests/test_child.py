"""Processes that are started run nothing of the working folder; a library that dies takes one text with it."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers import raises
from serving import DEMO

from edgekv import child
from edgekv.engine import grammar
from edgekv.engine.grammar import Constraint, JsonSchema
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.text import Tokenizer, load_tokenizer, template
from edgekv.text.template import ChatTemplate

PLANTED = "signal", "json", "struct", "numpy", "jinja2", "llguidance", "edgekv/__init__", "edgekv/child"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO)


@pytest.fixture
def planted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A working folder whose modules leave a file there when they run. Earlier processes are forgotten."""
    (tmp_path / "edgekv").mkdir()
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(template, "_child", None)
    monkeypatch.setattr(grammar, "_pools", {})
    return tmp_path


def test_planted_modules_do_not_run(planted: pathlib.Path, tokenizer: Tokenizer) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(planted / "kernels")}
    subprocess.run(child.command("edgekv.engine.cpu", "dense"), env=environment, check=True)
    compiled = {file.name.partition("-")[0] for file in planted.glob("kernels/*/*")}
    assert compiled >= {"cpu._put", "cpu._score", "cpu._add"}  # the scheme's loops
    assert ChatTemplate("{{ messages[0] }}", tokenizer).render(["x"]) == "x"
    assert not JsonSchema({}, tokenizer, tokenizer.vocab_size).accept(tokenizer.encode("[", bos=False)[-1])
    assert not (planted / "ran").exists()


def chain(n: int) -> dict[str, Any]:
    """Returns definitions of which each refers to the one before; the first is the longest way."""
    links = {str(i): {"properties": {"a": {"$ref": f"#/$defs/{i - 1}"}}} for i in range(1, n)}
    return {"$ref": f"#/$defs/{n - 1}", "$defs": {"0": {"type": "string"}, **links}}


def doubling(n: int) -> dict[str, Any]:
    both = {str(i): {"allOf": [{"$ref": f"#/$defs/{i - 1}"}] * 2} for i in range(1, n)}
    return {"$ref": f"#/$defs/{n - 1}", "$defs": {"0": {"properties": {"a": {}}}, **both}}


def nested(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(n):
        schema = {"items": schema}
    return schema


def test_schemas_with_references_are_followed(tokenizer: Tokenizer) -> None:
    tree = {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "additionalProperties": False}
    many = {"enum": [str(i) for i in range(20_000)]}
    for schema in (chain(900), doubling(40), nested(60), tree, {"$ref": "#/$defs/a~1b", "$defs": {"a/b": many}}):
        JsonSchema(schema, tokenizer, tokenizer.vocab_size)
    for n in (400, 5000):
        with pytest.raises(ConfigError, match="recursion"):
            JsonSchema(nested(n), tokenizer, tokenizer.vocab_size)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives processes a second."""
    monkeypatch.setattr(child, "SECONDS", 1.0)


@pytest.mark.usefixtures("impatient")
def test_a_schema_that_ends_the_library_is_one_line(tokenizer: Tokenizer) -> None:
    with raises(ConfigError, match="it may take 1 s and 512 MiB"):
        JsonSchema({"type": "integer", "multipleOf": 10_000_019}, tokenizer, tokenizer.vocab_size)
    assert follow(JsonSchema({"const": 12}, tokenizer, tokenizer.vocab_size), tokenizer) == "12"


def follow(constraint: Constraint, tokenizer: Tokenizer) -> str:
    """Returns the text whose tokens are always the first ones allowed."""
    ids: list[int] = []
    complete = False
    while not complete:
        ids.append(int(constraint.allowed(np.zeros(tokenizer.vocab_size, np.float32)).argmax()))
        complete = constraint.accept(ids[-1])
    return tokenizer.decode(ids)


def test_texts_at_once_have_a_process_each_and_one_that_is_killed_ends_its_own(tokenizer: Tokenizer) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 20, "maxItems": 20}
    made = [JsonSchema(schema, tokenizer, tokenizer.vocab_size) for _ in range(3)]
    processes = [each._child._process for each in made]
    assert len({process.pid for process in processes}) == 3
    os.kill(processes[0].pid, signal.SIGKILL)
    with pytest.raises(ConfigError, match="ended"):
        follow(made[0], tokenizer)
    with ThreadPoolExecutor(2) as pool:
        texts = pool.map(lambda each: follow(each, tokenizer), made[1:])
        assert [json.loads(text) for text in texts] == [[1] * 20] * 2
    del made
    gc.collect()
    again = JsonSchema(schema, tokenizer, tokenizer.vocab_size)
    assert again._child._process in processes[1:]


def test_an_unanswered_question_ends_its_process(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next text's schema would be taken for the tokens."""
    monkeypatch.setattr(tokenizer, "encode_inside", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        follow(JsonSchema({"const": "a text that must come"}, tokenizer, tokenizer.vocab_size), tokenizer)
    monkeypatch.undo()
    assert follow(JsonSchema({"const": 12}, tokenizer, tokenizer.vocab_size), tokenizer) == "12"


def test_after_fork_the_child_has_its_own(tokenizer: Tokenizer) -> None:
    constraint = JsonSchema({"const": 12}, tokenizer, tokenizer.vocab_size)
    forked = os.fork()
    if not forked:
        code = 1
        try:
            with pytest.raises(EdgeKVError, match="ended"):
                constraint.accept(0)
            code = int(follow(JsonSchema({"const": 3}, tokenizer, tokenizer.vocab_size), tokenizer) != "3")
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert follow(constraint, tokenizer) == "12"


# Chat templates that want all memory, all time, or to break the compiler

FINE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def close() -> None:
    if template._child:
        template._child.close()


def rendered(source: str) -> str:
    return ChatTemplate(source, load_tokenizer(DEMO)).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**10 }}",
        "{% for i in range(10**5) %}{% for j in range(10**5) %}{% set x = i * j %}{% endfor %}{% endfor %}",
        "{{ messages[0].content.ljust(10**11) }}",
        "{{ messages.append(1) }}",
        "{{ range(10**5) | batch(10**9, 'x') | list }}",
        "{{ 9**(9**9) }}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{{ messages[0].content.__class__.__mro__ }}{{ undefined.attribute }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 90 + "]" * 90 + "1" * 100000 + " }}",
        "{{",
    ],
)
@pytest.mark.usefixtures("impatient")
def test_hostile_templates_end_in_a_line(source: str) -> None:
    with raises(EdgeKVError) as error:
        rendered(source)
    assert len(str(error.value)) < 500
    assert rendered(FINE) == "user: x\n"


@pytest.mark.parametrize("started", [True, False])
def test_an_interrupted_text_is_not_the_next_ones(monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    close()
    if started:
        rendered(FINE)
    with monkeypatch.context() as patch:
        patch.setattr(child.BoundedChild, "_received", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rendered("the first")
    assert rendered(FINE) == "user: x\n"


def test_a_process_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    close()
    with pytest.raises(EdgeKVError, match="does not start"):
        rendered(FINE)


def test_a_worker_without_its_renderer_ends_by_itself() -> None:
    """A renderer may be killed while a template runs in circles."""
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    patched = "from edgekv import child; child.ORPHAN_SECONDS = 1; child.main('edgekv.text.sandbox')"
    request = json.dumps({"source": endless, "names": {}}).encode()
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen([sys.executable, "-c", patched], stdin=theirs.fileno()) as process:
        for each in (b"", request):
            ours.sendall(child.LENGTH.pack(len(each)) + each)
        assert process.wait(60) == -signal.SIGALRM
