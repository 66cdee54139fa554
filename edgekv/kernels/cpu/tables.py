"""Signed sums looked up: four sign bits choose one of 16 entries of a table, many tokens at a time.

A block of 64 tokens is stored in four groups of 16, so ordered that the sums come out in order: token t lies in
group t % 16 // 4, at byte 4 * (t % 4) + (0, 2, 1, 3)[t // 16]. A vector holds COLUMNS times 16 bytes: of COLUMNS
neighbouring bytes of the keys' planes, those of 16 tokens each. The table of a byte's lower four bits and that of
its upper four bits lie COLUMNS to a vector, too, so that one shuffle within 16 bytes, which nearly every processor
has, looks 16 tokens up in each.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from edgekv.kernels.cpu import arm
from edgekv.kernels.cpu.half import widen
from edgekv.kernels.cpu.jit import CPU_FEATURES, intrinsic
from edgekv.kernels.cpu.scalar import pointer_to

GROUP = 16  # tokens
COLUMNS = 4 if "+avx512bw" in CPU_FEATURES else 2 if "+avx2" in CPU_FEATURES else 1
VECTOR = COLUMNS * GROUP  # bytes

Value = Any  # an llvmlite value
Sums = Any  # of GROUP tokens, inside a kernel

_I8, _I16, _I32 = (ir.IntType(n_bits) for n_bits in (8, 16, 32))
_BYTES, _PAIRS = ir.VectorType(_I8, VECTOR), ir.VectorType(_I16, VECTOR // 2)
_BOTH = ir.LiteralStructType([_PAIRS, _PAIRS])
_TOKENS, _WHOLE = ir.VectorType(ir.FloatType(), GROUP), ir.VectorType(_I32, GROUP)


class _SumsType(types.Type):  # type: ignore[misc]
    """Sums in 16 bits: those of a vector's even bytes (with the odd ones' above them), and of its odd bytes."""

    def __init__(self) -> None:
        super().__init__("table sums")


sums = _SumsType()


@register_model(_SumsType)
class _SumsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _BOTH)


@intrinsic
def none(context: Any) -> Any:
    """Sums of 0."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_BOTH, [[0] * (VECTOR // 2)] * 2)

    return sums(), build


@intrinsic
def twice(context: Any, a: Any) -> Any:
    """Sums doubled."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, second = _parts(builder, args[0])
        return _both(builder, builder.add(first, first), builder.add(second, second))

    return sums(sums), build


@intrinsic
def add_entries(context: Any, tables: Any, table: Any, codes: Any, code: Any, so_far: Any) -> Any:
    """Adds the entries, at most 127 each, that bytes code.. of flat `codes` choose from the two at table.."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = _load(builder, codes, args[2:4])
        lower, upper = builder.and_(x, _fill(_BYTES, 15)), builder.lshr(x, _fill(_BYTES, 4))
        behind = builder.add(args[1], args[1].type(VECTOR))
        entries = builder.add(
            _look_up(builder, _load(builder, tables, args[:2]), lower),
            _look_up(builder, _load(builder, tables, (args[0], behind)), upper),
        )
        return _add_bytes(builder, entries, args[4])

    return sums(tables, types.intp, codes, types.intp, sums), build


@intrinsic
def store_table(context: Any, x: Any, i: Any, tables: Any, table: Any) -> Any:
    """tables[table + k] = 64 + the sum of x[i + j], times -1 where bit j of k is 0; k is 0 to 15, j is 0 to 3.

    x are odd halves whose sums are at most 63.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(_I16, 16)
        total = _fill(kind, 2 * 64)
        for j in range(4):
            one = builder.load(pointer_to(context, builder, x, (args[0], builder.add(args[1], args[1].type(j)))))
            twice = builder.fptosi(builder.fadd(one, one), _I16)  # odd; half of it is added or subtracted
            wide = _shuffle(
                builder, builder.insert_element(_fill(kind, 0), twice, _I32(0)), _fill(kind, 0), [0] * 16
            )
            signs = ir.Constant(kind, [1 if k >> j & 1 else -1 for k in range(16)])
            total = builder.add(total, builder.mul(wide, signs))
        entries = builder.trunc(builder.lshr(total, _fill(kind, 1)), ir.VectorType(_I8, 16))
        pointer = builder.bitcast(pointer_to(context, builder, tables, args[2:]), entries.type.as_pointer())
        builder.store(entries, pointer, align=1)
        return context.get_dummy_value()

    return types.none(x, types.intp, tables, types.intp), build


@intrinsic
def store_scores(
    context: Any, s: Any, i: Any, totals: Any, less: Any, factor: Any, scale: Any, token: Any, base: Any, at: Any
) -> Any:
    """s[i + t] = base[at + t // 16] + factor * scale[token + t] * (totals of token t - less) for 64 tokens t.

    totals: those of the block's four groups; each, less ``less``, fits 16 bits with a sign. scale: float16 bits.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start, at = args[7:9]
        for part, product in enumerate(_products(builder, args[2:5], scale, args[5:7])):
            one = builder.load(pointer_to(context, builder, base, (start, builder.add(at, at.type(part)))))
            pointer = _scores(builder, s, args, part)
            builder.store(builder.fadd(_splat(builder, one), product, flags=("contract",)), pointer, align=4)
        return context.get_dummy_value()

    four = types.UniTuple(sums, 4)
    numbers = types.int64, types.float32
    return types.none(s, types.intp, four, *numbers, scale, types.intp, base, types.intp), build


@intrinsic
def add_scores(context: Any, s: Any, i: Any, totals: Any, less: Any, factor: Any, scale: Any, token: Any) -> Any:
    """s[i + t] += factor * scale[token + t] * (totals of token t - less) for 64 tokens t, as `store_scores`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for part, product in enumerate(_products(builder, args[2:5], scale, args[5:7])):
            pointer = _scores(builder, s, args, part)
            so_far = builder.load(pointer, align=4)
            builder.store(builder.fadd(so_far, product, flags=("contract",)), pointer, align=4)
        return context.get_dummy_value()

    numbers = types.int64, types.float32
    return types.none(s, types.intp, types.UniTuple(sums, 4), *numbers, scale, types.intp), build


def _products(builder: Any, numbers: Any, scale: Any, where: Any) -> list[Value]:
    """factor * scale * (totals - less): four times 16 tokens."""
    totals, less, factor = numbers
    parts = [_parts(builder, builder.extract_value(totals, i)) for i in range(4)]
    even = [builder.sub(first, builder.shl(second, _fill(_PAIRS, 8))) for first, second in parts]
    odd = [second for _, second in parts]
    less, sixteen, upper = _splat_ints(builder, less), _fill(_WHOLE, 16), _fill(_WHOLE, 0xFFFF0000)
    whole = []  # in the upper 16 bits
    for groups in (even, odd):
        x = builder.bitcast(builder.sub(_sum_columns(builder, groups), less), _WHOLE)
        whole += [builder.shl(x, sixteen), builder.and_(x, upper)]
    factor = _splat(builder, builder.fmul(factor, factor.type(2.0**-16)))
    pointer = builder.bitcast(pointer_to(None, builder, scale, where), ir.VectorType(_I16, GROUP).as_pointer())
    halves = (builder.load(builder.gep(pointer, [_I32(i)]), align=2) for i in range(4))
    widths = (builder.fmul(widen(builder, x), factor) for x in halves)
    pairs = zip(widths, whole, strict=True)
    return [builder.fmul(width, builder.sitofp(x, _TOKENS), flags=("contract",)) for width, x in pairs]


def _sum_columns(builder: Any, groups: list[Value]) -> Value:
    """Of four groups' sums of 8 tokens in each of COLUMNS columns: those of all columns, group after group."""
    while len(groups) > 4 // COLUMNS:
        pairs = zip(groups[::2], groups[1::2], strict=True)
        groups = [builder.add(*(_every_other(builder, x, y, i) for i in (0, 1))) for x, y in pairs]
    while len(groups) > 1:
        pairs = zip(groups[::2], groups[1::2], strict=True)
        groups = [_shuffle(builder, x, y, range(2 * x.type.count)) for x, y in pairs]
    return groups[0]


def _every_other(builder: Any, x: Value, y: Value, first: int) -> Value:
    """Columns first, first + 2, ... of x, then of y."""
    columns = range(first, 2 * COLUMNS, 2)
    return _shuffle(builder, x, y, [8 * column + i for column in columns for i in range(8)])


def _scores(builder: Any, s: Any, args: Any, part: int) -> Value:
    pointer = builder.bitcast(pointer_to(None, builder, s, args), _TOKENS.as_pointer())
    return builder.gep(pointer, [_I32(part)])


def _add_bytes(builder: Any, entries: Value, so_far: Value) -> Value:
    first, second = _parts(builder, so_far)
    pairs = builder.bitcast(entries, _PAIRS)  # the even bytes' sums have the odd ones' above, until `_products`
    odd = builder.lshr(pairs, _fill(_PAIRS, 8))
    return _both(builder, builder.add(first, pairs), builder.add(second, odd))


def _look_up(builder: Any, table: Value, index: Value) -> Value:
    """table[16 * k + index] for each byte of 16 bytes k."""
    name = {
        (False, 64): "llvm.x86.avx512.pshuf.b.512",
        (False, 32): "llvm.x86.avx2.pshuf.b",
        (False, 16): "llvm.x86.ssse3.pshuf.b.128" if "+ssse3" in CPU_FEATURES else "",
        (True, 16): "llvm.aarch64.neon.tbl1.v16i8",
    }[arm.IS_ARM, VECTOR]
    if not name:
        return _look_up_one_by_one(builder, table, index)
    kind = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [table, index])


def _look_up_one_by_one(builder: Any, table: Value, index: Value) -> Value:
    result = ir.Constant(_BYTES, ir.Undefined)
    for i in range(VECTOR):
        entry = builder.extract_element(table, builder.extract_element(index, _I32(i)))
        result = builder.insert_element(result, entry, _I32(i))
    return result


def _load(builder: Any, kind: Any, where: Any) -> Value:
    pointer = builder.bitcast(pointer_to(None, builder, kind, where), _BYTES.as_pointer())
    return builder.load(pointer, align=1)


def _splat(builder: Any, x: Value) -> Value:
    empty = ir.Constant(_TOKENS, ir.Undefined)
    return _shuffle(builder, builder.insert_element(empty, x, _I32(0)), empty, [0] * GROUP)


def _splat_ints(builder: Any, x: Value) -> Value:
    empty = ir.Constant(ir.VectorType(_I16, 32), ir.Undefined)
    return _shuffle(builder, builder.insert_element(empty, builder.trunc(x, _I16), _I32(0)), empty, [0] * 32)


def _fill(kind: Any, constant: int) -> Value:
    return ir.Constant(kind, [constant] * kind.count)


def _shuffle(builder: Any, a: Value, b: Value, lanes: Any) -> Value:
    lanes = list(lanes)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _parts(builder: Any, both: Value) -> tuple[Value, Value]:
    return builder.extract_value(both, 0), builder.extract_value(both, 1)


def _both(builder: Any, first: Value, second: Value) -> Value:
    empty = ir.Constant(_BOTH, ir.Undefined)
    return builder.insert_value(builder.insert_value(empty, first, 0), second, 1)
