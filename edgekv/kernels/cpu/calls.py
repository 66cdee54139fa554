"""Calls of compiled functions by address, from compiled code: of what `loops` describes, and of parts of work."""

from typing import Any

from llvmlite import ir
from numba import types

from edgekv.kernels.cpu.jit import intrinsic


def call(n_arguments: int) -> Any:
    """Signature and body of an intrinsic that calls a function of whole numbers by its address."""
    integer = ir.IntType(64)
    kind = ir.FunctionType(ir.VoidType(), [integer] * n_arguments)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.none(*[types.intp] * (n_arguments + 1)), build


@intrinsic
def call_part(context: Any, part_of: Any, first: Any, last: Any, part: Any, args: Any) -> Any:
    """Calls a function of four whole numbers at an address."""
    return call(4)


@intrinsic
def call_prepare(context: Any, loop: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """Calls the `prepare_loop` at an address."""
    return call(5)


@intrinsic
def call_put(context: Any, loop: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """Calls the `put_loop` at an address."""
    return call(6)


@intrinsic
def call_block(
    context: Any, loop: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any
) -> Any:
    """Calls the `score_loop` or `add_loop` at an address."""
    return call(9)


@intrinsic
def call_measure(context: Any, loop: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any) -> Any:
    """Calls the `measure_loop` at an address."""
    return call(7)


@intrinsic
def call_finish(context: Any, loop: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Calls the `finish_loop` at an address."""
    return call(4)


@intrinsic
def call_second_stage(
    context: Any,
    loop: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    e: Any,
    f: Any,
    g: Any,
    h: Any,
    i: Any,
    j: Any,
    k: Any,
    l: Any,  # noqa: E741
    m: Any,
) -> Any:
    """Calls the `second_stage_loop` at an address."""
    return call(13)
