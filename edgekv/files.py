"""Files and folders: reads regular files, writes files and folders whole or not at all; and the cache folder.

A file has another name until it is whole, `NAME.partial-1a2b3c4d`, and its writer keeps it locked. One that nobody
locks was left by a killed process. Process numbers would not tell: they are used again, and other containers have
their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from edgekv.errors import CheckpointError, ConfigError

MAX_JSON_BYTES = 4 << 20  # of settings
MAX_FILE_BYTES = 256 << 20  # of what is read whole
MAX_MEMO_BYTES = 64 << 20
CACHE_HINT = "set XDG_CACHE_HOME to a folder that can be written"


def user_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a path with ~ and ~name expanded to home folders, where there is such a user."""
    return pathlib.Path(os.path.expanduser(path))


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
    """Reads a regular file of at most ``most`` bytes. Raises OSError for any other."""
    with open_regular(path) as file:
        data = file.read(most + 1)
        if len(data) > most:
            size = os.fstat(file.fileno()).st_size
            raise OSError(0, f"it has {max(size, len(data)):,} bytes, accepted are {most:,}", path)
    return data


def read_object(path: str | os.PathLike[str], most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Reads the JSON object in a file. Raises ValueError with the reason why there is none."""
    try:
        return parse_object(read_regular(path, most))
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None


def parse_object(data: str | bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises ValueError with the reason why there is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds a JSON {type(value).__name__}, an object is needed")
    return value


def read_text(path: str | os.PathLike[str]) -> str:
    """Reads the UTF-8 text of a file. Raises ValueError with the reason why there is none."""
    try:
        return read_regular(path).decode("utf-8")
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start})") from None


def require_writable(path: str | os.PathLike[str], nbytes: int = 0) -> None:
    """Raises CheckpointError where ``nbytes`` could not be written; for use before work that ends with it."""
    target = user_path(path)
    if not _is_special(target):
        PartialFile(target, nbytes).discard()
    elif not os.access(target, os.W_OK):
        raise _unwritable(target, 0, PermissionError(0, "Permission denied"))


def atomic_write(path: str | os.PathLike[str], data: bytes, private: bool = False) -> None:
    """Writes a file so that `path` holds all of it or what it held before; it is on the disk when this returns.

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
    file = PartialFile(target, len(data), private)
    try:
        file.write(data)
        file.commit()
    except BaseException:
        file.discard()
        raise


class PartialFile:
    """A file under a temporary name beside `path`, which `commit` makes durable and renames to it.

    A symbolic link stays, and the file that it points to is replaced; but not through a link that somebody else
    put into a folder that all may write to. A file that is there keeps its mode; a new one may be read by those
    that the umask allows, or, where it is private, by this user alone. Partial files of killed processes go.
    """

    def __init__(self, path: pathlib.Path, nbytes: int, private: bool = False) -> None:
        self._nbytes = nbytes
        try:
            self._target = _followed(path)
            self._mode = self._target.stat().st_mode & 0o777 if os.path.lexists(self._target) else None
            remove_abandoned(self._target.parent, glob.escape(self._target.name))
            free = shutil.disk_usage(self._target.parent).free
            if nbytes > free:
                raise CheckpointError(
                    f"{path}: needs {nbytes:,} bytes, {free:,} are free; free some space or write elsewhere"
                )
            mode = 0o666 if self._mode is None and not private else 0o600
            self._path, descriptor = _new_partial(self._target, mode)
            self._file = open(descriptor, "wb")  # noqa: SIM115 - closed by commit or discard
        except (OSError, ValueError) as error:
            raise _unwritable(path, nbytes, error) from error

    def write(self, data: bytes | memoryview) -> None:
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
        with contextlib.suppress(OSError):  # the rename is made durable where the filesystem can
            descriptor = os.open(self._target.parent, os.O_RDONLY)
            with _closing(descriptor):
                os.fsync(descriptor)

    def discard(self) -> None:
        """Removes the file if it was not committed."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def _is_special(target: pathlib.Path) -> bool:
    """Returns whether a path is a device or a pipe, which is written to directly."""
    return os.path.exists(target) and not os.path.isfile(target) and not os.path.isdir(target)


def _followed(path: pathlib.Path) -> pathlib.Path:
    """Returns the file to be replaced. Raises OSError for a folder, and for a link that must not be followed."""
    if os.path.islink(path):
        link, folder = path.lstat(), os.stat(path.parent)
        open_to_all = stat.S_ISVTX | stat.S_IWOTH
        if folder.st_mode & open_to_all == open_to_all and link.st_uid not in (os.geteuid(), folder.st_uid):
            raise PermissionError(0, "it is another user's symbolic link")
    target = pathlib.Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(0, "it is a folder")
    return target


def _unwritable(path: pathlib.Path, nbytes: int, error: Exception) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{path}: cannot be written: there is no folder {path.parent}: make it first")
    reason = getattr(error, "strerror", None) or error
    needs = f"; it needs {nbytes:,} bytes" if nbytes else ""
    return CheckpointError(f"{path}: cannot be written ({reason}){needs}: free some space or write elsewhere")


def _new_partial(target: pathlib.Path, mode: int | None) -> tuple[pathlib.Path, int]:
    """Creates a file of a mode, or a folder for None, beside ``target``; returns it with its locked descriptor."""
    while True:
        partial = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
        if mode is None:
            partial.mkdir()
        try:
            how = os.O_RDONLY if mode is None else os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = os.open(partial, how | os.O_CLOEXEC, mode or 0)
        except FileNotFoundError:
            if mode is None:  # another one took it for abandoned
                continue
            raise
        if _lock(partial, descriptor) is not False:
            return partial, descriptor
        os.close(descriptor)


def _lock(path: pathlib.Path, descriptor: int) -> bool | None:
    """Locks a file; returns whether it could be and still exists, or None where the filesystem has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:
        return None


def remove_abandoned(folder: pathlib.Path, names: str) -> None:
    """Removes the partial files and folders of killed processes. names: a pattern of the final names."""
    for partial in folder.glob(f"{names}.partial-*"):
        with contextlib.suppress(OSError):  # it is gone
            descriptor = os.open(partial, (os.O_RDONLY if partial.is_dir() else os.O_RDWR) | os.O_CLOEXEC)
            with _closing(descriptor):
                if _lock(partial, descriptor):
                    _remove(partial)


def _remove(partial: pathlib.Path) -> None:
    """Removes a file or a folder, if it is still there."""
    with contextlib.suppress(OSError):
        partial.unlink()
    shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def create_folder_once(folder: pathlib.Path, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Returns a folder, which ``make`` fills under another name if it does not exist yet.

    Partial folders of killed processes are removed. Raises CheckpointError where it can't be written.
    """
    if folder.is_dir():
        return folder
    try:
        with atomic_folder(folder, pathlib.Path.is_dir, leftovers="*") as new:
            make(new)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: can't be written ({error.strerror or error}); make room, or set XDG_CACHE_HOME"
        ) from error
    return folder


@contextlib.contextmanager
def atomic_folder(
    folder: pathlib.Path, is_whole: Callable[[pathlib.Path], bool], leftovers: str | None = None
) -> Iterator[pathlib.Path]:
    """Creates an empty folder beside ``folder`` for a with statement to fill, and renames it to ``folder``.

    Threads, processes and containers may write the same folder at once, each its own: the first one that is whole
    stays. leftovers: a pattern of the names whose partial folders, left by killed processes, are removed first;
    None: this folder's. Raises OSError where it can't be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder.parent, leftovers or glob.escape(folder.name))
    new, descriptor = _new_partial(folder, None)
    with _closing(descriptor):
        try:
            yield new
            try:
                new.rename(folder)
            except OSError:
                if not is_whole(folder):  # otherwise another one was first
                    raise
        finally:
            _remove(new)


def cache_root() -> pathlib.Path:
    """Returns edgekv's folder in $XDG_CACHE_HOME or ~/.cache. Raises ConfigError where there is no home folder."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if folder.startswith("~"):
        raise ConfigError(f"this user has no home folder to keep files in: {CACHE_HINT}")
    return pathlib.Path(folder) / "edgekv"


class Memo:
    """A remembered file: JSON content with a checksum, written whole, for this user's eyes alone.

    name: its path, in the cache folder where it is relative. format: of the content; another is as good as none.
    """

    def __init__(self, name: str | os.PathLike[str], format: int) -> None:
        self._name, self._format = name, format

    def read(self) -> Any:
        """Returns the content that was written last; None where there is none, or the file is damaged."""
        try:
            file = read_object(cache_root() / self._name, MAX_MEMO_BYTES)
        except (ValueError, ConfigError):
            return None
        content = file.get("content")
        is_whole = file.get("format") == self._format and file.get("sha256") == _checksum(content)
        return content if is_whole else None

    def write(self, content: Any) -> None:
        """Replaces the file. Raises CheckpointError or ConfigError where it can't be written."""
        path, content = cache_root() / self._name, json.loads(json.dumps(content))  # as it will be read
        facts = {"format": self._format, "sha256": _checksum(content), "content": content}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{path.parent}: can't be written ({error.strerror}); {CACHE_HINT}") from None
        atomic_write(path, (json.dumps(facts, indent=1) + "\n").encode(), private=True)

    def keep(self, content: Any) -> None:
        """Writes the content if that is possible; errors are ignored, as it can be computed again."""
        with contextlib.suppress(CheckpointError, ConfigError):
            self.write(content)


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
