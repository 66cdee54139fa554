"""Folders under $XDG_CACHE_HOME/edgekv that appear whole, or not at all."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable

import psutil

from edgekv.errors import CheckpointError


def cache_root() -> pathlib.Path:
    """Where what can be made again is kept: $XDG_CACHE_HOME, or ~/.cache."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "edgekv"


def remove_abandoned(parent: pathlib.Path, name: str = "*") -> None:
    """Removes what killed processes left in ``parent``, as NAME.partial-PID; name: a pattern."""
    for partial in parent.glob(f"{name}.partial-*"):
        pid = partial.name.rpartition("-")[2]
        if not (pid.isdecimal() and psutil.pid_exists(int(pid))):
            shutil.rmtree(partial, ignore_errors=True)


def made_once(folder: pathlib.Path, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """The folder, filled by ``make`` under another name and renamed if it is not there yet."""
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    remove_abandoned(folder.parent)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        make(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first
                raise
    except OSError as error:
        raise CheckpointError(
            f"{folder}: can't be written ({error.strerror or error}); make room, or set XDG_CACHE_HOME"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
