"""Where Numba keeps compiled kernels when neither the installation nor the home can be written."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import MutableMapping

VARIABLE = "NUMBA_CACHE_DIR"


def prepare(package: pathlib.Path, environment: MutableMapping[str, str]) -> None:
    """Points Numba to a folder of this user's under the temporary one, if it would find none and fail.

    To be called before Numba is imported.
    """
    if VARIABLE in environment or _writable(package):
        return
    home = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if _writable(pathlib.Path(home) / "numba"):
        return
    folder = _private_folder()
    if folder is not None:
        environment[VARIABLE] = str(folder)


def _writable(folder: pathlib.Path) -> bool:
    """Whether files can be made in it, or it could be made first."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def _private_folder() -> pathlib.Path | None:
    """Numba's cache is code: a folder that somebody else made, or could write to, is not used."""
    try:
        folder = pathlib.Path(tempfile.gettempdir()) / f"edgekv-numba-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    is_ours = status.st_uid == os.getuid() and status.st_mode & 0o170077 == 0o040000
    return folder if is_ours else None
