"""Typed shorthands for the ways kernels are compiled, and what the processor offers."""

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


def jit(function: F) -> F:
    """Exact arithmetic, as written: said in so many words, or a function takes on that of its first caller."""
    return cast(F, numba.njit(cache=numba_cache.kept, nogil=True, error_model="numpy", fastmath=False)(function))


def fast_jit(function: F) -> F:
    """Sums in any order."""
    return cast(F, numba.njit(cache=numba_cache.kept, nogil=True, error_model="numpy", fastmath=FAST)(function))


def inline_jit(function: F) -> F:
    """`fast_jit`, always inlined: for what runs so often that passing arrays would show."""
    options = {
        "cache": numba_cache.kept,
        "nogil": True,
        "error_model": "numpy",
        "fastmath": FAST,
        "forceinline": True,
    }
    return cast(F, numba.njit(**options)(function))


def parallel_jit(function: F) -> F:
    """`numba.prange` loops run on all threads. Allocate nothing inside them: it is ten times slower."""
    return cast(F, numba.njit(cache=numba_cache.kept, nogil=True, parallel=True)(function))


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """`numba.extending.intrinsic`: the decorated function is called without its first argument."""
    return cast(Callable[..., Any], _intrinsic(function))
