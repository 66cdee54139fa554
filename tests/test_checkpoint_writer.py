"""Files appear whole or not at all, and other readers accept them."""

import errno
import fcntl
import functools
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import one_line, sample
from safetensors import safe_open

from edgekv import files
from edgekv.checkpoint.tensors import ALIGNMENT, MappedTensor, Tensors, TensorWriter
from edgekv.errors import CheckpointError
from edgekv.files import atomic_write


def write_all(
    path: Path,
    specs: Mapping[str, tuple[str, tuple[int, ...]]],
    arrays: Iterable[tuple[str, np.ndarray]],
) -> None:
    with TensorWriter(path, specs) as writer:
        for name, array in arrays:
            writer.write(name, array)


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
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert path.stat().st_size == writer.nbytes
    file = Tensors.open(path)
    first = file["bf"]
    assert isinstance(first, MappedTensor)
    assert first.start % ALIGNMENT == 0
    assert list(file) == list(specs)
    for name, array in expected.items():
        np.testing.assert_array_equal(file[name].read(), array)
    with safe_open(path, framework="np") as other:
        assert other.metadata() == {"made": "here"}
        np.testing.assert_array_equal(other.get_tensor("strided"), expected["strided"])


@pytest.mark.parametrize(
    ("name", "array", "part"),
    [
        ("b", np.zeros((2, 3), np.float32), "out of order"),
        ("x", np.zeros((2, 3), np.float32), "out of order"),
        ("a", np.zeros((2, 3), np.float16), "float16"),
        ("a", np.zeros((2, 4), np.float32), "(2, 4)"),
        ("a", np.zeros((3, 3), np.float32), "(3, 3)"),
        ("a", np.zeros(6, np.float32), "(6,)"),
        ("a", np.zeros((1, 3), np.float32), "not written whole"),
    ],
)
def test_writer_refuses_what_the_specs_do_not_say(tmp_path: Path, name: str, array: np.ndarray, part: str) -> None:
    specs = {"a": ("F32", (2, 3)), "b": ("F32", (2, 3))}
    with pytest.raises(CheckpointError) as error:
        write_all(tmp_path / "a.safetensors", specs, [(name, array)])
    one_line(error, "a.safetensors", part)
    assert os.listdir(tmp_path) == []


def test_writer_refuses_more_tensors_and_unknown_types(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        write_all(tmp_path / "a", {"w": ("U8", (1,))}, [("w", np.zeros(1, np.uint8))] * 2)
    one_line(error, "'w'", "none")
    with pytest.raises(CheckpointError) as error:
        TensorWriter(tmp_path / "a", {"w": ("F8_E4M3", (1,))})
    one_line(error, "F8_E4M3", "BF16")
    assert os.listdir(tmp_path) == []


def test_interrupted_writer_keeps_the_old_file(tmp_path: Path) -> None:
    def interrupted() -> Iterator[tuple[str, np.ndarray]]:
        yield "w", np.zeros(1, np.uint8)
        raise KeyboardInterrupt

    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_all(path, {"w": ("U8", (2,))}, interrupted())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.safetensors"]


class FullDisk:
    """A file whose method `failing` finds the disk full."""

    def __init__(self, path: Path, mode: str, failing: str, opener: Any = None) -> None:
        self._file = open(path, mode, opener=opener)  # noqa: SIM115 - closed by the writer
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        return full_disk if name == self._failing else getattr(self._file, name)


def full_disk(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("failing", ["write", "flush"])
def test_disk_that_fills_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    monkeypatch.setattr(files, "open", functools.partial(FullDisk, failing=failing), raising=False)
    path = tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError) as error:
        write_all(path, {"w": ("U8", (2,))}, [("w", np.zeros(2, np.uint8))])
    one_line(error, path, "No space left", "66 bytes", "free")
    assert os.listdir(tmp_path) == []


def test_disk_that_is_too_small_is_told_before_writing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        write_all(tmp_path / "a.safetensors", {"w": ("U8", (1 << 60,))}, [])
    one_line(error, "a.safetensors", f"{128 + (1 << 60):,}", "free")
    assert os.listdir(tmp_path) == []


LIMITED_WRITER = """
import resource, sys
import numpy as np
from edgekv.checkpoint.tensors import TensorWriter
from edgekv.errors import CheckpointError

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    with TensorWriter(sys.argv[1], {"w": ("U8", (4 << 20,))}) as writer:
        for _ in range(4):
            writer.write("w", np.zeros(1 << 20, np.uint8))
except CheckpointError as error:
    print(error)
"""


def test_kernel_that_refuses_to_grow_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    run = subprocess.run(
        [sys.executable, "-c", LIMITED_WRITER, str(path)], capture_output=True, text=True, check=True
    )
    assert "File too large" in run.stdout
    assert str(path) in run.stdout
    assert run.stdout.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        atomic_write(tmp_path / "absent" / "a.json", b"{}")
    one_line(error, "absent", "No such file")


def test_leftovers_of_killed_writers_are_removed_and_live_ones_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    (tmp_path / "a.safetensors.partial-1-dead").write_bytes(b"x")
    spec = {"w": ("U8", (1,))}
    with TensorWriter(path, spec) as first, TensorWriter(path, spec) as second:
        assert len(os.listdir(tmp_path)) == 2
        first.write("w", np.full(1, 1, np.uint8))
        second.write("w", np.full(1, 2, np.uint8))
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert Tensors.open(path)["w"].read() == 1


def test_a_file_that_goes_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a lock looks like a leftover to others, who lock it to remove it."""
    lock, taken = fcntl.flock, list[Path]()

    def after_another(file: Any, flags: int) -> None:
        if len(taken) < 2:
            (unlocked,) = tmp_path.iterdir()
            taken.append(unlocked)
            unlocked.unlink()
            if len(taken) == 2:
                raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        lock(file, flags)

    monkeypatch.setattr(fcntl, "flock", after_another)
    atomic_write(tmp_path / "a.json", b"{}")
    assert len(set(taken)) == 2
    assert os.listdir(tmp_path) == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"{}"


def test_a_file_is_locked_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def after_another(source: Path, target: Path) -> None:
        files._remove_abandoned(tmp_path, "a.json")
        replace(source, target)

    monkeypatch.setattr(os, "replace", after_another)
    atomic_write(tmp_path / "a.json", b"{}")
    assert (tmp_path / "a.json").read_bytes() == b"{}"


MANY_WRITES = """
import sys
from edgekv.files import atomic_write

for _ in range(100):
    atomic_write(sys.argv[1], b"whole")
"""


def test_processes_that_write_one_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a"
    writers = [subprocess.Popen([sys.executable, "-c", MANY_WRITES, path]) for _ in range(4)]
    assert [writer.wait() for writer in writers] == [0, 0, 0, 0]
    assert os.listdir(tmp_path) == ["a"]
    assert path.read_bytes() == b"whole"


def test_a_filesystem_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: object, flags: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / "a.json.partial-1").write_bytes(b"x")
    atomic_write(tmp_path / "a.json", b"{}")
    assert sorted(os.listdir(tmp_path)) == ["a.json", "a.json.partial-1"]


def test_atomic_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    atomic_write(path, b"one")
    (tmp_path / "link.json").symlink_to(path)
    atomic_write(tmp_path / "link.json", b"two")
    assert path.read_bytes() == b"two"
    assert (tmp_path / "link.json").is_symlink()

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(CheckpointError) as error:
        atomic_write(path, b"three")
    one_line(error, path, "No space left", "5 bytes")
    assert path.read_bytes() == b"two"
    assert sorted(os.listdir(tmp_path)) == ["link.json", "report.json"]


def test_atomic_write_leaves_devices_alone(tmp_path: Path) -> None:
    atomic_write("/dev/null", b"gone")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(CheckpointError) as error:
        atomic_write(tmp_path, b"a folder")
    one_line(error, tmp_path, "it is a folder")
