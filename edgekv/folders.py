"""Folders that appear whole, or not at all."""

from __future__ import annotations

import contextlib
import glob
import pathlib
from collections.abc import Callable, Iterator

from edgekv import partial
from edgekv.errors import CheckpointError


def made_once(folder: pathlib.Path, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """The folder, filled by ``make`` under another name and renamed if it is not there yet.

    What killed processes left beside it goes. Raises CheckpointError where it can't be written.
    """
    if folder.is_dir():
        return folder
    try:
        with written_whole(folder, pathlib.Path.is_dir, leftovers="*") as new:
            make(new)
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
    partial.remove_abandoned(folder.parent, leftovers or glob.escape(folder.name))
    new, lock = partial.new_folder(folder)
    with lock:
        try:
            yield new
            try:
                new.rename(folder)
            except OSError:
                if not is_whole(folder):  # otherwise another one was first
                    raise
            else:
                (folder / partial.LOCK).unlink(missing_ok=True)
        finally:
            partial.remove(new)
