"""Vectors of weight codes: loaded, unpacked, turned and multiplied with bytes, as this processor can.

A vector is LANES words of 32 bits, each with four bytes: codes of 8 bits, or two of 4 bits to a byte.
"""

import functools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from edgekv.kernels.cpu import arm, byte_products, emit
from edgekv.kernels.cpu.byte_products import signed_products
from edgekv.kernels.cpu.emit import Value
from edgekv.kernels.cpu.jit import CPU_FEATURES
from edgekv.kernels.cpu.product_rows import E2M1, CodeLayout
from edgekv.kernels.cpu.simd import LANES

INTS = emit.vector(emit.I32, LANES)
LOW = 0x0F0F0F0F  # the lower four bits of every byte
SIGN = -0x7F7F7F80  # 0x80 in every byte
SHUFFLES = {  # the instruction that looks bytes up within 16, by the bytes of a vector; "": one by one
    64: "llvm.x86.avx512.pshuf.b.512" if "+avx512bw" in CPU_FEATURES else "",
    32: "llvm.x86.avx2.pshuf.b" if "+avx2" in CPU_FEATURES else "",
    16: "llvm.aarch64.neon.tbl1.v16i8",
}
# Where pairs of products are summed in 16 bits, codes of 8 bits would overflow: they are multiplied as 4 and 4.
IN_HALVES = byte_products.in_pairs


def load_some(b: Any, kind: Any, place: Value, offset: int, n: Value | None, each: int) -> Value:
    """A vector, ``offset`` bytes behind a place; with n its first n * each lanes, the others 0 and not read."""
    if n is None:
        return emit.load(b, kind, place, offset)
    numbers = emit.vector(emit.I32, kind.count)
    end = emit.splat(b, b.trunc(b.mul(n, emit.I64(each)), emit.I32), kind.count)
    mask = b.icmp_signed("<", ir.Constant(numbers, list(range(kind.count))), end)
    pointer = b.inttoptr(b.add(place, emit.I64(offset)), kind.as_pointer())
    element = "f32" if kind.element == emit.F32 else f"i{kind.element.width}"
    name = f"llvm.masked.load.v{kind.count}{element}.p0"
    return emit.call(b, name, kind, pointer, emit.I32(1), mask, emit.constant(kind, 0))


def unpack(b: Any, layout: CodeLayout, packed: Value) -> list[Value]:
    """Codes, a byte each, as `add_products` takes them: of 4 bits a vector of low ones, and one of high ones."""
    if layout.bits == 8:
        return [b.xor(packed, emit.constant(INTS, SIGN)) if arm.IS_ARM else packed]
    nibbles = [b.and_(packed, emit.constant(INTS, LOW)), high(b, packed)]
    return [look_up(b, E2M1, each) for each in nibbles] if layout.e2m1 else nibbles


def look_up(b: Any, table: Sequence[int], nibbles: Value) -> Value:
    """table[nibble] for each byte."""
    if arm.IS_ARM:
        return arm.by_register(b, functools.partial(_shuffle, b, table), nibbles)
    return _shuffle(b, table, nibbles)


def _shuffle(b: Any, table: Sequence[int], nibbles: Value) -> Value:
    n = 4 * nibbles.type.count
    kind = emit.vector(emit.I8, n)
    entries, index = ir.Constant(kind, list(table) * (n // 16)), b.bitcast(nibbles, kind)
    if SHUFFLES[n]:
        return b.bitcast(emit.call(b, SHUFFLES[n], kind, entries, index), nibbles.type)
    result = entries
    for i in range(n):
        entry = b.extract_element(entries, b.zext(b.extract_element(index, emit.I32(i)), emit.I32))
        result = b.insert_element(result, entry, emit.I32(i))
    return b.bitcast(result, nibbles.type)


def high(b: Any, packed: Value) -> Value:
    """The upper four bits of every byte."""
    return b.and_(b.lshr(packed, emit.constant(INTS, 4)), emit.constant(INTS, LOW))


def add_products(b: Any, bits: int, codes: Value, x: Value, so_far: Value) -> Value:
    """so_far (LANES int32) + the products of `unpack`'s codes with signed bytes x, four to a lane."""
    if bits == 4 or not IN_HALVES:
        return signed_products(b, codes, x, so_far)
    upper = signed_products(b, high(b, codes), x, emit.constant(INTS, 0))
    so_far = signed_products(b, b.and_(codes, emit.constant(INTS, LOW)), x, so_far)
    return b.add(so_far, b.shl(upper, emit.constant(INTS, 4)))


def transposed(b: Any, rows: Sequence[Value]) -> list[Value]:
    """Vector i of the result holds lane i of each of as many vectors as they have lanes."""
    n, rows = len(rows), list(rows)
    half = n // 2
    while half:  # swaps the blocks off the diagonal, of half the size each time
        for i in range(n):
            if not i & half:
                upper, lower = rows[i], rows[i + half]
                first = [lane - half + n if lane & half else lane for lane in range(n)]
                second = [lane + n if lane & half else lane + half for lane in range(n)]
                rows[i] = emit.lanes(b, upper, first, lower)
                rows[i + half] = emit.lanes(b, upper, second, lower)
        half //= 2
    return rows
