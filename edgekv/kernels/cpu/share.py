"""Work items shared out to threads by one parallel loop, which is compiled once and calls functions by address.

Numba compiles all of what a parallel loop calls a second time, with every loop that has it.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

from llvmlite import ir
from numba import prange, types
from numba.core import cgutils

from edgekv.kernels.cpu.calls import call_part
from edgekv.kernels.cpu.jit import entry_jit, intrinsic
from edgekv.kernels.cpu.loops import team_loop

_I64 = ir.IntType(64)


@team_loop
def TEAM(n_parts: int, n_items: int, part_of: int, args: int) -> None:
    """Calls part_of(first, last, part, args) for each of ``n_parts`` parts of the items, on Numba's threads."""
    for part in prange(n_parts):
        call_part(part_of, n_items * part // n_parts, n_items * (part + 1) // n_parts, part, args)


@intrinsic
def share(context: Any, team: Any, n_parts: Any, n_items: Any, items: Any, args: Any) -> Any:
    """items(first, last, *args) for all of 0..n_items: at once, or in parts by ``team``, the address of TEAM."""
    call = items.get_call_type(context, (types.intp, types.intp, *args.types), {})

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        team, n_parts, n_items, _, packed = values
        compiled = items.dispatcher.overloads[tuple(call.args)]
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
    share(team, n_parts, n_items, items, args)  # type: ignore[name-defined]  # noqa: F821


@functools.cache
def shared(items: Any) -> Any:
    """The kernel (team, n_parts, n_items, args) that calls items(first, last, *args), called from Python."""
    own, name = items.py_func, f"{items.py_func.__name__}_shared"
    code = _shared.__code__.replace(
        co_filename=own.__code__.co_filename, co_firstlineno=own.__code__.co_firstlineno, co_name=name
    )
    function = FunctionType(code, {"share": share, "items": items, "__name__": own.__module__}, name)
    function.__module__, function.__qualname__ = own.__module__, name
    return entry_jit(function)
