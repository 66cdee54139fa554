"""The machine: versions, free memory, thread pools, and sizes in bytes as people write them."""

import contextlib
import functools
import os
import pathlib
import platform
import re
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from importlib import metadata
from typing import Any

import psutil
from threadpoolctl import ThreadpoolController

from edgekv.errors import ConfigError, ContextError, MemoryBudgetError, SessionError

Root = str | os.PathLike[str]
HINT = "lower {ctx}, or choose a smaller {kv} scheme or {weights:q4}"

_LIBRARIES = ("edgekv", "numpy", "numba", "llvmlite")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@functools.cache
def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


__version__ = _version("edgekv") or "unknown"


def machine_info(root: Root = "/") -> dict[str, Any]:
    """Returns CPU, board, memory, system and library versions, for JSON; None for what is not known.

    cores: those this process may use. root: the folder that holds `proc` and `sys`.
    """
    # The board as Arm kernels name it: a Raspberry Pi in both places, a Jetson in the second.
    lines = _read(pathlib.Path(root, "proc/cpuinfo"))
    cpuinfo = dict(re.findall(r"^([^\t\n:]+)[ \t]*:[ \t]*(\S.*)$", lines, re.MULTILINE))
    board = cpuinfo.get("Model") or _read(pathlib.Path(root, "proc/device-tree/model")).strip("\0\n ")
    return {
        "cpu": cpuinfo.get("model name"),
        "board": board or None,
        "architecture": platform.machine(),
        "cores": all_cores(),
        "ram_bytes": int(psutil.virtual_memory().total),
        "os": platform.platform(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _LIBRARIES},
    }


def all_cores(threads: int | None = None) -> int:
    """Returns ``threads``, or the number of cores that this process may use."""
    return threads or len(os.sched_getaffinity(0))


def available_memory_bytes(root: Root = "/") -> int:
    """Returns the bytes that this process can still take without swapping or being killed.

    That is the least of the machine's free memory and what is left in each memory cgroup (v1 or v2) from ours up.
    root: the folder that holds `proc` and `sys`.
    """
    machine = int(psutil.virtual_memory().available)
    return max(0, min((machine, *_cgroup_rooms(pathlib.Path(root)))))


_blas_lock = threading.RLock()
_blas_before = list[int]()  # threads of each library while no `blas_threads` is open
_blas_limits = dict[object, tuple[int, int]]()  # of each open `blas_threads`, by age: Python thread, BLAS threads


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


@contextlib.contextmanager
def blas_threads(n: int) -> Iterator[None]:
    """Lets NumPy's matrix products use ``n`` threads, within a with statement.

    So one pool works at a time: BLAS has all cores in a prompt, and one in decoding. The number is the process's:
    of several threads' statements the fewest count, so that what asks for one has the same bits beside others.
    """
    me = object()
    try:
        _limit_blas(me, n)
        yield
    finally:
        _limit_blas(me, None)


def _limit_blas(who: object, n: int | None) -> None:
    pools = _blas().lib_controllers
    with _blas_lock:
        if not _blas_limits:
            _blas_before[:] = [pool.num_threads for pool in pools]
        _blas_limits.pop(who, None)
        if n is not None:
            _blas_limits[who] = threading.get_ident(), n
        fewest = min(dict(_blas_limits.values()).values(), default=0)  # of each thread's latest
        for pool, before in zip(pools, _blas_before, strict=True):
            pool.set_num_threads(fewest or before)
        with _blas().limit():  # changes nothing: after it threadpoolctl 3.8 lets other threads set limits, too
            pass


def peak_rss_bytes() -> int:
    """Returns the largest resident memory, in bytes, that this process has had."""
    # ru_maxrss comes second: Linux lets a child inherit it from a larger parent.
    peak = re.search(r"^VmHWM:\s*(\d+) kB$", _read(pathlib.Path("/proc/self/status")), re.MULTILINE)
    kib = int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib * 1024


def reset_peak_rss() -> None:
    """Makes `peak_rss_bytes` count from now on, where the kernel can do that."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def require_memory(parts: Mapping[str, int], available: int) -> None:
    """Raises MemoryBudgetError unless the sum of ``parts`` (name -> bytes) fits into ``available`` bytes."""
    needed = sum(parts.values())
    if needed > available:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        problem = f"needs {format_bytes(needed)} ({listed}) but {format_bytes(available)} is available"
        raise MemoryBudgetError(problem, advice=HINT)


@contextlib.contextmanager
def memory_errors(what: str, free_bytes: Callable[[], int]) -> Iterator[None]:
    """Turns a MemoryError of NumPy or CuPy into a MemoryBudgetError, with what was needed and what is free.

    Turns an error of CUDA, after which a process can't use the GPU any more, into a SessionError. what: the work
    within the with statement, for the message ("reading 3 tokens after 100").
    """
    try:
        yield
    except MemoryError as error:
        what_failed = (str(error).splitlines() or ["an allocation failed"])[0].rstrip(".")
        problem = f"out of memory while {what}: {what_failed}; {format_bytes(free_bytes())} is free"
        raise MemoryBudgetError(problem, advice=HINT) from error
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if "cudaError" not in reason and "CUDA_ERROR" not in reason:
            raise
        advice = "start the program again; if it comes back, use {device:cpu}"
        raise SessionError(f"{reason}, while {what}", field="device", value="cuda", advice=advice) from error


def format_bytes(n: int) -> str:
    """Formats bytes in the largest binary unit that fits, with one decimal: 1536 -> '1.5 KiB'."""
    if n < 1024:
        return f"{int(n)} B"
    size, unit = float(n), 0
    while round(size, 1) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}"


def size_to_write(n: int) -> str:
    """Returns a size of at least ``n`` bytes, as `parse_bytes` takes it: 3702816 -> '3.6M'."""
    return f"{-(-n * 10 >> 20) / 10:g}M"


def parse_bytes(text: str, field: str = "size") -> int:
    """Parses '4096', '300M', '1.5G', '1.5GB' or '1.5 GiB' to bytes; every unit is a power of 1024.

    Raises ConfigError, of the parameter ``field``, for anything else.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])I?)?B?\s*", text.upper())
    if match is None:
        raise ConfigError(field=field, value=text, accepted=["bytes", "a number with K, M, G or T, as 1.5G"])
    return int(Fraction(match[1]) * 1024 ** " KMGT".index(match[2] or " "))


def parse_tokens(text: str, field: str = "ctx") -> int:
    """Parses '8192' or '8k', where k is 1024. Raises ContextError, of ``field``, for anything else."""
    if match := re.fullmatch(r"\s*([0-9]{1,18})(k?)\s*", text, re.IGNORECASE):
        return int(match[1]) << 10 * len(match[2])
    raise ContextError(field=field, value=text, accepted=["a whole number of 1 or more, such as 8192 or 8k"])


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _cgroup_rooms(root: pathlib.Path) -> Iterator[int]:
    """Yields the bytes left in each memory cgroup that limits this process, from its own up to the root."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers == "":
            limit, usage, reclaimable = "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount /= "memory"
            limit, usage, reclaimable = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            limit_bytes, used_bytes = _read(folder / limit).strip(), _read(folder / usage).strip()
            if not (limit_bytes.isdigit() and used_bytes.isdigit()):  # "max", or no such file
                continue
            # Page cache that the kernel drops first counts as used there but is ours to take.
            cached = re.search(rf"^{reclaimable} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
            yield int(limit_bytes) - int(used_bytes) + (int(cached[1]) if cached else 0)
