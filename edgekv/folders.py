"""Folders that appear whole, or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from typing import BinaryIO

from edgekv.errors import CheckpointError

LOCK = ".lock"  # in a folder that is being written; its writer holds it


def made_once(folder: pathlib.Path, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """The folder, filled by ``make`` under another name and renamed if it is not there yet.

    What killed processes left beside it goes. Raises CheckpointError where it can't be written.
    """
    if folder.is_dir():
        return folder
    try:
        with written_whole(folder, pathlib.Path.is_dir, leftovers="*") as partial:
            make(partial)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: can't be written ({error.strerror or error}); make room, or set XDG_CACHE_HOME"
        ) from error
    return folder


@contextlib.contextmanager
def written_whole(
    folder: pathlib.Path, is_whole: Callable[[pathlib.Path], bool], leftovers: str | None = None
) -> Iterator[pathlib.Path]:
    """Gives an empty folder beside ``folder`` to write to, which is renamed to it at the end.

    Threads, processes and containers may write the same folder at once, each its own: the first one that is whole
    stays. leftovers: a pattern of the names whose partial folders, left by killed processes, are removed first;
    None: this folder's. Raises OSError where it can't be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f"{leftovers or glob.escape(folder.name)}.partial-*"):
        _remove_abandoned(left)
    with _locked(folder) as partial:
        yield partial
        try:
            partial.rename(folder)
        except OSError:
            if not is_whole(folder):  # otherwise another one was first
                raise
        else:
            (folder / LOCK).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new folder whose lock is held; what is left under its name at the end is removed."""
    while True:
        partial = folder.with_name(f"{folder.name}.partial-{secrets.token_hex(4)}")
        partial.mkdir()
        try:
            file = _lock(partial, or_unlocked=True)
            if file:
                with file:
                    yield partial
                return
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _remove_abandoned(partial: pathlib.Path) -> None:
    """Process numbers would not tell: they come again, and other containers have their own."""
    with contextlib.suppress(OSError):
        file = _lock(partial)
        if file:
            with file:
                shutil.rmtree(partial, ignore_errors=True)


def _lock(partial: pathlib.Path, or_unlocked: bool = False) -> BinaryIO | None:
    """The open lock of a partial folder, held; None where another one holds it, or removed the folder before.

    or_unlocked: also on a filesystem without locks, where it raises OSError else.
    """
    path = partial / LOCK
    try:
        file = open(path, "ab")  # noqa: SIM115 - closed by the caller
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        if or_unlocked:
            return file
        file.close()
        raise
    file.close()
    return None
