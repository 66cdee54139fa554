"""Explicit vectors of LANES float32 for Numba kernels.

A loop over a few vectors with sums in registers is what LLVM rarely makes of a plain loop over small rows: it
re-checks for overlapping arrays at every row, and on Arm it gave up on 4-bit values. These vectors are split
into what the processor has (one AVX-512 register, two of NEON), so the same kernel serves all.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from edgekv.kernels.cpu import arm
from edgekv.kernels.cpu.compile import CPU_FEATURES, intrinsic
from edgekv.kernels.cpu.scalar import pointer_to, widen

LANES = 16 if "+avx512f" in CPU_FEATURES else 8

Vector = Any  # LANES float32 inside a kernel

_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), *(ir.IntType(n_bits) for n_bits in (8, 16, 32, 64))
_VECTOR, _INTS, _WORDS = (ir.VectorType(kind, LANES) for kind in (_F32, _I32, _I64))
_COUNTS = arm.counts_type(LANES) if arm.IS_ARM else _WORDS


class _VectorType(types.Type):  # type: ignore[misc]
    def __init__(self, element: str) -> None:
        super().__init__(f"{element}x{LANES}")


vector, counts = _VectorType("float32"), _VectorType("uint64")


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR if kind == vector else _COUNTS)


@intrinsic
def load(context: Any, array: Any, index: Any) -> Any:
    """Elements index.. of a flat float32 array, or of a uint16 array of float16 bits."""
    element = {types.float32: _F32, types.uint16: _I16}[array.dtype]

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _load(context, builder, signature, args, element)
        return value if element is _F32 else widen(builder, value)

    return vector(array, types.intp), build


@intrinsic
def load_signs(context: Any, array: Any, index: Any) -> Any:
    """Bit j is 1 where element index + j of a flat float32 array is >= 0; uint64."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _load(context, builder, signature, args, _F32)
        bits = builder.fcmp_ordered(">=", value, ir.Constant(_VECTOR, [0.0] * LANES))
        return builder.zext(builder.bitcast(bits, ir.IntType(LANES)), _I64)

    return types.uint64(array, types.intp), build


@intrinsic
def store(context: Any, array: Any, index: Any, value: Any) -> Any:
    """Writes a vector to elements index.. of a flat float32 array."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(context, builder, array, args, _VECTOR), align=4)
        return context.get_dummy_value()

    return types.none(array, types.intp, vector), build


@intrinsic
def splat(context: Any, x: Any) -> Any:
    """A vector with the same float32 in every lane."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, args[0], _VECTOR)

    return vector(types.float32), build


@intrinsic
def broadcast(context: Any, array: Any, index: Any) -> Any:
    """A vector with element `index` of a flat float32 array in every lane."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = builder.load(_pointer(context, builder, array, args, _F32))
        return _splat(builder, element, _VECTOR)

    return vector(array, types.intp), build


@intrinsic
def multiply_add(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, fused where the processor can."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = builder.fmul(args[0], args[1], flags=("contract",))
        return builder.fadd(product, args[2], flags=("contract",))

    return vector(vector, vector, vector), build


@intrinsic
def add(context: Any, a: Any, b: Any) -> Any:
    """a + b."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return vector(vector, vector), build


@intrinsic
def multiply(context: Any, a: Any, b: Any) -> Any:
    """a * b."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return vector(vector, vector), build


@intrinsic
def add_where(context: Any, planes: Any, index: Any, x: Any, so_far: Any) -> Any:
    """so_far + x in the lanes whose bits are 1, so_far in the others: LANES bits of bytes index.. of `planes`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.load(_pointer(context, builder, planes, args, ir.IntType(LANES)), align=1)
        if LANES == 16:  # AVX-512 has registers for them
            chosen = builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))
        else:
            each = ir.Constant(_INTS, [1 << lane for lane in range(LANES)])
            tested = builder.and_(_splat(builder, builder.zext(bits, _I32), _INTS), each)
            chosen = builder.icmp_unsigned("!=", tested, ir.Constant(_INTS, [0] * LANES))
        return builder.select(chosen, builder.fadd(args[3], args[2]), args[3])

    return vector(planes, types.intp, vector, vector), build


@intrinsic
def total(context: Any, a: Any) -> Any:
    """The sum of all lanes, float32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_F32, [_F32, _VECTOR])
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        reduce = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(reduce, [_F32(-0.0), args[0]], fastmath=("reassoc",))

    return types.float32(vector), build


@intrinsic
def no_counts(context: Any) -> Any:
    """LANES counts of 0."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_COUNTS, [0] * _COUNTS.count)

    return counts(), build


@intrinsic
def count_differing(context: Any, word: Any, array: Any, index: Any, so_far: Any) -> Any:
    """Adds to each count the bits in which `word` differs from a word of a flat uint64 array, from index on."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = builder.load(_pointer(context, builder, array, args[1:], _WORDS), align=8)
        differing = builder.xor(words, _splat(builder, args[0], _WORDS))
        if arm.IS_ARM:
            return arm.add_counts(builder, differing, args[3])
        kind = ir.FunctionType(_WORDS, [_WORDS])
        ones = cgutils.get_or_insert_function(builder.module, kind, f"llvm.ctpop.v{LANES}i64")
        return builder.add(builder.call(ones, [differing]), args[3])

    return counts(types.uint64, array, types.intp, counts), build


@intrinsic
def as_vector(context: Any, a: Any) -> Any:
    """Counts as float32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = arm.total_counts(builder, args[0]) if arm.IS_ARM else builder.trunc(args[0], _INTS)
        return builder.sitofp(whole, _VECTOR)

    return vector(counts), build


@intrinsic
def prefetch(context: Any, array: Any, index: Any) -> Any:
    """Asks for the cache line of element `index`, which may lie beyond the array's end."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, array, args, _I8)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(function, [pointer, _I32(0), _I32(3), _I32(1)])  # for reading, all levels, data
        return context.get_dummy_value()

    return types.none(array, types.intp), build


def _load(context: Any, builder: Any, signature: Any, args: Any, element: Any) -> Any:
    pointer = _pointer(context, builder, signature.args[0], args, ir.VectorType(element, LANES))
    return builder.load(pointer, align=signature.args[0].dtype.bitwidth // 8)


def _pointer(context: Any, builder: Any, array: Any, args: Any, target: Any) -> Any:
    """Pointer to element args[1] of args[0], of the type `array`, seen as `target`."""
    return builder.bitcast(pointer_to(context, builder, array, args), target.as_pointer())


def _splat(builder: Any, x: Any, kind: Any) -> Any:
    empty = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(empty, x, _I32(0))
    return builder.shuffle_vector(first, empty, ir.Constant(_INTS, [0] * LANES))
