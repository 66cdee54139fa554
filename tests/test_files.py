"""Files and folders that users name are written whole or not at all, and what is read is checked."""

from __future__ import annotations

import errno
import fcntl
import functools
import io
import os
import shutil
import stat
import sys
from collections.abc import Iterable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from checkpoint_files import sample
from helpers import Cli, raises
from safetensors import safe_open

from edgekv.checkpoint.hub import load_shape
from edgekv.checkpoint.tensors import ALIGNMENT, Tensors, TensorWriter
from edgekv.cli.terminal import one_line as shown_line
from edgekv.cli.terminal import redraw, visible_terminals
from edgekv.engine.session_file import write as write_session
from edgekv.errors import CheckpointError, ConfigError
from edgekv.files import (
    Memo,
    PartialFile,
    atomic_write,
    cache_root,
    create_folder_once,
    open_regular,
    read_object,
    require_writable,
)
from edgekv.weights.formats import ModelFormat
from edgekv.weights.random_weights import RandomWeights
from edgekv.weights.store import WeightStore, build


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write_all(path: Path, specs: Any, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    with TensorWriter(path, specs) as writer:
        for name, array in arrays:
            writer.write(name, array)


# Writing


def test_writer_streams_rows_and_aligns(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    expected = {"bf": sample("BF16", (7, 3)), "scalar": sample("F32", ()), "strided": sample("I32", (6, 4))[::2].T}
    specs = {"bf": ("BF16", (7, 3)), "scalar": ("F32", ()), "strided": ("I32", (4, 3))}
    with TensorWriter(path, specs, {"made": "here"}) as writer:
        for start in range(0, 7, 2):
            writer.write("bf", expected["bf"][start : start + 2])
        writer.write("scalar", expected["scalar"])
        writer.write("strided", expected["strided"])
        assert not path.exists()
    assert names(tmp_path) == ["a.safetensors"]
    assert path.stat().st_size == writer.nbytes
    file = Tensors.open(path)
    assert file["bf"].start % ALIGNMENT == 0
    assert list(file) == list(specs)
    for name, array in expected.items():
        np.testing.assert_array_equal(file[name].read(), array)
    with safe_open(path, framework="np") as other:
        assert other.metadata() == {"made": "here"}
        np.testing.assert_array_equal(other.get_tensor("strided"), expected["strided"])


def test_writer_refuses_what_the_specs_do_not_say(tmp_path: Path) -> None:
    specs, whole = {"a": ("F32", (2, 3)), "b": ("F32", (2, 3))}, np.zeros((2, 3), np.float32)
    for given, part in (
        ([("b", whole)], "out of order"),
        ([("a", whole), ("b", whole), ("b", whole)], "the next one is none"),
        ([("a", whole.astype(np.float16))], "float16"),
        ([("a", np.zeros((3, 3), np.float32))], "(3, 3)"),
        ([("a", whole.ravel())], "(6,)"),
        ([("a", whole[:1])], "not written whole"),
    ):
        with raises(CheckpointError, "a.safetensors", part):
            write_all(tmp_path / "a.safetensors", specs, given)
    with pytest.raises(CheckpointError, match=r"F8_E4M3.*BF16"):
        TensorWriter(tmp_path / "a", {"w": ("F8_E4M3", (1,))})
    with raises(CheckpointError, "a.safetensors", f"{128 + (1 << 60):,}", "free"):
        write_all(tmp_path / "a.safetensors", {"w": ("U8", (1 << 60,))}, [])  # is told before anything is written
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left")])
def test_what_stops_a_writer_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A full disk is told by the last call that writes."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=error))
    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        write_all(path, {"w": ("U8", (1,))}, [("w", np.zeros(1, np.uint8))])
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.safetensors"]


def test_leftovers_of_killed_writers_are_removed_and_live_ones_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    (tmp_path / "a.safetensors.partial-1-dead").write_bytes(b"x")
    spec = {"w": ("U8", (1,))}
    with TensorWriter(path, spec) as first, TensorWriter(path, spec) as second:
        assert len(os.listdir(tmp_path)) == 2
        first.write("w", np.full(1, 1, np.uint8))
        second.write("w", np.full(1, 2, np.uint8))
    assert names(tmp_path) == ["a.safetensors"]
    assert Tensors.open(path)["w"].read() == 1


def test_a_file_is_locked_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def after_another(source: Path, target: Path) -> None:
        PartialFile(tmp_path / "a.json", 1).discard()  # removes what others left
        replace(source, target)

    monkeypatch.setattr(os, "replace", after_another)
    atomic_write(tmp_path / "a.json", b"{}")
    assert (tmp_path / "a.json").read_bytes() == b"{}"


def test_modes_and_devices(tmp_path: Path) -> None:
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
        write_session(tmp_path / "saved", {}, {})
        assert mode_of(tmp_path / "saved") == 0o600
    finally:
        os.umask(before)
    atomic_write("/dev/null", b"gone")
    assert Path("/dev/null").is_char_device()


def test_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_can_not_be_written_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("absent/x", "file/x", ".", "n" * 300, "~nosuch/x", "a\0b"):
        for ask in (require_writable, functools.partial(atomic_write, data=b"{}")):
            with pytest.raises(CheckpointError, match="cannot be written"):
                ask(name)
    with pytest.raises(CheckpointError, match="no folder absent: make it first"):
        require_writable("absent/x")
    for path in ("new", "file", "/dev/null"):
        require_writable(path)
    assert names(tmp_path) == ["file"]


# Folders


def write(partial: Path) -> None:
    (partial / "a").write_bytes(b"a")


def test_what_another_one_writes_stays(tmp_path: Path) -> None:
    """The number may be of no process here, as another container's would be."""
    other = tmp_path / f"folder.partial-{2**22 + 1}"
    other.mkdir()
    lock = os.open(other, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    create_folder_once(tmp_path / "folder", write)
    assert names(tmp_path) == ["folder", other.name]
    os.close(lock)
    create_folder_once(tmp_path / "next", write)
    assert names(tmp_path) == ["folder", "next"]


def test_the_first_one_that_is_whole_stays(tmp_path: Path) -> None:
    folder = tmp_path / "folder"

    def late(partial: Path) -> None:
        (partial / "late").write_bytes(b"b")
        create_folder_once(folder, write)

    assert create_folder_once(folder, late) == folder
    assert (names(tmp_path), names(folder)) == (["folder"], ["a"])


@pytest.mark.parametrize("shared", [False, True])
def test_a_store_is_as_good_as_another_where_folders_are_shared(shared: bool, tmp_path: Path) -> None:
    weights, folder = RandomWeights(load_shape("tiny", 1)), tmp_path / "store"

    def late(_: Path) -> None:
        build(weights, ModelFormat("int8"), folder, None)

    with nullcontext() if shared else pytest.raises(CheckpointError, match="can't write the store"):
        build(weights, ModelFormat("q2"), folder, None, late, shared=shared)
    assert (names(tmp_path), WeightStore(folder).form.name) == (["store"], "int8")


def test_a_folder_that_goes_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without a lock looks like a leftover to others."""
    lock, taken = fcntl.flock, list[Path]()

    def after_another(file: object, flags: int) -> None:
        if len(taken) < 2:
            (partial,) = tmp_path.iterdir()
            taken.append(partial)
            shutil.rmtree(partial)
            if len(taken) == 2:
                raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        lock(file, flags)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", after_another)
    create_folder_once(tmp_path / "folder", write)
    assert len(set(taken)) == 2
    assert (names(tmp_path), names(tmp_path / "folder")) == (["folder"], ["a"])


def test_a_filesystem_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    (tmp_path / "folder.partial-1").mkdir()
    create_folder_once(tmp_path / "folder", write)
    assert (names(tmp_path), names(tmp_path / "folder")) == (["folder", "folder.partial-1"], ["a"])


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    def fail(partial: Path) -> None:
        write(partial)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"folder: can't be written \(No space left on device\)"):
        create_folder_once(tmp_path / "folder", fail)
    assert names(tmp_path) == []


def test_a_store_whose_weights_were_edited_is_not_the_checkpoint_s(tmp_path: Path) -> None:
    weights = RandomWeights(load_shape("tiny", 1))
    build(weights, ModelFormat("int8"), tmp_path / "store", None)
    assert WeightStore(tmp_path / "store").identity == weights.source.identity
    file = tmp_path / "store" / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"was changed after store\.json was written"):
        _ = WeightStore(tmp_path / "store").identity


# Reading


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """Whoever opens a pipe plainly waits for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, what in ((pipe, "pipe"), (tmp_path, "folder"), ("/dev/zero", "device"), ("a\0b", "no such file")):
        with pytest.raises(OSError, match=what):
            open_regular(path)
    with pytest.raises(ValueError, match="it is a pipe"):
        read_object(pipe)


def test_what_is_parsed_whole_has_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, most, why in (
        ('{"a": 1234567890}', 9, "accepted are 9"),
        ("[" * 1000000, 9, "accepted are 9"),
        ("[1]", 9, "holds a JSON list"),
        ("{", 9, "not valid JSON"),
        ("[" * 100000, 1 << 20, "not valid JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=why):
            read_object(path, most)


def test_a_memo_is_what_was_written_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memo, content = Memo("of/this.json", 3), {"a": [1, 2.5, None], "b": {"c": "d"}}
    assert memo.read() is None
    memo.write(content)
    path = cache_root() / "of" / "this.json"
    assert (memo.read(), mode_of(path)) == (content, 0o600)
    assert Memo("of/this.json", 4).read() is None
    whole = path.read_text()
    texts = ["", "[]", "{}", "[" * 100000, whole[:-9], whole.replace("2.5", "2.6"), whole.replace('"d"', "[]")]
    for damaged in (b"\xff", *map(str.encode, texts)):
        path.write_bytes(damaged)
        assert memo.read() is None
    path.unlink()
    os.mkfifo(path)
    assert memo.read() is None
    path.unlink()
    memo.keep(content)
    assert memo.read() == content
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ConfigError, match="no home folder"):
        cache_root()
    memo.keep({})
    assert memo.read() is None


# The command line

LONG, RUN = "n" * 300, ("run", "--prompt", "x")


@pytest.mark.parametrize(
    "arguments",
    [
        *((*RUN, "--model", path) for path in ("pipe", "/dev/zero", "", LONG, "~nosuch/x", "a\0b")),
        ("board", "--quick", "--output", "deep.json/x"),
        *((*RUN, option, "pipe") for option in ("--config", "--adapter", "--lora", "--json-schema", "--session")),
        *((*RUN, option, "deep.json") for option in ("--config", "--json-schema", "--session")),
        *((*RUN, "--power-csv", path) for path in ("/dev/zero", "wide.csv", "odd.csv")),
        *((*RUN, "--json", path) for path in ("absent/x", ".")),
        ("run", "--prompt-file", "/dev/zero"),
        ("eval", "--text", "odd.csv", "--plot", "absent/x.png"),
        ("quantize", "--output", "pipe"),
        ("power", "record", "--csv", "absent/x", "--", "touch", "begun"),
    ],
)
def test_the_command_line_refuses_files_in_one_line_before_any_work(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    (tmp_path / "deep.json").write_text("[" * 100000)
    (tmp_path / "wide.csv").write_text(f'time,watts\n"{LONG * 1000}"\n')
    (tmp_path / "odd.csv").write_text("time,watts\n0001-01-01T00:00:00,3\n1e300,4\n")
    before = names(tmp_path)
    cli(*arguments, status=2)
    assert names(tmp_path) == before


def test_no_character_commands_the_terminal(tmp_path: Path, cli: Cli) -> None:
    """Bars and tables may; what is not a terminal gets the text as it is, but for errors' names."""
    folder = tmp_path / "a\x1b]0;b\n\x07"
    folder.mkdir()
    assert "/a\\x1b]0;b\\n\\x07: holds no" in cli("info", "--model", folder, status=2).err
    out, err, text = io.StringIO(), io.StringIO(), "a\tb\n\x1b[2J\x9b2J\r\x07é\udcff"
    out.isatty = err.isatty = lambda: True  # type: ignore[method-assign]
    with redirect_stdout(out), redirect_stderr(err):
        with visible_terminals():
            print(text)
            redraw(["1"], 2)
            print(f"\r{text}", file=sys.stderr)
        assert sys.stdout is out
    shown = "a\tb\n\\x1b[2J\\x9b2J\\r\\x07é\\udcff\n"
    assert out.getvalue() == f"{shown}\x1b[2A\x1b[J1\n"
    assert err.getvalue() == f"\r{shown}"
    assert shown_line(text) == shown[:-1].replace("\t", "\\t").replace("\n", "\\n")
    with redirect_stdout(io.StringIO()) as plain, visible_terminals():
        print(text)
    assert plain.getvalue() == f"{text}\n"
