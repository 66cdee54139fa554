"""What the library calls a parameter, the command line calls an option."""

import ast
import dataclasses
import pathlib
import re

import pytest

import edgekv
from edgekv import SamplingParams
from edgekv.cli import COMMANDS, main, parser
from edgekv.cli.options import FLAGS, in_flags
from edgekv.engine.options import Options
from edgekv.errors import EdgeKVError, unknown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ctx=65: this model has 64 positions", "--ctx 65: this model has 64 positions"),
        ("kv='h1b:sketch_bits=100': multiples of 64", "--kv h1b:sketch_bits=100: multiples of 64"),
        ("raise `kv_budget`, or set overflow='slide'", "raise --kv-budget, or set --overflow slide"),
        (
            "pass tokenizer=PATH; or config='a/b.json'",
            "pass --tokenizer PATH; or --config a/b.json",
        ),
        ("top_k=-1 is out of range", "--top-k -1 is out of range"),
        ('model="it\'s here": there is none', "--model it's here: there is none"),
        ("threads='all': accepted: a number", "--threads all: accepted: a number"),
        ("leave `images` out", "leave --image out"),
        ("weights of the model and `unknown` words stay", "weights of the model and `unknown` words stay"),
        (
            "onebit:sink=4,residual_length=128 and steps:budget=9",
            "onebit:sink=4,residual_length=128 and steps:budget=9",
        ),
        ("--kv dense has no kernel", "--kv dense has no kernel"),
        ("'top_k=3 `ctx`' was said, not \"seed=1\"; don't", "'top_k=3 `ctx`' was said, not \"seed=1\"; don't"),
        ("/a/ctx=5/x: can't be read", "/a/ctx=5/x: can't be read"),
        ("kv='': accepted", "--kv '': accepted"),
    ],
)
def test_in_flags(text: str, shown: str) -> None:
    assert in_flags(text) == shown


def test_in_flags_leaves_what_a_user_gave() -> None:
    given = "see `ctx` and seed=3"
    error = EdgeKVError(f"stop={given}: lower `ctx`", field="stop", value=given)
    assert in_flags(error) == f"--stop {given}: lower --ctx"


def test_in_flags_names_options_that_the_command_has() -> None:
    text = "meter='x': lower `ctx` or `kv_budget`"
    assert in_flags(text, {"--power", "--ctx"}) == "--power x: lower --ctx or `kv_budget`"
    assert in_flags(text, {"--meter"}) == "--meter x: lower `ctx` or `kv_budget`"


def test_every_parameter_has_an_option_of_the_command_line() -> None:
    """Those of a session and of sampling."""
    options = {
        option
        for command in COMMANDS
        for action in parser()._subparsers._group_actions[0].choices[command]._actions
        for option in action.option_strings
    }
    names = [field.name for kind in (Options, SamplingParams) for field in dataclasses.fields(kind)]
    assert {FLAGS[name] for name in names} <= options


def has_docs(node: object) -> bool:
    """Whether a node begins with a docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, kinds) and ast.get_docstring(node) is not None


def test_messages_below_the_command_line_name_no_option() -> None:
    """What a user of the library reads: string literals of modules outside `cli`, but for shell commands."""
    root = pathlib.Path(edgekv.__file__).parent
    rooms = ("engine", "server", "eval", "checkpoint", "models", "weights", "vision", "text", "kvcache")
    found = []
    for path in (path for room in rooms for path in (root / room).rglob("*.py")):
        tree = ast.parse(path.read_text())
        docs = {id(node.body[0].value) for node in ast.walk(tree) if has_docs(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                text = re.sub(r"`?edgekv [a-z]+ .*", "", node.value)
                if re.search(r"(?<![-\w])--[a-z]", text):
                    found.append((path.relative_to(root).as_posix(), node.value))
    assert {name for name, _ in found} == {"engine/verdicts.py"}  # a shell command


def test_errors_carry_what_is_accepted() -> None:
    error = unknown(EdgeKVError, "kv", "nope", ("dense", "onebit"))
    assert (error.field, error.value, error.accepted) == ("kv", "nope", ("dense", "onebit"))
    assert str(error) == "kv='nope' is unknown; accepted: dense, onebit"
    plain = EdgeKVError("said")
    assert (plain.field, plain.value, plain.accepted) == (None, None, ())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ctx", "99999"], "error: --ctx 99999: this model has"),
        (["--kv", "nope"], "error: --kv nope is unknown; accepted: f16, "),
        (["--kv", "steps"], "error: --kv steps needs a --kv-budget"),
        (["--kv", "dense:tau=1"], "tau applies to: h1b, sign_keys"),
        (["--kv", "planes:tau=0.1"], ",key_scale=0.0,seed=0,"),
        (["--kv", "dense:seed=3"], "error: --kv dense:seed=3: 'seed' is not one of its knobs"),
        (["--weights", "int3"], "error: --weights int3 is unknown; accepted: auto, f32"),
        (["--overflow", "wrap"], "error: --overflow wrap is unknown; accepted: stop, slide"),
        (["--kv-budget", "1K"], "error: --kv-budget"),
        (["--kv-budget", "1X"], "error: --kv-budget 1X is not understood"),
        (["--temperature", "-1"], "error: --temperature -1.0: accepted: "),
        (["--chat-template", "x"], None),
    ],
)
def test_the_command_line_says_its_options(
    arguments: list[str], said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if said is None:
        assert main(["chat", "--ctx", "64", *arguments]) == 2
        said = "error: --chat-template x: cannot be read"
    else:
        assert main(["run", "--prompt", "x", *arguments]) == 2
    assert said in capsys.readouterr().err
