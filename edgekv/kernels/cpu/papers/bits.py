"""Bit strings and bit planes for Numba kernels: words at any byte, and bits spread over bytes."""

from typing import Any

from llvmlite import ir
from numba import types

from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.jit import intrinsic

_I64 = ir.IntType(64)
_BYTES = ir.VectorType(ir.IntType(8), simd.LANES)


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
def put_bits(context: Any, codes: Any, i: Any, planes: Any, j: Any) -> Any:
    """codes[i:] = the LANES bits from byte j of planes on, one to a byte; both flat uint8 arrays."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = simd._pointer(context, builder, codes, args[:2], _BYTES)
        builder.store(_spread(context, builder, planes, args[2:]), target, align=1)
        return context.get_dummy_value()

    return types.none(codes, types.intp, planes, types.intp), build


@intrinsic
def shift_in_bits(context: Any, codes: Any, i: Any, planes: Any, j: Any) -> Any:
    """`put_bits` below what is there: codes[i:] = 2 * codes[i:] + bit."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = simd._pointer(context, builder, codes, args[:2], _BYTES)
        before = builder.load(target, align=1)
        after = builder.add(builder.add(before, before), _spread(context, builder, planes, args[2:]))
        builder.store(after, target, align=1)
        return context.get_dummy_value()

    return types.none(codes, types.intp, planes, types.intp), build


def _spread(context: Any, builder: Any, planes: Any, args: Any) -> Any:
    bits = builder.load(simd._pointer(context, builder, planes, args, ir.IntType(simd.LANES)), align=1)
    return builder.zext(builder.bitcast(bits, ir.VectorType(ir.IntType(1), simd.LANES)), _BYTES)
