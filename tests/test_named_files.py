"""Files that users name, and those that are remembered: what is opened, what is written over, what is believed."""

from __future__ import annotations

import os
import pathlib
import stat

import pytest

from edgekv.cache_folder import Memo, cache_root
from edgekv.errors import CheckpointError, ConfigError
from edgekv.files import PartialFile, atomic_write, open_regular, read_object, require_writable


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
