"""Files that appear whole or not at all: small ones at once, large ones piece by piece."""

import contextlib
import glob
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from edgekv import partial
from edgekv.errors import CheckpointError


def atomic_write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a small file so that `path` holds all of it or what it held before.

    A device or a pipe (/dev/stdout) is written to directly. Raises CheckpointError when it cannot be written.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        try:
            target.write_bytes(data)
        except OSError as error:
            raise _unwritable(target, len(data), error) from error
        return
    file = PartialFile(target, len(data))
    try:
        file.write(data)
        file.commit()
    except BaseException:
        file.discard()
        raise


def atomic_stream(path: str | os.PathLike[str], nbytes: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file of ``nbytes`` bytes piece by piece, so that `path` holds all of it or what it held before.

    It is on the disk, not only in the page cache, when this returns. Raises CheckpointError when it cannot be
    written.
    """
    file = PartialFile(Path(path), nbytes)
    try:
        for piece in pieces:
            file.write(piece)
        file.commit()
    except BaseException:
        file.discard()
        raise


class PartialFile:
    """A file under a temporary name beside `path`, which `commit` makes durable and renames to it.

    What killed processes left of it is removed.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._target = Path(os.path.realpath(path))
        self._nbytes = nbytes
        try:
            partial.remove_abandoned(self._target.parent, glob.escape(self._target.name))
            free = shutil.disk_usage(self._target.parent).free
            if nbytes > free:
                raise CheckpointError(
                    f"{path}: needs {nbytes:,} bytes, {free:,} are free; free some space or write elsewhere"
                )
            self._path, self._file = partial.new_file(self._target)
        except OSError as error:
            raise _unwritable(self._target, nbytes, error) from error

    def write(self, data: "bytes | memoryview") -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise _unwritable(self._target, self._nbytes, error) from error

    def commit(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._path, self._target)  # before it is closed: unlocked, another one would remove it
            self._file.close()
        except OSError as error:
            raise _unwritable(self._target, self._nbytes, error) from error
        _sync_folder(self._target.parent)

    def discard(self) -> None:
        """Remove what was not committed."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where the filesystem can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unwritable(path: Path, nbytes: int, error: OSError) -> CheckpointError:
    try:
        free = f"{shutil.disk_usage(path.parent).free:,}"
    except OSError:
        free = "an unknown number"
    return CheckpointError(
        f"{path}: cannot be written ({error.strerror or error}); it needs {nbytes:,} bytes, {free} are free: "
        "free some space or write elsewhere"
    )
