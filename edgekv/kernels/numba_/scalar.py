"""Scalar operations that LLVM vectorises, in place of Numba's own that it does not."""

from typing import Any

from numba import types

from edgekv.kernels.numba_.jit import intrinsic

NOT_NAN = ("nnan", "nsz")


@intrinsic
def maximum(context: Any, a: Any, b: Any) -> Any:
    """The larger of two float32, neither NaN."""
    return types.float32(types.float32, types.float32), _select(">")


@intrinsic
def minimum(context: Any, a: Any, b: Any) -> Any:
    """The smaller of two float32, neither NaN."""
    return types.float32(types.float32, types.float32), _select("<")


@intrinsic
def count_ones(context: Any, word: Any) -> Any:
    """The number of 1 bits of a uint64, as uint64."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), build


def _select(comparison: str) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        better = builder.fcmp_ordered(comparison, args[0], args[1], flags=NOT_NAN)
        return builder.select(better, args[0], args[1], flags=NOT_NAN)

    return build
