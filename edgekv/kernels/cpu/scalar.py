"""Scalar operations that LLVM vectorises, in place of Numba's own that it does not."""

from typing import Any

from numba import types
from numba.core import cgutils

from edgekv.kernels.cpu.jit import intrinsic

NOT_NAN = ("nnan", "nsz")


@intrinsic
def address(context: Any, array: Any) -> Any:
    """The elements of a contiguous array, for what takes a flat array here: a bare pointer.

    Numba counts the references of an array at each call that gets it, in atomic operations, and passes seven words
    for it. The array must stay referenced elsewhere, as the arguments of a kernel are.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return cgutils.create_struct_proxy(array)(context, builder, value=args[0]).data

    return types.CPointer(array.dtype)(array), build


@intrinsic
def get(context: Any, array: Any, index: Any) -> Any:
    """array[index] of a flat array, index >= 0: Numba's wrap-around of negative ones hides the stride."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(pointer_to(context, builder, array, args))

    return array.dtype(array, types.intp), build


@intrinsic
def put(context: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] = value of a flat array, index >= 0, value of its type."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], pointer_to(context, builder, array, args))
        return context.get_dummy_value()

    return types.none(array, types.intp, array.dtype), build


@intrinsic
def maximum(context: Any, a: Any, b: Any) -> Any:
    """The larger of two float32, neither NaN."""
    return types.float32(types.float32, types.float32), _select(">")


@intrinsic
def minimum(context: Any, a: Any, b: Any) -> Any:
    """The smaller of two float32, neither NaN."""
    return types.float32(types.float32, types.float32), _select("<")


@intrinsic
def clamp(context: Any, x: Any, low: Any, high: Any) -> Any:
    """The float32 from low to high that is next to x, low for NaN: what becomes a code, which may be an index."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, low, high = args
        x = builder.select(builder.fcmp_ordered(">", x, low), x, low)
        return builder.select(builder.fcmp_ordered("<", x, high), x, high)

    return types.float32(types.float32, types.float32, types.float32), build


@intrinsic
def count_ones(context: Any, word: Any) -> Any:
    """The number of 1 bits of a uint64, as uint64."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), build


def pointer_to(context: Any, builder: Any, kind: Any, args: Any) -> Any:
    """The element args[1] of args[0], which is of the Numba type `kind`: an array or an `address`."""
    start, index = args[:2]
    if isinstance(kind, types.Array):
        start = cgutils.create_struct_proxy(kind)(context, builder, value=start).data
    return builder.gep(start, [index])


def _select(comparison: str) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        better = builder.fcmp_ordered(comparison, args[0], args[1], flags=NOT_NAN)
        return builder.select(better, args[0], args[1], flags=NOT_NAN)

    return build
