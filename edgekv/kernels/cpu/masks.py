"""Lanes of a vector chosen by the bits of a word."""

from typing import Any

from llvmlite import ir
from numba import types

from edgekv.kernels.cpu.compile import intrinsic
from edgekv.kernels.cpu.scalar import pointer_to
from edgekv.kernels.cpu.simd import LANES, vector

_I32 = ir.IntType(32)
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


def _splat(builder: Any, x: Any, kind: Any) -> Any:
    empty = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(empty, x, _I32(0))
    return builder.shuffle_vector(first, empty, ir.Constant(_INTS, [0] * LANES))
