"""Typed shorthands for the ways kernels are compiled, and what the processor offers."""

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import codegen, config
from numba.extending import intrinsic as _intrinsic

from edgekv.kernels.cpu.inner import InnerCompiler
from edgekv.kernels.cpu.kept import KeptKernel

F = TypeVar("F", bound=Callable[..., Any])
Scalar = Any  # a number inside a kernel
Args = tuple[Any, ...]

if os.path.isfile(config._config_fname):  # in the working folder, where strangers' files may be
    config._config_fname = os.devnull
    config.reload_config()
CPU_FEATURES = config.CPU_FEATURES if config.CPU_FEATURES is not None else codegen.get_host_cpu_features()

# Sums may be reordered and fused, which vectorising needs; infinities and NaNs keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}


def _inner(function: F, **options: Any) -> F:
    """Called by what is compiled alone, and kept on disk as a part of that."""
    dispatcher = numba.njit(nogil=True, error_model="numpy", **options)(function)
    dispatcher._compiler.__class__ = InnerCompiler
    return cast(F, dispatcher)


def kept_jit(function: F, **options: Any) -> F:
    """Called from Python, and kept on disk."""
    dispatcher = numba.njit(nogil=True, no_cfunc_wrapper=True, **options)(function)
    if (kept := KeptKernel.of(function)) is not None:
        dispatcher._cache = kept
    return cast(F, dispatcher)


def jit(function: F) -> F:
    """Exact arithmetic, as written: said in so many words, or a function takes on that of its first caller."""
    return _inner(function, fastmath=False)


def fast_jit(function: F) -> F:
    """Sums in any order."""
    return _inner(function, fastmath=FAST)


def inline_jit(function: F) -> F:
    """`fast_jit`, always inlined: for what runs so often that passing arrays would show."""
    return _inner(function, fastmath=FAST, forceinline=True)


def entry_jit(function: F) -> F:
    """Called from Python, and kept on disk; exact."""
    return kept_jit(function, error_model="numpy", fastmath=False)


def parallel_jit(function: F) -> F:
    """Called from Python; `numba.prange` loops run on all threads.

    Allocate nothing inside them: it is ten times slower. What they call is compiled a second time: see `share`.
    """
    return kept_jit(function, parallel=True)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """`numba.extending.intrinsic`: the decorated function is called without its first argument."""
    return cast(Callable[..., Any], _intrinsic(function))
