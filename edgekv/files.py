"""Files that users and models name: opened without surprises, written whole or not at all."""

import contextlib
import glob
import json
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from edgekv import partial
from edgekv.errors import CheckpointError

MAX_JSON_BYTES = 4 << 20  # of settings
MAX_FILE_BYTES = 256 << 20  # of what is read whole


def user_path(path: str | os.PathLike[str]) -> Path:
    """The path with ~ and ~name as home folders; as it stands where there is no such user."""
    return Path(os.path.expanduser(path))


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file to be read.

    Raises OSError, at once, for anything else: a folder, a device, a pipe that nobody writes to.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError:  # a zero byte in the name
        raise FileNotFoundError(0, "there is no such file", path) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "folder" if stat.S_ISDIR(mode) else "pipe" if stat.S_ISFIFO(mode) else "device or socket"
        raise OSError(0, f"it is a {kind}, not a regular file", path)
    return open(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], most: int = MAX_FILE_BYTES) -> bytes:
    """The content of a regular file of at most ``most`` bytes. Raises OSError for any other."""
    with open_regular(path) as file:
        data = file.read(most + 1)
        if len(data) > most:
            size = os.fstat(file.fileno()).st_size
            raise OSError(0, f"it has {max(size, len(data)):,} bytes, accepted are {most:,}", path)
    return data


def read_object(path: str | os.PathLike[str], most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, which says why there is none."""
    try:
        return parse_object(read_regular(path, most))
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None


def parse_object(data: str | bytes) -> dict[str, Any]:
    """The JSON object in a text. Raises ValueError, which says why there is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds a JSON {type(value).__name__}, an object is needed")
    return value


def read_text(path: str | os.PathLike[str]) -> str:
    """The UTF-8 text of a file. Raises ValueError, which says why there is none."""
    try:
        return read_regular(path).decode("utf-8")
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start})") from None


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raises CheckpointError where `atomic_write` could not write: to be asked before work whose result it is."""
    target = user_path(path)
    if _is_special(target):
        if not os.access(target, os.W_OK):
            raise _unwritable(target, 0, PermissionError(0, "Permission denied"))
        return
    PartialFile(target, 0).discard()


def atomic_write(path: str | os.PathLike[str], data: bytes, private: bool = False) -> None:
    """Write a small file so that `path` holds all of it or what it held before.

    A device or a pipe (/dev/stdout) is written to directly. private: see `PartialFile`. Raises CheckpointError
    when it cannot be written.
    """
    target = user_path(path)
    if _is_special(target):
        try:
            target.write_bytes(data)
        except OSError as error:
            raise _unwritable(target, len(data), error) from error
        return
    atomic_stream(target, len(data), [data], private)


def atomic_stream(
    path: str | os.PathLike[str], nbytes: int, pieces: Iterable[bytes | memoryview], private: bool = False
) -> None:
    """Write a file of ``nbytes`` bytes piece by piece, so that `path` holds all of it or what it held before.

    It is on the disk, not only in the page cache, when this returns. private: see `PartialFile`. Raises
    CheckpointError when it cannot be written.
    """
    file = PartialFile(user_path(path), nbytes, private)
    try:
        for piece in pieces:
            file.write(piece)
        file.commit()
    except BaseException:
        file.discard()
        raise


class PartialFile:
    """A file under a temporary name beside `path`, which `commit` makes durable and renames to it.

    A symbolic link stays, and the file that it points to is replaced; but not through a link that somebody else
    put into a folder that all may write to. A file that is there keeps its mode; a new one may be read by those
    that the umask allows, or, where it is private, by this user alone. What killed processes left of it goes.
    """

    def __init__(self, path: Path, nbytes: int, private: bool = False) -> None:
        self._nbytes = nbytes
        try:
            self._target = _followed(path)
            self._mode = self._target.stat().st_mode & 0o777 if os.path.lexists(self._target) else None
            partial.remove_abandoned(self._target.parent, glob.escape(self._target.name))
            free = shutil.disk_usage(self._target.parent).free
            if nbytes > free:
                raise CheckpointError(
                    f"{path}: needs {nbytes:,} bytes, {free:,} are free; free some space or write elsewhere"
                )
            mode = 0o666 if self._mode is None and not private else 0o600
            self._path, self._file = partial.new_file(self._target, mode)
        except (OSError, ValueError) as error:
            raise _unwritable(path, nbytes, error) from error

    def write(self, data: "bytes | memoryview") -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise _unwritable(self._target, self._nbytes, error) from error

    def commit(self) -> None:
        try:
            self._file.flush()
            if self._mode is not None:
                os.fchmod(self._file.fileno(), self._mode)
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


def _is_special(target: Path) -> bool:
    """Whether something is there that is written to directly, as it can't be replaced: a device or a pipe."""
    return os.path.exists(target) and not os.path.isfile(target) and not os.path.isdir(target)


def _followed(path: Path) -> Path:
    """The file that is to be replaced. Raises OSError for a folder, and where a link is not to be followed."""
    if os.path.islink(path):
        link, folder = path.lstat(), os.stat(path.parent)
        open_to_all = stat.S_ISVTX | stat.S_IWOTH
        if folder.st_mode & open_to_all == open_to_all and link.st_uid not in (os.geteuid(), folder.st_uid):
            raise PermissionError(0, "it is another user's symbolic link")
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(0, "it is a folder")
    return target


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where the filesystem can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unwritable(path: Path, nbytes: int, error: Exception) -> CheckpointError:
    reason = getattr(error, "strerror", None) or error
    if not nbytes:
        return CheckpointError(f"{path}: cannot be written ({reason}); give another place, or make it writable")
    try:
        free = f"{shutil.disk_usage(path.parent).free:,}"
    except OSError:
        free = "an unknown number"
    return CheckpointError(
        f"{path}: cannot be written ({reason}); it needs {nbytes:,} bytes, {free} are free: "
        "free some space or write elsewhere"
    )
