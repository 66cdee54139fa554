"""The TAB key: a real bash completes commands, options and files."""

import pathlib
import shutil
import subprocess

import pytest

from edgekv.cli import main

ASK = """
source "$1"
COMP_WORDS=({words}); COMP_CWORD={at}; COMP_LINE="{words}"
_shtab_edgekv 2>/dev/null; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["completion", "bash"]) == 0
    path = tmp_path_factory.mktemp("completion") / "edgekv.bash"
    path.write_text(out.getvalue())
    return path


def completed(script: pathlib.Path, *words: str, folder: pathlib.Path | None = None) -> list[str]:
    ask = ASK.format(words=" ".join(words[:-1]) + f" {words[-1]!r}", at=len(words) - 1)
    done = subprocess.run(
        ["bash", "-c", ask, "bash", script], capture_output=True, text=True, cwd=folder, check=True
    )
    return done.stdout.split()


def test_commands_options_and_files(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert completed(script, "edgekv", "sc") == ["schemes"]
    assert "--max-new-tokens" in completed(script, "edgekv", "run", "--max-")
    (tmp_path / "notes.txt").touch()
    assert "notes.txt" in completed(script, "edgekv", "run", "--prompt-file", "no", folder=tmp_path)


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "max-new-tokens" in capsys.readouterr().out
