"""What packaging/ starts is what edgekv accepts."""

import pathlib
import re
import shlex
import subprocess

import pytest
import tables

from edgekv.cli import parser

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGING = ROOT / "packaging"
SERVICE = (PACKAGING / "edgekv.service").read_text(encoding="utf-8")
CONTAINER = (PACKAGING / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
START = (PACKAGING / "edgekv-start").read_text(encoding="utf-8")


def assigned(lines: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line) if "=" in word)


def accepted(command: str, variables: dict[str, str]) -> None:
    """The command line's own parser takes it, each variable replaced by its default."""
    words = [re.sub(r"\$\{?(\w+)\}?", lambda match: variables[match[1]], word) for word in shlex.split(command)]
    parser().parse_args(words)


def test_both_start_the_scheme_that_is_recommended() -> None:
    variables = [
        assigned(re.findall(r"^Environment=(.*)$", SERVICE, re.MULTILINE)),
        assigned(re.findall(r"^ENV (.*)$", CONTAINER, re.MULTILINE)),
    ]
    assert [each["KV"] for each in variables] == [tables.CHOSEN, tables.CHOSEN]


@pytest.mark.parametrize("key", ["ExecStartPre", "ExecStart"])
def test_the_service_starts_what_edgekv_accepts(key: str) -> None:
    (command,) = re.findall(rf"^{key}=/opt/edgekv/bin/edgekv (.*)$", SERVICE, re.MULTILINE)
    accepted(command, assigned(re.findall(r"^Environment=(.*)$", SERVICE, re.MULTILINE)))


def test_the_service_may_compile_and_writes_to_its_cache_alone() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", SERVICE, re.MULTILINE))
    assert "MemoryDenyWriteExecute" not in settings
    assert (settings["DynamicUser"], settings["ProtectSystem"]) == ("yes", "strict")
    variables = assigned(re.findall(r"^Environment=(.*)$", SERVICE, re.MULTILINE))
    cache = f"/var/cache/{settings['CacheDirectory']}"
    assert all(variables[name].startswith(cache) for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"))


def test_the_container_starts_what_edgekv_accepts() -> None:
    variables = assigned(re.findall(r"^ENV (.*)$", CONTAINER, re.MULTILINE))
    commands = re.findall(r"^(?:exec )?edgekv (.*)$", START, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["warm", "serve"]
    for command in commands:
        accepted(command, variables)


def test_the_container_copies_what_there_is_and_what_the_package_installs() -> None:
    copied = re.findall(r"^COPY (?!--from)(?:--chmod=\S+ )?(.*) \S+$", CONTAINER, re.MULTILINE)
    files = [name for line in copied for name in line.split()]
    assert all((ROOT / name).exists() for name in files)
    folders = re.findall(r'^"share/\S+ = \["(\w+(?:/data)?)/', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {"edgekv", "pyproject.toml", *folders} <= set(files)


def test_the_scripts_are_shell() -> None:
    for shell, file in (("sh", PACKAGING / "edgekv-start"), ("bash", ROOT / "tools" / "arm" / "container.sh")):
        subprocess.run([shell, "-n", file], check=True)


def test_the_longest_context_fits_and_a_longer_one_does_not() -> None:
    model = tables.unread_model("llama3.2-1b", tables.read_shape("llama3.2-1b"))
    memory = 2 * tables.GIB
    ctx = tables.longest(model, tables.CHOSEN, memory)
    assert tables.total(tables.plan(model, tables.CHOSEN, ctx)) <= memory
    assert tables.total(tables.plan(model, tables.CHOSEN, ctx + tables.STEP)) > memory
