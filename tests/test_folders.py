"""Folders that appear whole, whoever else writes them, and what killed processes leave of them."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from edgekv.checkpoint.hub import load_shape
from edgekv.errors import CheckpointError
from edgekv.files import create_folder_once
from edgekv.weights.formats import WEIGHTS
from edgekv.weights.store import RandomWeights, WeightStore, build

KILLED = """
import os, pathlib, signal, sys
from edgekv.files import create_folder_once

def make(partial):
    (partial / "half").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

create_folder_once(pathlib.Path(sys.argv[1]), make)
"""


def names(folder: pathlib.Path) -> list[str]:
    return sorted(os.listdir(folder))


def write(partial: pathlib.Path) -> None:
    (partial / "a").write_bytes(b"a")


def test_two_threads_make_a_store_at_once(tmp_path: pathlib.Path) -> None:
    store, both, errors = tmp_path / "store", threading.Barrier(2, timeout=60), list[Exception]()

    def wait(partial: pathlib.Path) -> None:
        both.wait()
        assert partial.is_dir()

    def work() -> None:
        try:
            build(RandomWeights(load_shape("tiny", 1)), WEIGHTS["int8"], store, None, beside=wait)
        except Exception as error:
            both.abort()
            errors.append(error)

    pair = [threading.Thread(target=work) for _ in range(2)]
    for thread in pair:
        thread.start()
    for thread in pair:
        thread.join()
    assert errors == []
    assert names(tmp_path) == ["store"]
    assert names(store) == ["store.json", "weights.safetensors"]
    assert WeightStore(store).form == WEIGHTS["int8"]


def test_leftovers_of_killed_writers_go(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "folder"
    killed = subprocess.run([sys.executable, "-c", KILLED, folder], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 1
    create_folder_once(folder, write)
    assert names(tmp_path) == ["folder"]
    assert names(folder) == ["a"]


def test_what_another_one_writes_stays(tmp_path: pathlib.Path) -> None:
    """Also under the number of a process that there is not, as another container's would be."""
    other = tmp_path / f"folder.partial-{2**22 + 1}"
    other.mkdir()
    lock = os.open(other, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    create_folder_once(tmp_path / "folder", write)
    assert names(tmp_path) == ["folder", other.name]
    os.close(lock)
    create_folder_once(tmp_path / "next", write)
    assert names(tmp_path) == ["folder", "next"]


def test_the_first_one_that_is_whole_stays(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "folder"

    def late(partial: pathlib.Path) -> None:
        (partial / "late").write_bytes(b"b")
        create_folder_once(folder, write)

    assert create_folder_once(folder, late) == folder
    assert names(tmp_path) == ["folder"]
    assert names(folder) == ["a"]


def test_a_folder_that_goes_before_it_is_locked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a lock looks like a leftover to others."""
    lock, taken = fcntl.flock, list[pathlib.Path]()

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
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["a"]


def test_a_filesystem_without_locks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: object, flags: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / "folder.partial-1").mkdir()
    create_folder_once(tmp_path / "folder", write)
    assert names(tmp_path) == ["folder", "folder.partial-1"]
    assert names(tmp_path / "folder") == ["a"]


def test_a_folder_that_can_not_be_written(tmp_path: pathlib.Path) -> None:
    def fail(partial: pathlib.Path) -> None:
        write(partial)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"folder: can't be written \(No space left on device\)"):
        create_folder_once(tmp_path / "folder", fail)
    assert names(tmp_path) == []


def test_a_store_whose_weights_were_edited_is_not_the_checkpoint_s(tmp_path: pathlib.Path) -> None:
    weights = RandomWeights(load_shape("tiny", 1))
    build(weights, WEIGHTS["int8"], tmp_path / "store", None)
    assert WeightStore(tmp_path / "store").identity == weights.source.identity
    file = tmp_path / "store" / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"was changed after store\.json was written"):
        _ = WeightStore(tmp_path / "store").identity
