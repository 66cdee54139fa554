"""Where compiled kernels are kept, which are code: in folders of this user's that nobody else can write to."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib

from edgekv.errors import ConfigError
from edgekv.files import cache_root

VARIABLE = "NUMBA_CACHE_DIR"
MADE_FROM = "edgekv-made-from"  # the file in a folder of compiled kernels that says what they were made from
WARM = "edgekv-warm-"  # what files begin with that say for what all kernels are in the folder


@functools.cache
def _root() -> pathlib.Path | None:
    """Where all are: in $NUMBA_CACHE_DIR, among this user's caches, or else under the temporary folder.

    None: nowhere, and each process compiles its own, 17 s of work.
    """
    places = [pathlib.Path(os.environ.get("TMPDIR") or "/tmp") / f"edgekv-numba-{os.getuid()}"]
    with contextlib.suppress(ConfigError):
        places.insert(0, cache_root() / "kernels")
    if given := os.environ.get(VARIABLE):
        places.insert(0, pathlib.Path(given))
    return next((place for place in places if _is_private(place)), None)


@functools.cache
def folder(source: str) -> pathlib.Path | None:
    """Where those of a source file are, with those of the files beside it; None: nowhere."""
    place, sources = _root(), pathlib.Path(source).absolute().parent
    if place is None or not os.path.isfile(source):
        return None
    place /= f"{sources.name}_{hashlib.sha256(os.fsencode(sources)).hexdigest()[:32]}"
    return place if _is_private(place) else None


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


def _is_private(folder: pathlib.Path) -> bool:
    """Whether it is this user's, who alone can write there; made if it is not there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, status = folder.lstat(), folder.stat()
    except OSError:
        return False
    ours = link.st_uid == status.st_uid == os.getuid() and not status.st_mode & 0o022
    return ours and os.access(folder, os.W_OK | os.X_OK)
