"""The README can't drift: its table of commands, its command lines, its library example, its links, its length."""

import pathlib
import re

import pytest
from shown_commands import shown, unknown

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_table_of_commands_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import readme

    assert readme.updated(README) == README


def test_a_screen_and_a_half() -> None:
    assert len(README.splitlines()) <= 115


def test_each_option_is_one_of_the_command_that_it_stands_with() -> None:
    commands = list(shown(README))
    assert {"run", "demo", "chat", "serve", "budget"} <= {words[0] for words in commands}
    assert [words for words in commands if unknown(words)] == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("edgekv run --kv planes --prompt x", []),
        ("edgekv info --prompt x", ["--prompt"]),
        ("edgekv power record --csv log.csv -- program --any-option", []),
        ("edgekv power record --kv planes -- program", ["--kv"]),
        ("edgekv fly", ["fly"]),
    ],
)
def test_a_wrong_option_is_found(line: str, wrong: list[str]) -> None:
    (words,) = shown(f"```sh\n. venv/bin/activate && {line} # said\n```\n")
    assert unknown(words) == wrong
    assert list(shown(f"It is `{line}`.")) == [words]


def test_links_lead_to_files() -> None:
    targets = re.findall(r"\]\(([^)#]+)", README)
    assert len(targets) > 15
    assert [target for target in targets if not (ROOT / target).is_file()] == []


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
