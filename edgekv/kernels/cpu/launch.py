"""How work is shared out to threads: kernels `items(first, last, ...)` that do a range of work items.

One parallel loop, compiled once, calls them by address: Numba compiles all of what a parallel loop calls a second
time, with every loop that has it. Where a kernel would have a dozen more parameters, these are one tuple `args`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import gcd
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils

from edgekv.kernels import threads
from edgekv.kernels.cpu.compile import entry_jit, intrinsic
from edgekv.kernels.cpu.loops import Loop, address_of, call, parallel_loop

_I64 = ir.IntType(64)


@parallel_loop
def PARALLEL_FOR(n_parts: int, n_items: int, part_of: int, args: int) -> None:
    """Calls part_of(first, last, part, args) for each of ``n_parts`` parts of the items, on Numba's threads."""
    for part in prange(n_parts):
        call(part_of, (n_items * part // n_parts, n_items * (part + 1) // n_parts, part, args))


@intrinsic
def parallel_for(context: Any, team: Any, n_parts: Any, n_items: Any, items: Any, args: Any) -> Any:
    """items(first, last, *args) for all of 0..n_items: at once, or in parts by PARALLEL_FOR, of address team."""
    typed = items.get_call_type(context, (types.intp, types.intp, *args.types), {})

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        team, n_parts, n_items, _, packed = values
        compiled = items.dispatcher.overloads[tuple(typed.args)]
        context.add_linking_libs([compiled.library])
        part_of = _part_of(context, builder.module, compiled.fndesc, packed.type)
        memory = cgutils.alloca_once_value(builder, packed)
        address = builder.ptrtoint(memory, _I64)
        with builder.if_else(builder.icmp_signed(">", n_parts, _I64(1))) as (several, one):
            with several:
                kind = ir.FunctionType(ir.VoidType(), [_I64] * 4)
                where = builder.ptrtoint(part_of, _I64)
                function = builder.inttoptr(team, kind.as_pointer())
                builder.call(function, [n_parts, n_items, where, address])
            with one:
                builder.call(part_of, [_I64(0), n_items, _I64(0), address])
        return context.get_dummy_value()

    return types.none(types.intp, types.intp, types.intp, items, args), build


def _part_of(context: Any, module: Any, compiled: Any, packed: Any) -> Any:
    """A function of whole numbers (first, last, part, address of the arguments) that calls a compiled one."""
    kind = ir.FunctionType(ir.VoidType(), [_I64] * 4)
    function = cgutils.get_or_insert_function(module, kind, f"{compiled.llvm_func_name}.part")
    if function.is_declaration:
        function.linkage = "internal"
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        first, last, _, address = function.args
        args = builder.load(builder.inttoptr(address, packed.as_pointer()))
        unpacked = cgutils.unpack_tuple(builder, args)
        callee = context.declare_function(module, compiled)
        context.call_conv.call_function(builder, callee, types.none, compiled.argtypes, [first, last, *unpacked])
        builder.ret_void()
    return function


def _shared(team: int, n_parts: int, n_items: int, args: Any) -> None:
    parallel_for(team, n_parts, n_items, items, args)  # type: ignore[name-defined]  # noqa: F821


@functools.cache
def shared(items: Any) -> Any:
    """The kernel (team, n_parts, n_items, args) that calls items(first, last, *args), called from Python."""
    own, name = items.py_func, f"{items.py_func.__name__}_shared"
    code = _shared.__code__.replace(
        co_filename=own.__code__.co_filename, co_firstlineno=own.__code__.co_firstlineno, co_name=name
    )
    function = FunctionType(code, {"parallel_for": parallel_for, "items": items, "__name__": own.__module__}, name)
    function.__module__, function.__qualname__ = own.__module__, name
    return entry_jit(function)


# Multiply-adds (10 to 50 per nanosecond and core) below which waking threads costs more than it saves.
MIN_PARALLEL_WORK = 1 << 19


def run(items: Callable[..., None], n_items: int, work: int, *args: Any) -> None:
    """Does items 0..n_items, in parallel if their cost, `work` multiply-adds or so, is worth it."""
    if work < MIN_PARALLEL_WORK or n_items == 1 or threads.count() == 1:
        shared(items)(0, 1, n_items, args)
    else:
        threads.run_parallel(shared(items), PARALLEL_FOR.address, threads.count(), n_items, args)


def token_splits(n_kv_heads: int, work: int) -> int:
    """Pieces to cut each head's tokens into so that heads times pieces divide evenly over the threads."""
    if work < MIN_PARALLEL_WORK:
        return 1
    return threads.count() // gcd(n_kv_heads, threads.count())


def flat(x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], int, int]:
    """x (A, B, C), its rows contiguous, as a flat array, and the gaps between its elements along A and B.

    A flat array has one type whatever the gaps, so that a kernel is compiled once.
    """
    gap_a, gap_b = x.strides[0] // x.itemsize, x.strides[1] // x.itemsize
    if x.flags.c_contiguous:
        return x.reshape(-1), gap_a, gap_b
    n_elements = (x.shape[0] - 1) * gap_a + (x.shape[1] - 1) * gap_b + x.shape[2]
    return np.lib.stride_tricks.as_strided(x, (n_elements,), (x.itemsize,)), gap_a, gap_b


class Stage:
    """items(first, last, part, numbers), called by address: it is compiled once, for one thread and for all.

    numbers: the address of what it gets; part: which of the threads' shares of the items this is.
    """

    def __init__(self, items: Callable[[int, int, int, int], None], exact: bool = False) -> None:
        """exact: arithmetic as written, else sums in any order."""
        self._loop = Loop(items, exact)

    def run(self, n_items: int, numbers: npt.NDArray[np.int64], n_threads: int) -> None:
        """All items, a share to each of n_threads; on this thread, where that is one."""
        if n_threads == 1:
            self._loop.call(0, n_items, 0, address_of(numbers))
        else:
            arguments = n_threads, n_items, self._loop.address, address_of(numbers)
            threads.run_parallel(PARALLEL_FOR.call, *arguments, n_threads=n_threads)
