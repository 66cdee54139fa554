"""Where what can be made again is kept: the cache folder, and the files in it that are remembered by `Memo`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
from typing import Any

from edgekv.errors import CheckpointError, ConfigError
from edgekv.files import atomic_write, read_object

MAX_MEMO_BYTES = 64 << 20
HINT = "set XDG_CACHE_HOME to a folder that can be written"


def cache_root() -> pathlib.Path:
    """edgekv's folder in $XDG_CACHE_HOME, or in ~/.cache. Raises ConfigError where there is no home folder."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if folder.startswith("~"):
        raise ConfigError(f"this user has no home folder to keep files in: {HINT}")
    return pathlib.Path(folder) / "edgekv"


class Memo:
    """A remembered file: JSON content with a checksum, written whole, for this user's eyes alone.

    name: its path, in the cache folder where it is relative. format: of the content; another is as good as none.
    """

    def __init__(self, name: str | os.PathLike[str], format: int) -> None:
        self._name, self._format = name, format

    def read(self) -> Any:
        """What `write` was given last; None where nothing is there, or anything but what was written."""
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
            raise CheckpointError(f"{path.parent}: can't be written ({error.strerror}); {HINT}") from None
        atomic_write(path, (json.dumps(facts, indent=1) + "\n").encode(), private=True)

    def keep(self, content: Any) -> None:
        """As `write`; where that fails, the next run finds what it finds now."""
        with contextlib.suppress(CheckpointError, ConfigError):
            self.write(content)


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
