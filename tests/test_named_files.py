"""Files that users name, and those that are remembered: what is opened, what is written over, what is believed."""

from __future__ import annotations

import io
import os
import pathlib
import stat
import sys

import pytest

from edgekv.cli import main
from edgekv.cli.terminal import one_line, redraw, visible_terminals
from edgekv.engine.session_file import write
from edgekv.errors import CheckpointError, ConfigError
from edgekv.files import Memo, PartialFile, atomic_write, cache_root, open_regular, read_object, require_writable


def mode_of(path: pathlib.Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def pipe(tmp_path: pathlib.Path) -> pathlib.Path:
    """One that nobody writes to: whoever opens it plainly waits for ever."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_what_is_no_regular_file_is_refused_at_once(pipe: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for path, what in ((pipe, "pipe"), (tmp_path, "folder"), ("/dev/zero", "device"), ("a\0b", "no such file")):
        with pytest.raises(OSError, match=what):
            open_regular(path)
    with pytest.raises(ValueError, match="it is a pipe"):
        read_object(pipe)


def test_what_is_parsed_whole_has_a_bound(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.json"
    for text, why in (
        ('{"a": 1234567890}', "accepted are 9"),
        ("[" * 1000000, "accepted are 9"),
        ("[1]", "holds a JSON list"),
        ("{", "not valid JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=why):
            read_object(path, 9)
    path.write_text("[" * 100000)
    with pytest.raises(ValueError, match="not valid JSON"):
        read_object(path)


def test_modes(tmp_path: pathlib.Path) -> None:
    before = os.umask(0o022)
    try:
        atomic_write(tmp_path / "report", b"1")
        atomic_write(tmp_path / "session", b"1", private=True)
        assert [mode_of(tmp_path / name) for name in ("report", "session")] == [0o644, 0o600]
        for path, mode in ((tmp_path / "report", 0o600), (tmp_path / "session", 0o640)):
            path.chmod(mode)
            atomic_write(path, b"2", private=True)
            assert (path.read_bytes(), mode_of(path)) == (b"2", mode)
        file = PartialFile(tmp_path / "report", 1)
        (partial,) = tmp_path.glob("report.partial-*")
        assert mode_of(partial) == 0o600  # from the beginning
        file.discard()
        write(tmp_path / "saved", {}, {})
        assert mode_of(tmp_path / "saved") == 0o600
    finally:
        os.umask(before)


def test_links(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own are followed; those of others in a folder like /tmp are not, as in Linux itself."""
    (tmp_path / "link").symlink_to("target")
    atomic_write(tmp_path / "link", b"1")
    assert (tmp_path / "target").read_bytes() == b"1"
    assert (tmp_path / "link").is_symlink()
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    real = os.stat

    def others_folder(path: object, **how: object) -> os.stat_result:
        status = real(path, **how)
        return os.stat_result((*status[:4], 54321, *status[5:])) if path == tmp_path else status

    monkeypatch.setattr(os, "stat", others_folder)
    with pytest.raises(CheckpointError, match="another user's symbolic link"):
        atomic_write(tmp_path / "link", b"2")
    assert (tmp_path / "target").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["absent/x", "file/x", ".", "n" * 300, "~nosuch/x", "a\0b"])
def test_what_can_not_be_written_is_known_before(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be written"):
        require_writable(name)
    for path in ("new", "file", "/dev/null"):
        require_writable(path)
    assert os.listdir(tmp_path) == ["file"]


def test_a_memo_is_what_was_written_or_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memo, content = Memo("of/this.json", 3), {"a": [1, 2.5, None], "b": {"c": "d"}}
    assert memo.read() is None
    memo.write(content)
    path = cache_root() / "of" / "this.json"
    assert (memo.read(), mode_of(path)) == (content, 0o600)
    assert Memo("of/this.json", 4).read() is None
    whole = path.read_text()
    damaged = ["", "[]", "{}", "[" * 100000, whole[:-9], whole.replace("2.5", "2.6"), whole.replace('"d"', "[]")]
    for text in damaged:
        path.write_text(text)
        assert memo.read() is None
    path.write_bytes(b"\xff")
    assert memo.read() is None
    path.unlink()
    os.mkfifo(path)
    assert memo.read() is None
    path.unlink()
    memo.keep(content)
    assert memo.read() == content


def test_without_a_home_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ConfigError, match="no home folder"):
        cache_root()
    memo = Memo("x.json", 1)
    memo.keep({})
    assert memo.read() is None


LONG, RUN = "n" * 300, ("run", "--prompt", "x")


@pytest.mark.parametrize(
    "arguments",
    [
        *((*RUN, "--model", path) for path in ("pipe", "/dev/zero", "", LONG, "~nosuch/x", "a\0b")),
        ("info", "--model", LONG),
        ("budget", "--shape", ""),
        ("board", "--quick", "--shape", LONG),
        ("board", "--quick", "--output", "deep.json/x"),
        *((*RUN, option, "pipe") for option in ("--config", "--adapter", "--lora", "--json-schema", "--session")),
        *((*RUN, option, "deep.json") for option in ("--config", "--json-schema", "--session")),
        *((*RUN, "--power-csv", path) for path in ("/dev/zero", "wide.csv", "odd.csv")),
        *((*RUN, option, path) for option in ("--json", "--session") for path in ("absent/x", ".", LONG)),
        ("run", "--prompt-file", "/dev/zero"),
        ("demo", "--text", "pipe"),
        ("demo", "--device", "nosuch"),
        ("bench", "--plot", "x.txt"),
        ("eval", "--text", "odd.csv", "--plot", "absent/x.png"),
        ("quantize", "--output", "pipe"),
        ("power", "record", "--csv", "absent/x", "--", "touch", "begun"),
    ],
)
@pytest.mark.usefixtures("pipe")
def test_the_command_line_refuses_files_in_one_line_before_any_work(
    arguments: tuple[str, ...],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.json").write_text("[" * 100000)
    (tmp_path / "wide.csv").write_text(f'time,watts\n"{LONG * 1000}"\n')
    (tmp_path / "odd.csv").write_text("time,watts\n0001-01-01T00:00:00,3\n1e300,4\n")
    before = sorted(os.listdir())
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("edgekv: error: ")
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*RUN, "--power", "x"), "--power x is unknown; accepted: auto, rpi-pmic"),
        (("power", "--meter", "x"), "--meter x is unknown; accepted: auto, rpi-pmic"),
        (("board", "--power", "x"), "--power x is unknown; accepted: auto, rpi-pmic"),
        (("bench", "--kv", "steps"), "--kv steps needs a `kv_budget`, or steps:budget=BYTES"),
        (
            (*RUN, "--ctx", "64", "--draft", "nosuch"),
            "--draft nosuch is unknown; accepted: none, ngram, auto",
        ),
    ],
)
def test_errors_name_the_option_that_was_given(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert f"error: {said}" in capsys.readouterr().err


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_character_commands_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """But what draws bars and tables; what is not a terminal gets the text as it is."""
    out, err, text = Tty(), Tty(), "a\tb\n\x1b[2J\x9b2J\r\x07é\udcff"
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with visible_terminals():
        print(text)
        redraw(["1"], 2)
        print(f"\r{text}", file=sys.stderr)
    assert sys.stdout is out
    shown = "a\tb\n\\x1b[2J\\x9b2J\\r\\x07é\\udcff\n"
    assert out.getvalue() == f"{shown}\x1b[2A\x1b[J1\n"
    assert err.getvalue() == f"\r{shown}"
    assert one_line(text) == shown[:-1].replace("\t", "\\t").replace("\n", "\\n")
    monkeypatch.setattr(sys, "stdout", plain := io.StringIO())
    with visible_terminals():
        print(text)
    assert plain.getvalue() == f"{text}\n"


def test_names_of_an_index_reach_the_terminal_written_out(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a\x1b]0;b\n\x07"
    folder.mkdir()
    assert main(["info", "--model", str(folder)]) == 2
    assert "/a\\x1b]0;b\\n\\x07: holds no" in capsys.readouterr().err
