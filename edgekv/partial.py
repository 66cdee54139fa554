"""What is written under another name until it is whole: a file or a folder, which its writer keeps locked.

One that nobody locks was left by a killed process. Process numbers would not tell: they come again, and other
containers have their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import secrets
import shutil
from typing import BinaryIO, Literal

LOCK = ".lock"  # the file in a partial folder that its writer locks; a partial file is locked itself


def new_file(target: pathlib.Path, mode: int = 0o666) -> tuple[pathlib.Path, BinaryIO]:
    """A file beside ``target``, open to be written, and locked until it is closed. Raises OSError.

    mode: its permissions, of which the umask takes some.
    """
    while True:
        partial = _name(target)
        file = _lock(partial, "xb", or_unlocked=True, mode=mode)
        if file:
            return partial, file


def new_folder(target: pathlib.Path) -> tuple[pathlib.Path, BinaryIO]:
    """A folder beside ``target``, and its `LOCK`, locked until it is closed. Raises OSError."""
    while True:
        partial = _name(target)
        partial.mkdir()
        try:
            file = _lock(partial / LOCK, "ab", or_unlocked=True)
        except FileNotFoundError:  # another one took it for abandoned
            continue
        except BaseException:
            remove(partial)
            raise
        if file:
            return partial, file


def remove_abandoned(folder: pathlib.Path, names: str) -> None:
    """Removes what killed processes left in a folder. names: a pattern of what they were writing."""
    for partial in folder.glob(f"{names}.partial-*"):
        with contextlib.suppress(OSError):  # it is gone, or there are no locks here
            file = _lock(partial / LOCK, "ab") if partial.is_dir() else _lock(partial, "r+b")
            if file:
                with file:
                    remove(partial)


def remove(partial: pathlib.Path) -> None:
    """Removes a file or a folder, if it is still there."""
    with contextlib.suppress(OSError):
        partial.unlink()
    shutil.rmtree(partial, ignore_errors=True)


def _name(target: pathlib.Path) -> pathlib.Path:
    return target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")


def _lock(
    path: pathlib.Path, how: Literal["xb", "ab", "r+b"], or_unlocked: bool = False, mode: int = 0o666
) -> BinaryIO | None:
    """The open file, locked; None where another one locked or removed it between opening and locking.

    or_unlocked: also on a filesystem without locks, where it raises OSError else.
    """
    file: BinaryIO = open(path, how, opener=lambda p, flags: os.open(p, flags, mode))  # noqa: SIM115 - closed by the caller
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
