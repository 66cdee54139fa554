"""How kernels are compiled by Numba, and loaded from the disk by llvmlite.

A `Loop` (`edgekv.kernels.cpu.loops`) is what Python calls, and other loops by its address. It takes whole numbers
alone, so that its machine code is loaded without Numba's types. What loops call by name is decorated with `jit`,
`fast_jit` or `inline_jit`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import numba
from numba.core.registry import cpu_target
from numba.core.runtime._nrt_python import c_helpers
from numba.extending import intrinsic as _intrinsic
from numba.extending import register_jitable

from edgekv.kernels import kernel_cache
from edgekv.kernels.kernel_cache import CPU_FEATURES as CPU_FEATURES

F = TypeVar("F", bound=Callable[..., Any])
Scalar = Any  # a number inside a kernel

# Sums may be reordered and fused, which vectorising needs; infinities and NaNs keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}


def jit(function: F) -> F:
    """Compiles a function that kernels call, with arithmetic exactly as written.

    ``fastmath`` is always given: without it, a function takes on that of its first caller.
    """
    return _jit_for_kernels(function, fastmath=False)


def fast_jit(function: F) -> F:
    """Compiles a function that kernels call, whose sums may be made in any order."""
    return _jit_for_kernels(function, fastmath=FAST)


def inline_jit(function: F) -> F:
    """Compiles as `fast_jit`, always inlined: for what runs so often that passing arguments would show."""
    return _jit_for_kernels(function, fastmath=FAST, forceinline=True)


def _jit_for_kernels(function: F, **options: Any) -> F:
    """Registers a function with Numba, which makes no wrappers for Python of it: a first run is shorter."""
    return cast(F, register_jitable(no_cfunc_wrapper=True, error_model="numpy", **options)(function))


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an intrinsic of Numba, which is called without the function's first argument."""
    return cast(Callable[..., Any], _intrinsic(function))


_lock = threading.RLock()


def compile_loop(function: Callable[..., None], fastmath: Any, parallel: bool) -> Any:
    """Returns Numba's C callback of a function of whole numbers."""
    signature = numba.void(*[numba.intp] * function.__code__.co_argcount)
    options = {"nopython": True, "error_model": "numpy", "fastmath": fastmath, "parallel": parallel}
    return numba.cfunc(signature, **options)(function)


def loop_address(function: Callable[..., None], fastmath: Any = False, parallel: bool = False) -> int:
    """Returns the address of a function's machine code, which is loaded from the disk, or else compiled.

    Any Python thread may ask: one compiles, the others wait for it.
    """
    file = kernel_cache.kernel_file(function, f"{fastmath and sorted(fastmath)}, {parallel}")
    with _lock:
        if file is not None and (saved := kernel_cache.load(file)):
            return _load(*saved)
        with kernel_cache.timed_compilation():
            compiled = compile_loop(function, fastmath, parallel)
        _alive.append(compiled)
        library = compiled._library
        machine_code = compiled.native_name, library._get_compiled_object()
        if file is not None and not library.has_dynamic_globals:
            kernel_cache.save(file, *machine_code)
        return _load(*machine_code)  # `compiled.address` may sum in another order than what the next process loads


_alive: list[Any] = []  # keeps linked code alive, and compilations whose data it points to


def _new_engine() -> Any:
    """Returns LLVM's linker of machine code, told where the functions are that Numba's error paths call."""
    assert cpu_target.target_context  # made here, it tells LLVM of most
    for name, address in c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def _load(symbol: str, code: bytes) -> int:
    """Links machine code by itself: beside other code LLVM would take functions of the same names from there."""
    _alive.append(engine := _new_engine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(symbol))
