"""Bit strings and bit planes for Numba kernels: words at any byte, and lanes chosen by the bits of an array."""

from typing import Any

from llvmlite import ir
from numba import types

from edgekv.kernels.numba_ import simd
from edgekv.kernels.numba_.jit import intrinsic

_I64 = ir.IntType(64)


@intrinsic
def load_word(context: Any, array: Any, index: Any) -> Any:
    """Bytes index..index + 8 of a flat uint8 array as a uint64, the first byte lowest."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(simd._pointer(context, builder, array, args, _I64), align=1)

    return types.uint64(array, types.uint64), build


@intrinsic
def store_word(context: Any, array: Any, index: Any, word: Any) -> Any:
    """Writes a uint64 to bytes index..index + 8 of a flat uint8 array, the lowest byte first."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], simd._pointer(context, builder, array, args, _I64), align=1)
        return context.get_dummy_value()

    return types.none(array, types.uint64, types.uint64), build


@intrinsic
def add_where(context: Any, array: Any, index: Any, x: Any, so_far: Any) -> Any:
    """so_far + x in the lanes i for which bit i is set in the bytes index.. of a flat uint8 array, else so_far."""
    mask = ir.IntType(simd.LANES)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.load(simd._pointer(context, builder, array, args, mask), align=1)
        chosen = builder.bitcast(bits, ir.VectorType(ir.IntType(1), simd.LANES))
        return builder.select(chosen, builder.fadd(args[3], args[2]), args[3])

    return simd.vector(array, types.intp, simd.vector, simd.vector), build
