"""The README can't drift: its scheme table, its options, its library example."""

import contextlib
import io
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_scheme_table_is_generated_from_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import readme

    assert readme.updated(README) == README


def test_named_commands_and_options_exist() -> None:
    from edgekv.cli import COMMANDS, parser

    named = set(re.findall(r"`edgekv (\w+)", README))
    assert named - {"COMMAND"} <= set(COMMANDS)
    helps = []
    for command in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
            parser().parse_args([command, "--help"])
        helps.append(out.getvalue())
    for option in set(re.findall(r"(?<![-\w])--[a-z][-a-z]+", README)) - {"--help"}:
        assert any(option in text for text in helps), option


def test_library_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's own lines, at the root of a checkout."""
    monkeypatch.chdir(ROOT)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(example, {})
    assert "prefill" in capsys.readouterr().out


def test_public_names_are_sorted_and_importable() -> None:
    import edgekv

    assert sorted(edgekv.__all__) == edgekv.__all__
    assert all(getattr(edgekv, name) is not None for name in edgekv.__all__)
