"""Where compiled kernels are kept, which are code: in folders of this user's that nobody else can write to."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import platform
import time
from types import TracebackType
from typing import Any

import numba
from numba.core import codegen, config, event

from edgekv.errors import ConfigError
from edgekv.files import cache_root

VARIABLE = "NUMBA_CACHE_DIR"
MADE_FROM = "edgekv-made-from"  # the file in a folder of compiled kernels that says what they were made from
WARM = "edgekv-warm-"  # what files begin with that say for what all kernels are in the folder


if os.path.isfile(config._config_fname):  # in the working folder, where strangers' files may be
    config._config_fname = os.devnull
    config.reload_config()
CPU_FEATURES = config.CPU_FEATURES if config.CPU_FEATURES is not None else codegen.get_host_cpu_features()


@functools.cache
def sources() -> str:
    """Return a digest of all of ours that is compiled into kernels."""
    package = pathlib.Path(__file__).parents[1]
    folders = package / "kernels" / "cpu", package / "codecs", package / "papers"
    files = sorted(source for folder in folders for source in folder.rglob("*.py"))
    return digest([package / "kernels" / "interface.py", *files])


def digest(files: list[pathlib.Path]) -> str:
    """Return a digest of the files' contents, one behind the other."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


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


def is_warm(what: str) -> bool:
    """Whether `mark_warm` was told that all kernels for it are compiled: they are loaded when they are needed."""
    place = _place(what)
    return place is not None and place.exists()


def mark_warm(what: str) -> None:
    """Remembers that all kernels for it were compiled; where that fails, they are looked for one by one again."""
    place = _place(what)
    if place is not None:
        with contextlib.suppress(OSError):
            place.touch()


def _place(what: str) -> pathlib.Path | None:
    """A file beside the kernels; None: none are kept."""
    place = folder(str(pathlib.Path(__file__).parent / "cpu" / "compile.py"))
    if place is None:
        return None
    processor = numba.config.CPU_NAME, CPU_FEATURES
    made_by = numba.__version__, platform.python_version(), processor, sources(), what
    return place / f"{WARM}{hashlib.sha256(repr(made_by).encode()).hexdigest()[:16]}"


class CompileClock(event.Listener):  # type: ignore[misc]
    """Within the block: ``seconds`` of the time in which something was compiled, and ``n`` functions."""

    def __init__(self) -> None:
        self.seconds, self.n = 0.0, 0
        self._depth, self._began = 0, 0.0  # a function is compiled within its caller's compilation

    def on_start(self, event: Any) -> None:
        """Numba's: a compilation begins."""
        if not self._depth:
            self._began = time.perf_counter()
        self._depth += 1

    def on_end(self, event: Any) -> None:
        """Numba's: it ends."""
        self._depth -= 1
        self.n += 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._began

    def __enter__(self) -> CompileClock:
        event.register("numba:compile", self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        event.unregister("numba:compile", self)
