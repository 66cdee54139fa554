"""Typed shorthands for the ways kernels are compiled, and what the processor offers."""

import hashlib
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import codegen, config
from numba.extending import intrinsic as _intrinsic

from edgekv import numba_cache

F = TypeVar("F", bound=Callable[..., Any])
Scalar = Any  # a number inside a kernel
Args = tuple[Any, ...]

CPU_FEATURES = config.CPU_FEATURES if config.CPU_FEATURES is not None else codegen.get_host_cpu_features()

# Sums may be reordered and fused, which vectorising needs; infinities and NaNs keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}


def _digest() -> str:
    """Of all that is compiled into kernels."""
    package, digest = pathlib.Path(__file__).parent, hashlib.sha256()
    for source in sorted([*package.rglob("*.py"), *(package.parent / "contract").rglob("*.py")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()


SOURCES = _digest() if numba_cache.kept else ""


def _compiled(function: F, **options: Any) -> F:
    dispatcher = numba.njit(cache=numba_cache.kept, nogil=True, **options)(function)
    if numba_cache.kept:
        numba_cache.forget_old(dispatcher.stats.cache_path, SOURCES)
    return cast(F, dispatcher)


def jit(function: F) -> F:
    """Exact arithmetic, as written: said in so many words, or a function takes on that of its first caller."""
    return _compiled(function, error_model="numpy", fastmath=False)


def fast_jit(function: F) -> F:
    """Sums in any order."""
    return _compiled(function, error_model="numpy", fastmath=FAST)


def inline_jit(function: F) -> F:
    """`fast_jit`, always inlined: for what runs so often that passing arrays would show."""
    return _compiled(function, error_model="numpy", fastmath=FAST, forceinline=True)


def parallel_jit(function: F) -> F:
    """`numba.prange` loops run on all threads. Allocate nothing inside them: it is ten times slower."""
    return _compiled(function, parallel=True)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """`numba.extending.intrinsic`: the decorated function is called without its first argument."""
    return cast(Callable[..., Any], _intrinsic(function))
