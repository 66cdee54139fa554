"""float16 in Numba, which knows no such type on a CPU: its bits in uint16, converted in LLVM.

The conversions build on scalars and on vectors alike. Where the processor has no instruction for them (x86
before F16C, small Celerons), LLVM would call a library function that is not there; then they are spelt out.
"""

import platform
from typing import Any

from llvmlite import ir
from numba import types

from edgekv.kernels.cpu.jit import CPU_FEATURES, intrinsic

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
    """float32 of a float16's bits (uint16), or of what is a float32 already."""

    def build(_: Any, builder: Any, __: Any, args: Any) -> Value:
        return args[0] if x == types.float32 else widen(builder, args[0])

    return types.float32(x), build


@intrinsic
def float_to_half(context: Any, x: Any) -> Any:
    """float16 bits of a float32, rounded to nearest even."""

    def build(_: Any, builder: Any, __: Any, args: Any) -> Value:
        return narrow(builder, args[0])

    return types.uint16(types.float32), build


def widen(builder: Any, bits: Value) -> Value:
    """Float value(s) of 16-bit integer value(s)."""
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
    """16-bit integer value of a float value."""
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
    """The type `element`, or a vector of as many as `value` has."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def _fill(kind: Any, constant: int) -> Value:
    return ir.Constant(kind, [constant] * kind.count if isinstance(kind, ir.VectorType) else constant)
