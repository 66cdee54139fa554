"""Helpers that write LLVM's instructions: the vocabulary of all inner loops that are an `intrinsic`.

A loop of plain Numba passes through type inference and a dozen small functions; emitted by llvmlite's builder it
compiles in a fraction of the time, unrolls what the kernel says and keeps its sums in registers. Addresses and
sizes are values of 64 bits, offsets are bytes. Functions take the builder first; what they return is a value of
the compiled program, not yet a number.
"""

import functools
import inspect
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config

from edgekv.kernels.cpu.compile import CPU_FEATURES, intrinsic
from edgekv.kernels.cpu.scalar import pointer_to

Value = Any  # an llvmlite value
Kind = Any  # an llvmlite type
I8, I16, I32, I64 = (ir.IntType(n_bits) for n_bits in (8, 16, 32, 64))
F32 = ir.FloatType()
_VOID = ir.VoidType()
IS_ARM = platform.machine() == "aarch64"
# float32 in one register: of AVX-512 with its products of bytes, of AVX2, or of Arm and of any other x86.
REGISTER = 16 if "+avx512bw" in CPU_FEATURES else 8 if "+avx2" in CPU_FEATURES else 4
LANES = 16 if REGISTER == 16 else 8  # float32 that are worked on side by side
FEW_REGISTERS = not (IS_ARM or REGISTER == 16)  # 16 of them, where others have 32
LINE = 64
CONTRACT, ANY_ORDER, NOT_NAN = ("contract",), ("reassoc",), ("nnan", "nsz")


def integer(n_bits: int) -> Kind:
    """Returns the type of whole numbers of so many bits."""
    return ir.IntType(n_bits)


def vector(kind: Kind, n: int) -> Kind:
    """Returns the type of n numbers of a kind side by side."""
    return ir.VectorType(kind, n)


def like(x: Value, element: Kind) -> Kind:
    """Returns the type ``element``, or a vector of as many as x has."""
    return vector(element, x.type.count) if isinstance(x.type, ir.VectorType) else element


def constant(kind: Kind, x: float) -> Value:
    """Returns the constant x of a type, in every lane of a vector."""
    return ir.Constant(kind, [x] * kind.count if isinstance(kind, ir.VectorType) else x)


def address(context: Any, builder: Any, array: Any, args: Sequence[Value]) -> Value:
    """Returns the address of element args[1] of args[0], whose Numba type is ``array``: an array, or a pointer."""
    return builder.ptrtoint(pointer_to(context, builder, array, args), I64)


def at(builder: Any, start: Value, *offsets: Value | int | tuple[Value | int, ...]) -> Value:
    """Returns the address ``start`` + the offsets in bytes; a tuple is the product of its factors."""
    for offset in offsets:
        factors = offset if isinstance(offset, tuple) else (offset,)
        constant_part = math.prod(factor for factor in factors if isinstance(factor, int))
        values = [factor for factor in factors if not isinstance(factor, int)]
        if constant_part != 1 or not values:
            values.append(I64(constant_part))
        start = builder.add(start, functools.reduce(builder.mul, values)) if constant_part else start
    return start


def min_int(builder: Any, x: Value, y: Value | int) -> Value:
    """Returns the smaller of two whole numbers of 64 bits."""
    y = I64(y) if isinstance(y, int) else y
    return builder.select(builder.icmp_signed("<", x, y), x, y)


def load(builder: Any, kind: Kind, address: Value, offset: int = 0) -> Value:
    """Returns the number or vector ``offset`` bytes behind an address, which need not be aligned."""
    return builder.load(_pointer(builder, kind, address, offset), align=1)


def store(builder: Any, x: Value, address: Value, offset: int = 0) -> None:
    """Stores x, a number or vector, ``offset`` bytes behind an address, which need not be aligned."""
    builder.store(x, _pointer(builder, x.type, address, offset), align=1)


def masked_load(builder: Any, kind: Kind, address: Value, offset: int, n: Value | None, width: int = 1) -> Value:
    """Returns a vector ``offset`` bytes behind an address; with n only n * width lanes are read, others are 0."""
    if n is None:
        return load(builder, kind, address, offset)
    pointer, mask = _pointer(builder, kind, address, offset), _first_lanes(builder, kind, n, width)
    name = f"llvm.masked.load.{_name(kind)}.p0"
    return call(builder, name, kind, pointer, I32(1), mask, constant(kind, 0))


def masked_store(builder: Any, x: Value, address: Value, offset: int, n: Value | None) -> None:
    """Stores a vector ``offset`` bytes behind an address; with n its first n lanes alone."""
    if n is None:
        store(builder, x, address, offset)
        return
    pointer, mask = _pointer(builder, x.type, address, offset), _first_lanes(builder, x.type, n, 1)
    call(builder, f"llvm.masked.store.{_name(x.type)}.p0", _VOID, x, pointer, I32(1), mask)


def _first_lanes(builder: Any, kind: Kind, n: Value, width: int) -> Value:
    """Returns a mask: true in the first n * width lanes."""
    end = splat(builder, builder.trunc(builder.mul(n, I64(width)), I32), kind.count)
    return builder.icmp_signed("<", ir.Constant(vector(I32, kind.count), list(range(kind.count))), end)


def _name(kind: Kind) -> str:
    """Returns a vector type as LLVM's intrinsics have it in their names."""
    return f"v{kind.count}" + ("f32" if kind.element == F32 else f"i{kind.element.width}")


def prefetch(builder: Any, address: Value, n_bytes: int, locality: int = 3) -> None:
    """Fetches the cache lines from any address on; locality 3: to all caches, 2: to all but the first."""
    for offset in range(0, n_bytes, LINE):
        pointer = _pointer(builder, I8, address, offset)
        kind = ir.FunctionType(_VOID, [pointer.type, I32, I32, I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(function, [pointer, I32(0), I32(locality), I32(1)])  # for reading; data


def splat(builder: Any, x: Value, n: int) -> Value:
    """Returns a vector of n times the number x."""
    empty = ir.Constant(vector(x.type, n), ir.Undefined)
    return shuffle(builder, builder.insert_element(empty, x, I32(0)), [0] * n)


def shuffle(builder: Any, x: Value, which: Sequence[int], y: Value | None = None) -> Value:
    """Returns a vector of the lanes ``which`` of x, and of y behind it."""
    other = ir.Constant(x.type, ir.Undefined) if y is None else y
    return builder.shuffle_vector(x, other, ir.Constant(vector(I32, len(which)), list(which)))


def multiply_add(builder: Any, a: Value, b: Value, c: Value) -> Value:
    """Returns a * b + c, fused where the processor can."""
    return builder.fadd(builder.fmul(a, b, flags=CONTRACT), c, flags=CONTRACT)


def subtract(builder: Any, a: Value, b: Value) -> Value:
    """Returns a - b, which LLVM must not reorder: without a flag it would get those of the compiled function."""
    return builder.fsub(a, b, flags=CONTRACT)


def maximum(builder: Any, a: Value, b: Value) -> Value:
    """Returns the larger of two numbers, or of two vectors lane by lane; none of them NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b, flags=NOT_NAN), a, b, flags=NOT_NAN)


def reduce(builder: Any, operation: Any, xs: Sequence[Value]) -> Value:
    """Returns operation(builder, a, b) over all of xs, as a balanced tree."""
    xs = list(xs)
    while len(xs) > 1:
        xs = [operation(builder, *xs[i : i + 2]) if i + 1 < len(xs) else xs[i] for i in range(0, len(xs), 2)]
    return xs[0]


def reduce_max(builder: Any, x: Value) -> Value:
    """Returns the largest of the float32 lanes of x, none of them NaN."""
    return call(builder, f"llvm.vector.reduce.fmax.v{x.type.count}f32", F32, x, flags=NOT_NAN)


def reduce_sum(builder: Any, x: Value) -> Value:
    """Returns the sum of a vector's lanes."""
    if x.type.element == F32:
        return call(builder, f"llvm.vector.reduce.fadd.v{x.type.count}f32", F32, F32(-0.0), x, flags=ANY_ORDER)
    return call(builder, f"llvm.vector.reduce.add.v{x.type.count}i32", I32, x)


def lane_sums(builder: Any, xs: Sequence[Value]) -> Value:
    """Returns the sum of each of one, two or four vectors' lanes: a number, or a vector of them."""
    while len(xs) > 1 and xs[0].type.count > REGISTER:
        half = xs[0].type.count // 2
        xs = [add(builder, *(shuffle(builder, x, range(i, i + half)) for i in (0, half))) for x in xs]
    if len(xs) != 2:
        return reduce_lanes(builder, add, xs)
    sums = reduce_registers(builder, add, _pairwise(builder, add, *xs))
    return add(builder, shuffle(builder, sums, (0, 2)), shuffle(builder, sums, (1, 3)))


def reduce_lanes(builder: Any, operation: Any, xs: Sequence[Value]) -> Value:
    """Returns `add` or `maximum` over the lanes of one vector, a number, or of each of four, a vector."""
    if len(xs) == 1:
        return (reduce_max if operation is maximum else reduce_sum)(builder, xs[0])
    return reduce_registers(builder, operation, reduce_fours(builder, operation, xs))


def reduce_fours(builder: Any, operation: Any, xs: Sequence[Value]) -> Value:
    """Returns a vector: in each 128 bits the operation over the four lanes there of each of four vectors."""
    return _pairwise(builder, operation, *(_pairwise(builder, operation, *xs[i : i + 2]) for i in (0, 2)))


def reduce_registers(builder: Any, operation: Any, x: Value) -> Value:
    """Returns four lanes: the operation over all 128 bits of x."""
    return reduce(builder, operation, [shuffle(builder, x, range(i, i + 4)) for i in range(0, x.type.count, 4)])


def add(builder: Any, x: Value, y: Value) -> Value:
    """Returns x + y, vectors of whole numbers or of float32."""
    return builder.fadd(x, y) if x.type.element == F32 else builder.add(x, y)


def concatenate(builder: Any, x: Value, y: Value) -> Value:
    """Returns the lanes of x, then those of y."""
    return shuffle(builder, x, range(2 * x.type.count), y)


def build_vector(builder: Any, xs: Sequence[Value]) -> Value:
    """Returns a vector of numbers."""
    result = ir.Constant(vector(xs[0].type, len(xs)), ir.Undefined)
    for i, x in enumerate(xs):
        result = builder.insert_element(result, x, I32(i))
    return result


def _pairwise(builder: Any, operation: Any, x: Value, y: Value) -> Value:
    """Returns in each 128 bits the operation on both pairs of x's lanes, then of y's."""
    n = x.type.count
    if IS_ARM and operation is add:
        name = "llvm.aarch64.neon.faddp.v4f32" if x.type.element == F32 else "llvm.aarch64.neon.addp.v4i32"
        return call(builder, name, x.type, x, y)
    first = [i + j for i in range(0, n, 4) for j in (0, 2, n, n + 2)]
    return operation(builder, shuffle(builder, x, first, y), shuffle(builder, x, [i + 1 for i in first], y))


SUM_OF_PRODUCTS = """
define i32 @f(<16 x i8> %a, <16 x i8> %b) {
  %x = zext <16 x i8> %a to <16 x i32>
  %y = zext <16 x i8> %b to <16 x i32>
  %z = mul <16 x i32> %x, %y
  %s = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %z)
  ret i32 %s
}
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""


@functools.cache
def has_dot() -> bool:
    """Returns whether LLVM multiplies bytes in dot products for the Arm processor that Numba compiles for.

    On Linux the processor's name tells it; LLVM's list of features never does.
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    name = config.CPU_NAME or binding.get_host_cpu_name()
    machine = target.create_target_machine(cpu=name, features=CPU_FEATURES, opt=3)
    return "udot" in machine.emit_assembly(binding.parse_assembly(SUM_OF_PRODUCTS))


HAS_VNNI = ("+avx512vnni" if LANES == 16 else "+avxvnni") in CPU_FEATURES
HAS_VBMI = "+avx512vbmi" in CPU_FEATURES.split(",")
SUMS_PAIRS_IN_16_BITS = not (IS_ARM or HAS_VNNI or REGISTER == 4)
"""Whether `add_products` sums two products in 16 bits, where they must fit."""


def add_products(builder: Any, a: Value, b: Value, acc: Value, sign: str) -> Value:
    """Returns ``acc`` (int32) + four products of the bytes of ``a`` and ``b`` in each lane.

    Arm takes both unsigned (sign "u") or both signed ("s"); x86 takes a as unsigned and b as signed. The bytes of
    one of them are at most 127.
    """
    if IS_ARM:
        write = functools.partial(_dot if has_dot() else _add_pairs, builder, sign)
        return by_register(builder, write, a, b, acc)
    kind = acc.type
    if HAS_VNNI:
        return call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * kind.count}", kind, acc, a, b)
    if SUMS_PAIRS_IN_16_BITS:
        in_bytes, in_words = vector(I8, 4 * kind.count), vector(I16, 2 * kind.count)
        twos, fours = {
            8: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
            16: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
        }[kind.count]
        pairs = call(builder, twos, in_words, builder.bitcast(a, in_bytes), builder.bitcast(b, in_bytes))
        return builder.add(acc, call(builder, fours, kind, pairs, constant(in_words, 1)))
    for shift in range(0, 32, 8):  # x86 without AVX2
        x = builder.and_(builder.lshr(a, constant(kind, shift)), constant(kind, 255))
        y = builder.ashr(builder.shl(b, constant(kind, 24 - shift)), constant(kind, 24))
        acc = builder.add(acc, builder.mul(x, y))
    return acc


def _dot(builder: Any, sign: str, a: Value, b: Value, acc: Value) -> Value:
    a, b = builder.bitcast(a, vector(I8, 16)), builder.bitcast(b, vector(I8, 16))
    return call(builder, f"llvm.aarch64.neon.{sign}dot.v4i32.v16i8", vector(I32, 4), acc, a, b)


def _add_pairs(builder: Any, sign: str, a: Value, b: Value, acc: Value) -> Value:
    """Returns what `_dot` does, without dot products: sums in 16 bits, where two products have room."""
    a, b = builder.bitcast(a, vector(I8, 16)), builder.bitcast(b, vector(I8, 16))
    products = []
    for half in (range(8), range(8, 16)):
        low, high = shuffle(builder, a, half), shuffle(builder, b, half)
        products.append(call(builder, f"llvm.aarch64.neon.{sign}mull.v8i16", vector(I16, 8), low, high))
    pairs = call(builder, "llvm.aarch64.neon.addp.v8i16", vector(I16, 8), *products)
    return builder.add(acc, call(builder, f"llvm.aarch64.neon.{sign}addlp.v4i32.v8i16", vector(I32, 4), pairs))


# By float32 in a register: the instruction that looks bytes up in a table within 16 bytes.
_LOOK_UP = {
    16: "llvm.x86.avx512.pshuf.b.512",
    8: "llvm.x86.avx2.pshuf.b",
    4: "llvm.aarch64.neon.tbl1.v16i8" if IS_ARM else "",
}[REGISTER]


def look_up(builder: Any, table: Value, index: Value) -> Value:
    """Returns entry i of ``table`` for each byte i, 0 to 15, of ``index``: byte vectors.

    The table has 16 entries, or for each 16 bytes of ``index`` other ones.
    """
    n = index.type.count
    if table.type.count < n:
        table = shuffle(builder, table, list(range(16)) * (n // 16))
    if _LOOK_UP and n > 4 * REGISTER:
        return by_register(builder, functools.partial(look_up, builder), table, index)
    if _LOOK_UP:
        return call(builder, _LOOK_UP, index.type, table, index)
    result = index  # x86 without AVX2: one by one
    for i in range(n):
        lane = builder.add(builder.zext(builder.extract_element(index, I32(i)), I32), I32(i // 16 * 16))
        result = builder.insert_element(result, builder.extract_element(table, lane), I32(i))
    return result


def look_up_entries(builder: Any, entries: Sequence[int], index: Value) -> Value:
    """Returns entry i, of a power of two entries, at most 64, for each byte i of ``index``."""
    kind, n = index.type, len(entries)
    if n <= 16:
        return look_up(builder, ir.Constant(vector(I8, 16), list(entries) * (16 // n)), index)
    if HAS_VBMI and kind.count == 64:
        table = ir.Constant(kind, list(entries) * (64 // n))
        return call(builder, "llvm.x86.avx512.permvar.qi.512", kind, table, index)
    if IS_ARM:
        tables = [ir.Constant(vector(I8, 16), list(entries[i : i + 16])) for i in range(0, n, 16)]
        name = f"llvm.aarch64.neon.tbl{len(tables)}.v16i8"
        return by_register(builder, lambda x: call(builder, name, x.type, *tables, x), index)
    low = builder.and_(index, constant(kind, n // 2 - 1))
    is_high = builder.icmp_signed("!=", builder.and_(index, constant(kind, n // 2)), constant(kind, 0))
    halves = (look_up_entries(builder, half, low) for half in (entries[n // 2 :], entries[: n // 2]))
    return builder.select(is_high, *halves)


def by_register(builder: Any, operation: Callable[..., Value], *vectors: Value) -> Value:
    """Returns the operation on each 128 bits of the vectors, side by side."""
    n_registers = vectors[0].type.count * vectors[0].type.element.width // 128
    results = []
    for register in range(n_registers):
        parts = []
        for x in vectors:
            n = x.type.count // n_registers
            parts.append(shuffle(builder, x, range(register * n, (register + 1) * n)))
        results.append(operation(*parts))
    return reduce(builder, concatenate, results)


def call(builder: Any, name: str, kind: Kind, *args: Value, flags: Sequence[str] = ()) -> Value:
    """Calls a function by name, an LLVM intrinsic say, that returns ``kind``."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [x.type for x in args]), name)
    return builder.call(function, args, fastmath=flags)


def procedure(write: Callable[..., None]) -> Callable[..., Any]:
    """Makes write(builder, *values) an intrinsic: kernels call it with whole numbers, addresses among them."""
    names = list(inspect.signature(write).parameters)

    def define(context: Any, *args: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            write(builder, *values)
            return context.get_dummy_value()

        return types.none(*[types.intp] * len(args)), build

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    define.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in ("context", *names[1:])]
    )
    define.__name__ = write.__name__
    return intrinsic(define)


@intrinsic
def prefetch_element(context: Any, array: Any, index: Any) -> Any:
    """Fetches the cache line of element ``index``, which may lie beyond the array's end."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(builder, address(context, builder, array, args), 1)
        return context.get_dummy_value()

    return types.none(array, types.intp), build


class Iteration:
    """A pass of a `loop`: its counter i, loop-carried values, and those for the next pass."""

    def __init__(self, i: Value, values: list[Value]) -> None:
        self.i, self.values, self.next = i, values, values


@contextmanager
def loop(
    builder: Any, start: Value | int, stop: Value | int, step: int, values: Sequence[Value] = ()
) -> Iterator[Iteration]:
    """Writes a loop: the body runs for start, start + step, ... as long as a whole step fits below stop.

    ``values`` are those before the first pass; after the loop, the iteration's values are those after the last.
    """
    start, stop = (I64(end) if isinstance(end, int) else end for end in (start, stop))
    head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    before = builder.block
    builder.branch(head)
    builder.position_at_end(head)
    phis = [builder.phi(x.type) for x in (start, *values)]
    iteration = Iteration(phis[0], phis[1:])
    following = builder.add(iteration.i, I64(step))
    builder.cbranch(builder.icmp_signed("<=", following, stop), body, after)
    builder.position_at_end(body)
    yield iteration
    for phi, first, then in zip(phis, (start, *values), (following, *iteration.next), strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(then, builder.block)
    builder.branch(head)
    builder.position_at_end(after)


def branch(
    builder: Any, condition: Value, make: Callable[[], Sequence[Value]], otherwise: Callable[[], Sequence[Value]]
) -> list[Value]:
    """Returns what ``make`` returns if the condition holds, else what ``otherwise`` does, by a branch."""
    ways: list[tuple[Sequence[Value], Any]] = []
    with builder.if_else(condition) as both:
        for way, write in zip(both, (make, otherwise), strict=True):
            with way:
                ways.append((write(), builder.block))
    chosen = []
    for i, x in enumerate(ways[0][0]):
        phi = builder.phi(x.type)
        for values, block in ways:
            phi.add_incoming(values[i], block)
        chosen.append(phi)
    return chosen


def call_internal(
    builder: Any,
    name: str,
    write: Callable[..., Value | None],
    *args: Value | tuple[Value, ...],
    result: Kind = _VOID,
) -> Value:
    """Calls the module's function ``name``, whose body write(builder, *args) writes on the first call.

    It is not inlined: LLVM compiles it once, and moves nothing of it before the call. An argument may be a
    NamedTuple of values; ``write`` gets it as one.
    """
    values = [x for arg in args for x in (arg if isinstance(arg, tuple) else (arg,))]
    kind = ir.FunctionType(result, [x.type for x in values])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    if function.is_declaration:
        function.linkage = "internal"
        function.attributes.add("noinline")
        inside = ir.IRBuilder(function.append_basic_block("entry"))
        values_inside = iter(function.args)
        args_inside = [
            type(arg)(*(next(values_inside) for _ in arg)) if isinstance(arg, tuple) else next(values_inside)
            for arg in args
        ]
        returned = write(inside, *args_inside)
        inside.ret_void() if result == _VOID else inside.ret(returned)
    return builder.call(function, values)


def _pointer(builder: Any, kind: Kind, address: Value, offset: int) -> Value:
    return builder.inttoptr(builder.add(address, I64(offset)) if offset else address, kind.as_pointer())
