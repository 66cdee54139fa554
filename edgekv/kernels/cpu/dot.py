"""Vectors of 4 * LANES bytes: codes unpacked, and multiplied four to a lane into sums in int32.

Most processors have an instruction for these products of codes of at most 127 with bytes of at most 255.
"""

from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from edgekv.kernels.cpu import arm
from edgekv.kernels.cpu.byte_products import INTS as INTS
from edgekv.kernels.cpu.byte_products import call, signed_products
from edgekv.kernels.cpu.byte_products import products as products
from edgekv.kernels.cpu.half import widen
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


class _FourType(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("int32x4")


ints, four = _IntsType(), _FourType()


@register_model(_IntsType)
class _IntsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, INTS)


@register_model(_FourType)
class _FourModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.VectorType(_I32, 4))


@intrinsic
def load_bytes(context: Any, array: Any, index: Any) -> Any:
    """Bytes index.. of a flat uint8 array."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(context, builder, array, args, INTS)

    return ints(array, types.intp), build


@intrinsic
def load_half(context: Any, array: Any, index: Any) -> Any:
    """Half as many bytes index.. of a flat uint8 array, then zeros."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = ir.VectorType(_I32, LANES // 2)
        zeros, whole = ir.Constant(half, [0] * (LANES // 2)), ir.Constant(INTS, list(range(LANES)))
        return builder.shuffle_vector(_load(context, builder, array, args, half), zeros, whole)

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
def codes_of(context: Any, packed: Any, shift: Any, bits: Any) -> Any:
    """The `bits` bits from bit `shift` on of each byte."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed, shift, bits = args[0], builder.trunc(args[1], _I32), builder.trunc(args[2], _I32)
        mask = builder.mul(builder.sub(builder.shl(_I32(1), bits), _I32(1)), _I32(0x01010101))
        return builder.and_(builder.lshr(packed, _splat(builder, shift)), _splat(builder, mask))

    return ints(ints, types.intp, types.intp), build


@intrinsic
def no_sums(context: Any) -> Any:
    """LANES sums of 0."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(INTS, [0] * LANES)

    return ints(), build


@intrinsic
def add_products(context: Any, word: Any, codes: Any, so_far: Any) -> Any:
    """Adds to each sum the four bytes of the uint32 `word` times its four codes."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return products(builder, _splat(builder, args[0]), args[1], args[2])

    return ints(types.uint32, ints, ints), build


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


@intrinsic
def totals(context: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sums of all lanes of four vectors."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b, c, d = args
        result = _add_pairs(builder, _add_pairs(builder, a, c), _add_pairs(builder, b, d))
        while result.type.count > 4:
            half = result.type.count // 2
            result = builder.add(*(_shuffle(builder, result, result, range(i, i + half)) for i in (0, half)))
        return result

    return four(ints, ints, ints, ints), build


@intrinsic
def store_products(
    context: Any, s: Any, i: Any, size: Any, whole: Any, middle: Any, step: Any, at: Any, common: Any
) -> Any:
    """s[i + k] = size * (common + step[at + k] * (whole[k] - middle)) for four `totals`; step in float16 bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size, whole, middle, common = (args[2], args[3], args[4], args[7])
        pointer = builder.bitcast(
            pointer_to(context, builder, step, args[5:7]), ir.VectorType(_I16, 4).as_pointer()
        )
        steps = widen(builder, builder.load(pointer, align=2))
        size, middle, common = (_four_times(builder, x) for x in (size, middle, common))
        centred = builder.fsub(builder.sitofp(whole, steps.type), middle)
        result = builder.fmul(size, builder.fadd(common, builder.fmul(steps, centred)))
        target = builder.bitcast(pointer_to(context, builder, s, args), result.type.as_pointer())
        builder.store(result, target, align=4)
        return context.get_dummy_value()

    f32 = types.float32
    return types.none(s, types.intp, f32, four, f32, step, types.intp, f32), build


def _add_pairs(builder: Any, x: Value, y: Value) -> Value:
    """Per four lanes: x0 + x2, y0 + y2, x1 + x3, y1 + y3."""
    lanes = range(0, LANES, 4)
    first = [lane for i in lanes for lane in (i, i + LANES, i + 1, i + 1 + LANES)]
    return builder.add(_shuffle(builder, x, y, first), _shuffle(builder, x, y, [lane + 2 for lane in first]))


def _four_times(builder: Any, x: Value) -> Value:
    empty = ir.Constant(ir.VectorType(ir.FloatType(), 4), ir.Undefined)
    return _shuffle(builder, builder.insert_element(empty, x, _I32(0)), empty, [0] * 4)


def _shuffle(builder: Any, a: Value, b: Value, lanes: Iterable[int]) -> Value:
    chosen = list(lanes)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(chosen)), chosen))


def _load(context: Any, builder: Any, kind: Any, args: Any, target: Any) -> Value:
    return builder.load(builder.bitcast(pointer_to(context, builder, kind, args), target.as_pointer()), align=1)


def _splat(builder: Any, word: Value) -> Value:
    empty = ir.Constant(INTS, ir.Undefined)
    first = builder.insert_element(empty, word, _I32(0))
    return builder.shuffle_vector(first, empty, ir.Constant(INTS, [0] * LANES))
