"""Numbers and words from the small files of /sys."""

from __future__ import annotations

import os
import pathlib

from edgekv.power.base import Root


class NumberFile:
    """A file that holds one whole number, different at each call.

    It stays open, which makes a reading twice as cheap, and is opened again after an error. Calls raise OSError,
    or ValueError where the content is no number.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._fd = -1

    def __call__(self) -> int:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.pread(self._fd, 64, 0))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def read_word(path: pathlib.Path) -> str | None:
    """The text of a file without blanks around it; None where it can't be read."""
    try:
        return path.read_text(errors="replace").strip("\0\n ")
    except OSError:
        return None


def folders(root: Root, pattern: str) -> list[pathlib.Path]:
    """The folders below ``root`` that match, in a stable order."""
    return sorted(pathlib.Path(root).glob(pattern))
