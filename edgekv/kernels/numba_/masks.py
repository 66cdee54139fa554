"""Vectors and bit masks: lanes chosen by the bits of a word, and words made of comparisons."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from edgekv.kernels.numba_.jit import intrinsic
from edgekv.kernels.numba_.simd import LANES, vector

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


@intrinsic
def add_where(context: Any, word: Any, shift: Any, x: Any, so_far: Any) -> Any:
    """so_far + x in the lanes j for which bit shift + j of the uint32 `word` is 1, so_far in the others."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, shift, x, so_far = args
        lane_bits = ir.Constant(_INTS, [1 << lane for lane in range(LANES)])
        bits = builder.shl(lane_bits, _splat(builder, builder.trunc(shift, _I32), _INTS))
        tested = builder.and_(_splat(builder, word, _INTS), bits)
        chosen = builder.icmp_unsigned("!=", tested, ir.Constant(_INTS, [0] * LANES))
        return builder.select(chosen, builder.fadd(so_far, x), so_far)

    return vector(types.uint32, types.intp, vector, vector), build


@intrinsic
def at_least(context: Any, array: Any, index: Any, threshold: Any) -> Any:
    """Bit j is 1 where element index + j of a flat float32 array is >= threshold; uint64."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = cgutils.create_struct_proxy(array)(context, builder, value=args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), _VECTOR.as_pointer())
        bits = builder.fcmp_ordered(">=", builder.load(pointer, align=4), _splat(builder, args[2], _VECTOR))
        return builder.zext(builder.bitcast(bits, ir.IntType(LANES)), _I64)

    return types.uint64(array, types.intp, types.float32), build


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
