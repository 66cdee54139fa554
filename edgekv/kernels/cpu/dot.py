"""Vectors of 4 * LANES bytes: codes unpacked, and multiplied four to a lane into sums in int32.

Most processors have an instruction for these products of codes of at most 127 with bytes of at most 255.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from edgekv.kernels.cpu import arm
from edgekv.kernels.cpu.byte_products import INTS as INTS
from edgekv.kernels.cpu.byte_products import call, signed_products
from edgekv.kernels.cpu.byte_products import products as products
from edgekv.kernels.cpu.jit import intrinsic
from edgekv.kernels.cpu.scalar import pointer_to
from edgekv.kernels.cpu.simd import LANES

Ints = Any  # LANES int32, or 4 * LANES bytes, inside a kernel
Value = Any  # an llvmlite value

_I8, _I16, _I32 = (ir.IntType(n_bits) for n_bits in (8, 16, 32))
_BITS = ir.VectorType(ir.IntType(1), 4 * LANES)
_BYTES = ir.VectorType(_I8, 4 * LANES)


class _IntsType(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(f"int32x{LANES}")


ints = _IntsType()


@register_model(_IntsType)
class _IntsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, INTS)


@intrinsic
def load_bytes(context: Any, array: Any, index: Any) -> Any:
    """Bytes index.. of a flat uint8 array."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(context, builder, array, args, INTS)

    return ints(array, types.intp), build


@intrinsic
def load_bits(context: Any, array: Any, index: Any) -> Any:
    """A byte of 0 or 1 for each bit from byte index of a flat uint8 array on."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = _load(context, builder, array, args, ir.IntType(4 * LANES))
        if LANES == 16:  # AVX-512 has registers for them
            return builder.bitcast(builder.zext(builder.bitcast(bits, _BITS), _BYTES), INTS)
        few = builder.bitcast(bits, ir.VectorType(_I8, LANES // 2))
        each = ir.Constant(ir.VectorType(_I32, 4 * LANES), [byte // 8 for byte in range(4 * LANES)])
        spread = builder.shuffle_vector(few, few, each)
        if arm.IS_ARM:
            lowest = builder.lshr(spread, ir.Constant(_BYTES, [byte % 8 for byte in range(4 * LANES)]))
            return builder.bitcast(builder.and_(lowest, ir.Constant(_BYTES, [1] * (4 * LANES))), INTS)
        tested = builder.and_(spread, ir.Constant(_BYTES, [1 << byte % 8 for byte in range(4 * LANES)]))
        ones = builder.icmp_unsigned("!=", tested, ir.Constant(_BYTES, [0] * (4 * LANES)))
        return builder.bitcast(builder.zext(ones, _BYTES), INTS)

    return ints(array, types.intp), build


@intrinsic
def store_bytes(context: Any, array: Any, index: Any, codes: Any) -> Any:
    """Writes 4 * LANES bytes to bytes index.. of a flat uint8 array."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.bitcast(pointer_to(context, builder, array, args), INTS.as_pointer())
        builder.store(args[2], pointer, align=1)
        return context.get_dummy_value()

    return types.none(array, types.intp, ints), build


@intrinsic
def no_sums(context: Any) -> Any:
    """LANES sums of 0."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(INTS, [0] * LANES)

    return ints(), build


@intrinsic
def add_signed(context: Any, codes: Any, signed: Any, so_far: Any) -> Any:
    """Adds to each sum its four codes times four signed bytes."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return signed_products(builder, *args)

    return ints(ints, ints, ints), build


@intrinsic
def multiply_add(context: Any, a: Any, factor: Any, b: Any) -> Any:
    """a * factor + b."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, factor, b = args
        return builder.add(builder.mul(a, _splat(builder, builder.trunc(factor, _I32))), b)

    return ints(ints, types.intp, ints), build


@intrinsic
def total(context: Any, a: Any) -> Any:
    """The sum of all lanes, int32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return call(builder, f"llvm.vector.reduce.add.v{LANES}i32", _I32, args[0])

    return types.int32(ints), build


def _load(context: Any, builder: Any, kind: Any, args: Any, target: Any) -> Value:
    return builder.load(builder.bitcast(pointer_to(context, builder, kind, args), target.as_pointer()), align=1)


def _splat(builder: Any, word: Value) -> Value:
    empty = ir.Constant(INTS, ir.Undefined)
    first = builder.insert_element(empty, word, _I32(0))
    return builder.shuffle_vector(first, empty, ir.Constant(INTS, [0] * LANES))
