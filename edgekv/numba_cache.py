"""Where Numba keeps compiled kernels when it would find no place, and when those it has kept are of no use."""

from __future__ import annotations

import functools
import os
import pathlib
import tempfile
from collections.abc import MutableMapping

VARIABLE = "NUMBA_CACHE_DIR"
MADE_FROM = "edgekv-made-from"  # the file in a folder of compiled kernels that says what they were made from
WARM = "edgekv-warm-"  # what files begin with that say for what all kernels are in the folder

kept = True  # whether compiled kernels are kept on disk; else each process compiles its own, 17 s of work


def prepare(package: pathlib.Path, environment: MutableMapping[str, str]) -> bool:
    """Points Numba to a folder of this user's under the temporary one, if it would find none and fail.

    False: there is none either, and kernels can't be kept. To be called before Numba is imported.
    """
    home = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    given = environment.get(VARIABLE)
    if _writable(package) or _writable(pathlib.Path(home) / "numba"):
        return True
    if given and _writable(pathlib.Path(given)):
        return True
    folder = _private_folder()
    if folder is not None:
        environment[VARIABLE] = str(folder)
    return folder is not None


@functools.cache
def forget_old(folder: str, sources: str) -> None:
    """Removes the compiled kernels in a folder, unless they were made from the same ``sources`` (a digest).

    Numba alone notices changes of a kernel's own file, not of what that calls, and fails where a kernel took a
    function of a module that is gone. Once per process and folder.
    """
    made_from = pathlib.Path(folder) / MADE_FROM
    try:
        if made_from.exists() and made_from.read_bytes() == sources.encode():
            return
        for pattern in ("*.nb[ci]", f"{WARM}*"):
            for file in made_from.parent.glob(pattern):
                file.unlink(missing_ok=True)
        made_from.write_text(sources)
    except OSError:
        return  # then they stay as they are, for whom they belong to


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
