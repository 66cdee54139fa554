"""Vectors and bit masks: lanes chosen by the bits of a word, and words made of comparisons."""

from typing import Any

from llvmlite import ir
from numba import types

from edgekv.kernels.cpu.jit import intrinsic
from edgekv.kernels.cpu.scalar import pointer_to
from edgekv.kernels.cpu.simd import LANES, vector

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_LANE_BITS = ir.IntType(LANES)
_INTS = ir.VectorType(_I32, LANES)


@intrinsic
def add_where(context: Any, planes: Any, index: Any, x: Any, so_far: Any) -> Any:
    """so_far + x in the lanes whose bits are 1, so_far in the others: LANES bits of bytes index.. of `planes`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.bitcast(pointer_to(context, builder, planes, args), _LANE_BITS.as_pointer())
        bits = builder.load(pointer, align=1)
        if LANES == 16:  # AVX-512 has registers for them
            chosen = builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))
        else:
            each = ir.Constant(_INTS, [1 << lane for lane in range(LANES)])
            tested = builder.and_(_splat(builder, builder.zext(bits, _I32), _INTS), each)
            chosen = builder.icmp_unsigned("!=", tested, ir.Constant(_INTS, [0] * LANES))
        return builder.select(chosen, builder.fadd(args[3], args[2]), args[3])

    return vector(planes, types.intp, vector, vector), build


@intrinsic
def at_least(context: Any, array: Any, index: Any, threshold: Any) -> Any:
    """Bit j is 1 where element index + j of a flat array, float32 or int32, is >= threshold; uint64."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(context.get_value_type(array.dtype), LANES)
        pointer = builder.bitcast(pointer_to(context, builder, array, args), kind.as_pointer())
        compare = builder.fcmp_ordered if array.dtype == types.float32 else builder.icmp_signed
        bits = compare(">=", builder.load(pointer, align=4), _splat(builder, args[2], kind))
        return builder.zext(builder.bitcast(bits, ir.IntType(LANES)), _I64)

    return types.uint64(array, types.intp, array.dtype), build


@intrinsic
def lowest_one(context: Any, word: Any) -> Any:
    """The position of the lowest 1 bit of a uint64 that is not 0."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.intp(types.uint64), build


def _splat(builder: Any, x: Any, kind: Any) -> Any:
    empty = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(empty, x, _I32(0))
    return builder.shuffle_vector(first, empty, ir.Constant(_INTS, [0] * LANES))
