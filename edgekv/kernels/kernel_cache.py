"""The machine code of compiled kernels on disk, in a folder of this user's that nobody else can write to."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite
import numba
from numba.core import codegen, config

from edgekv.errors import ConfigError
from edgekv.files import cache_root

VARIABLE = "NUMBA_CACHE_DIR"
PACKAGE = pathlib.Path(__file__).parents[1]
SOURCES_FILE = "edgekv-made-from"  # holds the digest of the sources that the folder's kernels were compiled from
WARM = "edgekv-warm-"  # how the names of `mark_warm`'s files begin


if os.path.isfile(config._config_fname):  # in the working folder, where strangers' files may be
    config._config_fname = os.devnull
    config.reload_config()
CPU_FEATURES = config.CPU_FEATURES if config.CPU_FEATURES is not None else codegen.get_host_cpu_features()


@functools.cache
def sources() -> str:
    """Returns a digest of all files of this package that make kernels, or tables and constants in them."""
    folders = (PACKAGE / name for name in ("kernels", "codecs", "papers", "weights"))
    return _digest(sorted(source for folder in folders for source in folder.rglob("*.py")))


@functools.cache
def _other_sources(source: str) -> str:
    """Returns a digest of a kernel's file outside this package, and of all files of its package, if it has one."""
    file = pathlib.Path(source).absolute()
    if PACKAGE in file.parents:
        return ""
    is_package = (file.parent / "__init__.py").exists()
    return _digest(sorted(file.parent.rglob("*.py")) if is_package else [file])


def _digest(files: list[pathlib.Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def _root() -> pathlib.Path | None:
    """Returns $NUMBA_CACHE_DIR, a folder among this user's caches, or one under the temporary folder.

    None where all of them can be written to by others: each process then compiles its own kernels.
    """
    folders = [pathlib.Path(os.environ.get("TMPDIR") or "/tmp") / f"edgekv-numba-{os.getuid()}"]
    with contextlib.suppress(ConfigError):
        folders.insert(0, cache_root() / "kernels")
    if chosen := os.environ.get(VARIABLE):
        folders.insert(0, pathlib.Path(chosen))
    return next((folder for folder in folders if _is_private(folder)), None)


@functools.cache
def folder() -> pathlib.Path | None:
    """Returns the folder of the kernels of this installation; None where there can be none."""
    root = _root()
    if root is None:
        return None
    path = root / f"edgekv_{hashlib.sha256(os.fsencode(PACKAGE)).hexdigest()[:32]}"
    return path if _is_private(path) else None


def _is_private(folder: pathlib.Path) -> bool:
    """Makes the folder where it is not there; returns whether it is this user's, who alone can write there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, status = folder.lstat(), folder.stat()
    except OSError:
        return False
    ours = link.st_uid == status.st_uid == os.getuid() and not status.st_mode & 0o022
    return ours and os.access(folder, os.W_OK | os.X_OK)


def _path(name: str, *properties: str) -> pathlib.Path | None:
    """Returns the file for a name, the sources, the processor, the compiler's version and other properties."""
    parent = folder()
    if parent is None:
        return None
    compiler = numba.__version__, llvmlite.__version__, platform.python_version()
    key = name, properties, compiler, config.CPU_NAME or codegen.ll.get_host_cpu_name(), CPU_FEATURES, sources()
    return parent / f"{name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}"


def kernel_file(function: Callable[..., Any], options: str) -> pathlib.Path | None:
    """Returns the file of a function compiled with ``options``; None where there can be none.

    What a function takes from those around it is a part of the name, so it must be the same in every process.
    """
    variables = repr([cell.cell_contents for cell in function.__closure__ or ()])
    source = function.__code__.co_filename
    if " at 0x" in variables or not os.path.isfile(source):  # an object without a name, or no source
        return None
    name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__.replace('<locals>.', '')}"
    line = str(function.__code__.co_firstlineno)
    return _path(name, function.__module__, line, variables, options, _other_sources(source))


def load(file: pathlib.Path) -> tuple[str, bytes] | None:
    """Returns the symbol and machine code that `save` wrote; None if the file is not there or damaged."""
    try:
        digest, symbol, code = file.read_bytes().split(b"\n", 2)
    except (OSError, ValueError):
        return None
    return (symbol.decode(), code) if hashlib.sha256(code).hexdigest().encode() == digest else None


def save(file: pathlib.Path, symbol: str, code: bytes) -> None:
    """Writes a kernel's machine code, if there is room, and removes kernels of other versions of the sources."""
    remove_outdated(str(file.parent), sources())
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_bytes(b"\n".join((hashlib.sha256(code).hexdigest().encode(), symbol.encode(), code)))
        temporary.replace(file)
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)  # where the disk is full


@functools.cache
def remove_outdated(folder: str, sources: str) -> None:
    """Empties a folder of kernels that was not filled from the same ``sources`` (a digest)."""
    made_from = pathlib.Path(folder) / SOURCES_FILE
    with contextlib.suppress(OSError):
        if made_from.exists() and made_from.read_bytes() == sources.encode():
            return
        for file in made_from.parent.iterdir():
            file.unlink(missing_ok=True)
        made_from.write_text(sources)


def is_warm(what: str) -> bool:
    """Returns whether `mark_warm` was told that all kernels for it are compiled: they are loaded when used."""
    file = _warm_file(what)
    return file is not None and file.exists()


def mark_warm(what: str) -> None:
    """Remembers that all kernels for it were compiled; where that fails, they are looked for one by one again."""
    file = _warm_file(what)
    if file is not None:
        with contextlib.suppress(OSError):
            file.touch()


def _warm_file(what: str) -> pathlib.Path | None:
    return _path(f"{WARM}{hashlib.sha256(what.encode()).hexdigest()[:16]}")


_compile_seconds = 0.0


def compile_seconds() -> float:
    """Returns the seconds that this process has spent on compiling kernels."""
    return _compile_seconds


@contextlib.contextmanager
def timed_compilation() -> Iterator[None]:
    """Adds the time within the block to `compile_seconds`."""
    global _compile_seconds
    start = time.perf_counter()
    yield
    _compile_seconds += time.perf_counter() - start
