"""Files that appear whole or not at all: small ones at once, large ones piece by piece."""

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

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
    partial = PartialFile(target, len(data))
    try:
        partial.write(data)
        partial.commit()
    except BaseException:
        partial.discard()
        raise


def atomic_stream(path: str | os.PathLike[str], nbytes: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file of ``nbytes`` bytes piece by piece, so that `path` holds all of it or what it held before.

    It is on the disk, not only in the page cache, when this returns. Raises CheckpointError when it cannot be
    written.
    """
    partial = PartialFile(Path(path), nbytes)
    try:
        for piece in pieces:
            partial.write(piece)
        partial.commit()
    except BaseException:
        partial.discard()
        raise


class PartialFile:
    """A file under a temporary name beside `path`, which `commit` makes durable and renames to it.

    It stays locked while it is written: an unlocked one was left by a killed process and can be removed.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._target = Path(os.path.realpath(path))
        self._nbytes = nbytes
        self._path = self._target.with_name(f"{self._target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            _remove_abandoned(self._target)
            free = shutil.disk_usage(self._target.parent).free
            if nbytes > free:
                raise CheckpointError(
                    f"{path}: needs {nbytes:,} bytes, {free:,} are free; free some space or write elsewhere"
                )
            self._file = open(self._path, "xb")  # noqa: SIM115 - closed by commit or discard
            with contextlib.suppress(OSError):  # a filesystem without locks
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
            self._file.close()
            os.replace(self._path, self._target)
        except OSError as error:
            raise _unwritable(self._target, self._nbytes, error) from error
        _sync_folder(self._target.parent)

    def discard(self) -> None:
        """Remove what was not committed."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def _remove_abandoned(target: Path) -> None:
    for path in target.parent.glob(f"{glob.escape(target.name)}.partial-*"):
        with contextlib.suppress(OSError), open(path, "rb") as file:  # OSError: its writer holds the lock
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


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
