"""Scalars inside kernels: loads and stores without Numba's checks, float16, and rounding.

Numba knows no float16 on a CPU: it is kept as its bits in uint16 and converted in LLVM, scalars and vectors alike.
Where the processor has no instruction for that (x86 before F16C, small Celerons), LLVM would call a library
function that is not there; then the conversion is spelt out.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from edgekv.kernels.cpu.compile import CPU_FEATURES, Scalar, intrinsic, jit
from edgekv.kernels.interface import MAX_F16

NOT_NAN = ("nnan", "nsz")


@intrinsic
def get(context: Any, array: Any, index: Any) -> Any:
    """Returns array[index] of a flat array or a pointer, index >= 0, without Numba's check for negative ones."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(pointer_to(context, builder, array, args))

    return array.dtype(array, types.intp), build


@intrinsic
def put(context: Any, array: Any, index: Any, value: Any) -> Any:
    """Sets array[index] of a flat array or a pointer to a value of its type, index >= 0."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], pointer_to(context, builder, array, args))
        return context.get_dummy_value()

    return types.none(array, types.intp, array.dtype), build


@intrinsic
def maximum(context: Any, a: Any, b: Any) -> Any:
    """Returns the larger of two float32, neither NaN."""
    return types.float32(types.float32, types.float32), _select(">")


@intrinsic
def minimum(context: Any, a: Any, b: Any) -> Any:
    """Returns the smaller of two float32, neither NaN."""
    return types.float32(types.float32, types.float32), _select("<")


@intrinsic
def clamp(context: Any, x: Any, low: Any, high: Any) -> Any:
    """Returns the float32 in low..high nearest to x, and low for NaN, so that a code is a valid index."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, low, high = args
        x = builder.select(builder.fcmp_ordered(">", x, low), x, low)
        return builder.select(builder.fcmp_ordered("<", x, high), x, high)

    return types.float32(types.float32, types.float32, types.float32), build


@intrinsic
def where(context: Any, condition: Any, a: Any, b: Any) -> Any:
    """Returns the float32 a where the condition holds, else b, without a jump that could be predicted wrongly."""
    return types.float32(types.boolean, types.float32, types.float32), lambda _, llvm, __, args: llvm.select(*args)


@intrinsic
def count_ones(context: Any, word: Any) -> Any:
    """Returns the number of 1 bits of a uint64, as uint64."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), build


@intrinsic
def sign_bits(context: Any, x: Any, i: Any) -> Any:
    """Returns a byte whose bit j is 1 where x[i + j] >= 0, of float32 x."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        eight = ir.VectorType(ir.FloatType(), 8)
        pointer = builder.bitcast(pointer_to(context, builder, x, args), eight.as_pointer())
        signs = builder.fcmp_ordered(">=", builder.load(pointer, align=4), ir.Constant(eight, [0.0] * 8))
        return builder.bitcast(signs, ir.IntType(8))

    return types.uint8(x, types.intp), build


def pointer_to(context: Any, builder: Any, kind: Any, args: Any) -> Any:
    """Returns the pointer to element args[1] of args[0], whose Numba type ``kind`` is an array or a pointer."""
    start, index = args[:2]
    if isinstance(kind, types.Array):
        start = cgutils.create_struct_proxy(kind)(context, builder, value=start).data
    return builder.gep(start, [index])


def _select(comparison: str) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        better = builder.fcmp_ordered(comparison, args[0], args[1], flags=NOT_NAN)
        return builder.select(better, args[0], args[1], flags=NOT_NAN)

    return build


Value = Any  # an llvmlite value: scalar or vector
HAS_INSTRUCTIONS = "+f16c" in CPU_FEATURES or platform.machine() == "aarch64"

INFINITY_BITS = 0x7F800000
SIGN_BIT = 0x80000000
HALF_MAGNITUDE = 0x7FFF
EXPONENT_SHIFT = 13  # significand bits that float16 lacks
FROM_HALF = 0x77800000  # 2.0 ** 112: moves a float16 exponent into place, subnormals included
OVERFLOW = 0x47800000  # 65536.0
SUBNORMAL = 0x38800000  # 2.0 ** -14, the least normal float16
SUBNORMAL_MAGIC = 0x3F000000  # 0.5: added, it leaves a subnormal float16 in the low bits


@intrinsic
def as_float(context: Any, x: Any) -> Any:
    """Returns the float32 of a float16's bits (uint16), an int8 or a float32."""

    def build(_: Any, builder: Any, __: Any, args: Any) -> Value:
        if x == types.int8:
            return builder.sitofp(args[0], ir.FloatType())
        return args[0] if x == types.float32 else widen(builder, args[0])

    return types.float32(x), build


@intrinsic
def float_to_half(context: Any, x: Any) -> Any:
    """Returns the float16 bits (uint16) of a float32, rounded to nearest even."""

    def build(_: Any, builder: Any, __: Any, args: Any) -> Value:
        return narrow(builder, args[0])

    return types.uint16(types.float32), build


def widen(builder: Any, bits: Value) -> Value:
    """Returns the float32 of float16 bits: LLVM values, scalars or vectors."""
    as_float = _like(bits, ir.FloatType())
    if HAS_INSTRUCTIONS:
        return builder.fpext(builder.bitcast(bits, _like(bits, ir.HalfType())), as_float)
    as_int = _like(bits, ir.IntType(32))
    wide = builder.zext(bits, as_int)
    magnitude = builder.shl(builder.and_(wide, _fill(as_int, HALF_MAGNITUDE)), _fill(as_int, EXPONENT_SHIFT))
    factor = builder.bitcast(_fill(as_int, FROM_HALF), as_float)
    value = builder.bitcast(builder.fmul(builder.bitcast(magnitude, as_float), factor), as_int)
    special = builder.icmp_unsigned(">=", magnitude, _fill(as_int, 0x7C00 << EXPONENT_SHIFT))
    value = builder.or_(value, builder.select(special, _fill(as_int, INFINITY_BITS), _fill(as_int, 0)))
    sign = builder.shl(builder.and_(wide, _fill(as_int, 0x8000)), _fill(as_int, 16))
    return builder.bitcast(builder.or_(value, sign), as_float)


def narrow(builder: Any, x: Value) -> Value:
    """Returns the float16 bits of a float32: LLVM values."""
    i32, i16 = ir.IntType(32), ir.IntType(16)
    if HAS_INSTRUCTIONS:
        return builder.bitcast(builder.fptrunc(x, ir.HalfType()), i16)
    bits = builder.bitcast(x, i32)
    magnitude = builder.and_(bits, i32(~SIGN_BIT & 0xFFFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, i32(EXPONENT_SHIFT)), i32(1))
    rounded = builder.add(builder.add(magnitude, i32(0xFFF)), odd)
    normal = builder.lshr(builder.sub(rounded, i32((127 - 15) << 23)), i32(EXPONENT_SHIFT))
    magic = builder.bitcast(i32(SUBNORMAL_MAGIC), ir.FloatType())
    shifted = builder.fadd(builder.bitcast(magnitude, ir.FloatType()), magic)
    tiny = builder.sub(builder.bitcast(shifted, i32), i32(SUBNORMAL_MAGIC))
    not_a_number = builder.icmp_unsigned(">", magnitude, i32(INFINITY_BITS))
    huge = builder.select(not_a_number, i32(0x7E00), i32(0x7C00))
    result = builder.select(builder.icmp_unsigned("<", magnitude, i32(SUBNORMAL)), tiny, normal)
    result = builder.select(builder.icmp_unsigned(">=", magnitude, i32(OVERFLOW)), huge, result)
    sign = builder.lshr(builder.and_(bits, i32(SIGN_BIT)), i32(16))
    return builder.trunc(builder.or_(result, sign), i16)


def _like(value: Value, element: Any) -> Any:
    """Returns the type ``element``, or a vector with as many lanes as ``value``."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def _fill(kind: Any, constant: int) -> Value:
    return ir.Constant(kind, [constant] * kind.count if isinstance(kind, ir.VectorType) else constant)


# x + ROUND has in its low bits a float32 |x| < 2**22, rounded to an integer, halves to even; - ROUND: as a float.
ROUND = np.float32(1.5 * 2**23)


@jit
def round_to_even(x: Scalar) -> Scalar:
    """Rounds a float32 |x| < 2**22 to a whole number, halves to even."""
    return x + ROUND - ROUND


@jit
def round_up_to_half(x: Scalar) -> Scalar:
    """Returns the bits of the least float16 >= x >= 0, or of the largest float16."""
    x = minimum(x, MAX_F16)
    bits = float_to_half(x)
    return np.uint16(bits + 1) if as_float(bits) < x else bits
