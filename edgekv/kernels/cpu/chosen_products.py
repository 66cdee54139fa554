"""Products of rows with chosen parts of one large matrix of 4- or 8-bit codes, which may lie in a mapped file.

The codes are MatMulNBits': blocks of inputs with a scale each, codes around half their range, of 4 bits two to a
byte. As it does, each row is rounded to 8 bits in blocks of the same size. onnxruntime reads only matrices that it
has packed anew, all of them, into memory.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types

from edgekv.kernels.cpu import arm, emit
from edgekv.kernels.cpu.byte_products import signed_products
from edgekv.kernels.cpu.jit import CPU_FEATURES, fast_jit, intrinsic, jit, parallel_jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import address_of, chars, floats, ints, scratch_memory
from edgekv.kernels.cpu.scalar import get, maximum, put
from edgekv.kernels.cpu.simd import LANES
from edgekv.types import F32, I64, U8

N = 4 if arm.IS_ARM else LANES  # lanes of a product, of four bytes each
BYTES = 4 * N
INTS, FLOATS = emit.vector(emit.I32, N), emit.vector(emit.F32, N)
NIBBLES = 0x0F0F0F0F
ROWS, PAIRS = (4, 1), (2, 1)  # of the matrix, and rows to multiply with it, at a time
PART_ROWS = 32  # of the matrix, to a work item
LOOK_UP = {  # in 16 bytes, by the bytes of a register; none: one by one
    (False, 64): "llvm.x86.avx512.pshuf.b.512" if "+avx512bw" in CPU_FEATURES else "",
    (False, 32): "llvm.x86.avx2.pshuf.b" if "+avx2" in CPU_FEATURES else "",
    (True, 16): "llvm.aarch64.neon.tbl1.v16i8",
}[arm.IS_ARM, BYTES]
TOP = np.float32(127)
ZERO, ONE = np.array([0, 1], np.float32)


class Form:
    """How a format's blocks are walked: a unit is a block, or as many of them as a register has room for.

    A rounded row has for each unit its bytes, as the codes need them; then for each lane of their sum where it
    starts, so that codes count from half their range, and its scale.
    """

    def __init__(self, bits: int, block: int, table: tuple[int, ...] = ()) -> None:
        """table: what 4-bit codes stand for, where not for themselves, plus ``middle``."""
        self.bits, self.block, self.block_bytes, self.table = bits, block, block * bits // 8, table
        self.middle = table[0] if table else 1 << (bits - 1)
        self.unit = max(BYTES, self.block_bytes)  # bytes of codes
        self.blocks = self.unit // self.block_bytes
        self.registers = self.unit // BYTES
        self.inputs = self.unit * 8 // bits
        self.starts, self.scales = self.inputs, self.inputs + BYTES
        self.size = self.inputs + 2 * BYTES
        """Bytes of a unit of a rounded row."""


E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)  # doubled, plus 12
FORMS = [Form(4, 32), Form(4, 128), Form(8, 32), Form(8, 128), Form(4, 32, E2M1)]


def multiply_chosen(x: F32, of: I64, codes: U8, scales: F32, bits: int, out: F32, *, e2m1: bool = False) -> None:
    """out (m, n) = each row of x (m, columns) times part of[row] of a matrix: its rows of[row] * n...

    codes (rows, blocks, bytes of a block), scales (rows, blocks); of (m,) ascending. e2m1: codes are numbers in
    floating point, doubled.
    """
    n_blocks, block_bytes = codes.shape[1:]
    kind = bits, block_bytes * 8 // bits, E2M1 if e2m1 else ()
    which = next(i for i, form in enumerate(FORMS) if (form.bits, form.block, form.table) == kind)
    form, m = FORMS[which], len(x)
    n_units = -(-n_blocks // form.blocks)
    gap = n_units * form.size
    rounded = scratch_memory("chosen.rows", m * gap)
    x = np.ascontiguousarray(x, np.float32)
    layout = np.array([bits, form.block, form.middle, form.inputs, form.starts, form.scales, form.size], np.int64)
    run(_round_rows, _round_parallel, m, 4 * x.size, x, layout, rounded, gap)
    borders = np.concatenate(([0], np.flatnonzero(np.diff(of)) + 1, [m]))
    n_parts = -(-out.shape[1] // PART_ROWS)
    where = address_of(codes), address_of(scales), rounded, gap, address_of(out)
    places = np.array((which, n_blocks, n_blocks * block_bytes, *where), np.int64)
    items = (len(borders) - 1) * n_parts
    run(_multiply_parts, _multiply_parallel, items, out.size * x.shape[1] // 2, of, borders, places, out.shape[1])


@jit
def _round_rows(first: int, last: int, x: F32, layout: I64, rounded: int, gap: int) -> None:
    """Rows of x to 8 bits, in the order in which codes are unpacked."""
    bits, block, middle, inputs, starts_at, scales_at, size = layout
    columns, per_byte, block_bytes = x.shape[1], 8 // bits, block * bits // 8
    for row in range(first, last):
        for u in range(gap // size):
            at = rounded + row * gap + u * size
            target, starts, scales = chars(at), ints(at + starts_at), floats(at + scales_at)
            for lane in range(N):
                put(starts, lane, np.int32(0))
            for b in range(inputs // block):
                begin, first_byte = u * inputs + b * block, b * block_bytes
                width = max(0, min(block, columns - begin))
                peak = ZERO
                for j in range(width):
                    peak = maximum(peak, abs(x[row, begin + j]))
                inverse = TOP / peak if peak > ZERO else ZERO
                for byte in range(first_byte, first_byte + min(BYTES, block_bytes), 4):
                    put(scales, byte // 4, peak / TOP)
                for byte in range(first_byte, first_byte + block_bytes):
                    place, lane = byte // BYTES * per_byte * BYTES + byte % BYTES, byte % BYTES // 4
                    for part in range(per_byte):
                        j = (byte - first_byte) * per_byte + part
                        q = np.int32(np.rint(x[row, begin + j] * inverse)) if j < width else np.int32(0)
                        put(target, place + part * BYTES, np.uint8(q & 255))
                        put(starts, lane, np.int32(get(starts, lane) - q * middle))


@parallel_jit
def _round_parallel(n_parts: int, n_items: int, x: F32, layout: I64, rounded: int, gap: int) -> None:
    for part in prange(n_parts):
        _round_rows(n_items * part // n_parts, n_items * (part + 1) // n_parts, x, layout, rounded, gap)


@fast_jit
def _multiply_parts(first: int, last: int, of: I64, borders: I64, places: I64, n: int) -> None:
    which, n_blocks, row_bytes, codes, scales, rounded, gap, out = places
    n_parts = (n + PART_ROWS - 1) // PART_ROWS
    for item in range(first, last):
        group, begin = item // n_parts, item % n_parts * PART_ROWS
        a, pairs = borders[group], borders[group + 1] - borders[group]
        rows, row = min(PART_ROWS, n - begin), of[a] * n + begin
        matrix, factors = codes + row * row_bytes, scales + 4 * row * n_blocks
        x, y = rounded + a * gap, out + 4 * (a * n + begin)
        if which == 0:
            _multiply_4_32(matrix, factors, rows, n_blocks, x, gap, pairs, y, n)
        elif which == 1:
            _multiply_4_128(matrix, factors, rows, n_blocks, x, gap, pairs, y, n)
        elif which == 2:
            _multiply_8_32(matrix, factors, rows, n_blocks, x, gap, pairs, y, n)
        elif which == 3:
            _multiply_8_128(matrix, factors, rows, n_blocks, x, gap, pairs, y, n)
        else:
            _multiply_e2m1(matrix, factors, rows, n_blocks, x, gap, pairs, y, n)


@parallel_jit
def _multiply_parallel(n_parts: int, n_items: int, of: I64, borders: I64, places: I64, n: int) -> None:
    for part in prange(n_parts):
        _multiply_parts(n_items * part // n_parts, n_items * (part + 1) // n_parts, of, borders, places, n)


def _multiply(form: Form) -> Any:
    """The loop over a format's codes."""

    @intrinsic
    def multiply(
        context: Any,
        matrix: Any,
        factors: Any,
        rows: Any,
        n_blocks: Any,
        x: Any,
        gap: Any,
        pairs: Any,
        y: Any,
        n: Any,
    ) -> Any:
        """y[p * n + r] = row r of the matrix times rounded row p, all by address."""

        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            name = f"multiply_{form.bits}_{form.block}_{form.middle}"
            emit.call_own(b, name, lambda b, *args: _write(form, b, *args), *args)
            return context.get_dummy_value()

        return types.none(*[types.intp] * 9), build

    return multiply


def _write(
    form: Form,
    b: Any,
    matrix: Any,
    factors: Any,
    rows: Any,
    n_blocks: Any,
    x: Any,
    gap: Any,
    pairs: Any,
    y: Any,
    n: Any,
) -> None:
    row_bytes = b.mul(n_blocks, emit.I64(form.block_bytes))
    factor_bytes, line = b.mul(n_blocks, emit.I64(4)), b.mul(n, emit.I64(4))
    done = emit.I64(0)
    for n_rows in ROWS:
        with emit.loop(b, done, rows, n_rows) as tile:
            codes = [b.add(matrix, b.mul(b.add(tile.i, emit.I64(r)), row_bytes)) for r in range(n_rows)]
            scales = [b.add(factors, b.mul(b.add(tile.i, emit.I64(r)), factor_bytes)) for r in range(n_rows)]
            passed = emit.I64(0)
            for n_pairs in PAIRS:
                with emit.loop(b, passed, pairs, n_pairs) as turn:
                    inputs = [b.add(x, b.mul(b.add(turn.i, emit.I64(p)), gap)) for p in range(n_pairs)]
                    sums = _sums(form, b, codes, scales, n_blocks, inputs, row_bytes)
                    for p in range(n_pairs):
                        place = b.add(y, b.mul(b.add(turn.i, emit.I64(p)), line))
                        totals = emit.totals(b, sums[p * n_rows : (p + 1) * n_rows])
                        emit.store(b, totals, b.add(place, b.mul(tile.i, emit.I64(4))))
                passed = turn.i
        done = tile.i


def _sums(form: Form, b: Any, codes: Any, scales: Any, n_blocks: Any, inputs: Any, row_bytes: Any) -> Any:
    """Of each row of inputs the products with each row of codes: registers of float32, still to be added up."""
    so_far = [emit.constant(FLOATS, 0)] * (len(codes) * len(inputs))
    done, ahead = emit.I64(0), b.mul(row_bytes, emit.I64(len(codes)))
    for n_together in sorted({form.blocks, 1}, reverse=True):  # blocks: whole units, then those of a part of one
        with emit.loop(b, done, n_blocks, n_together, so_far) as turn:
            unit = b.udiv(turn.i, emit.I64(form.blocks))
            within = b.mul(b.urem(turn.i, emit.I64(form.blocks)), emit.I64(form.block_bytes))
            starts = [b.add(x, b.mul(unit, emit.I64(form.size))) for x in inputs]
            at, factor_at = b.mul(turn.i, emit.I64(form.block_bytes)), b.mul(turn.i, emit.I64(4))
            following = list(turn.values)
            for r, (code, scale) in enumerate(zip(codes, scales, strict=True)):
                place = b.add(code, at)
                emit.prefetch(b, b.add(place, ahead), n_together * form.block_bytes)
                factors = _factors(form, b, b.add(scale, factor_at), n_together)
                unpacked = _unpacked(form, b, place, n_together)
                for p, start in enumerate(starts):
                    own = _lanes(b, emit.F32, b.add(start, within), n_together, form, form.scales)
                    whole = _products(form, b, unpacked, b.add(start, within), n_together)
                    product = b.sitofp(whole, FLOATS)
                    i = p * len(codes) + r
                    following[i] = emit.multiply_add(b, product, b.fmul(factors, own), following[i])
            turn.following = following
        done, so_far = turn.i, turn.values
    return so_far


def _lanes(b: Any, element: Any, address: Any, n_together: int, form: Form, offset: int) -> Any:
    """The lanes of a register that a unit's blocks have, 0 in the others."""
    if n_together == form.blocks:
        return emit.load(b, emit.vector(element, N), address, offset)
    few = emit.load(b, emit.vector(element, form.block_bytes // 4), address, offset)
    return _padded(b, few)


def _padded(b: Any, few: Any) -> Any:
    """A register of these lanes, then zeros."""
    zeros = emit.constant(few.type, 0)
    return emit.lanes(b, few, [i if i < few.type.count else few.type.count for i in range(N)], zeros)


def _factors(form: Form, b: Any, address: Any, n_together: int) -> Any:
    """Each lane's scale of the codes."""
    if n_together == 1:
        return emit.splat(b, emit.load(b, emit.F32, address), N)
    each = emit.load(b, emit.vector(emit.F32, n_together), address)
    return emit.lanes(b, each, [lane // (N // n_together) for lane in range(N)])


def _unpacked(form: Form, b: Any, address: Any, n_together: int) -> list[Any]:
    """Nibbles of a unit's codes, a byte each: of every register the low ones, then the high ones."""
    result = []
    for register in range(form.registers):
        x = _lanes(b, emit.I32, address, n_together, form, register * BYTES)
        mask = emit.constant(INTS, NIBBLES)
        nibbles = b.and_(x, mask), b.and_(b.lshr(x, emit.constant(INTS, 4)), mask)
        result += [_looked_up(b, form.table, each) if form.table else each for each in nibbles]
    return result


def _looked_up(b: Any, table: tuple[int, ...], nibbles: Any) -> Any:
    """table[nibble] of each byte."""
    kind = emit.vector(emit.I8, BYTES)
    entries, index = ir.Constant(kind, list(table) * (BYTES // 16)), b.bitcast(nibbles, kind)
    if LOOK_UP:
        return b.bitcast(emit.call(b, LOOK_UP, kind, entries, index), INTS)
    result = entries
    for i in range(BYTES):
        entry = b.extract_element(entries, b.zext(b.extract_element(index, emit.I32(i)), emit.I32))
        result = b.insert_element(result, entry, emit.I32(i))
    return b.bitcast(result, INTS)


def _products(form: Form, b: Any, unpacked: list[Any], start: Any, n_together: int) -> Any:
    """The sum of codes times inputs, in whole numbers."""
    low = _lanes(b, emit.I32, start, n_together, form, form.starts)
    if form.bits == 4:
        for i, codes in enumerate(unpacked):
            low = signed_products(b, codes, _lanes(b, emit.I32, start, n_together, form, i * BYTES), low)
        return low
    high = emit.constant(INTS, 0)
    for i in range(form.registers):
        own = _lanes(b, emit.I32, start, n_together, form, i * BYTES)
        low = signed_products(b, unpacked[2 * i], own, low)
        high = signed_products(b, unpacked[2 * i + 1], own, high)
    return b.add(low, b.shl(high, emit.constant(INTS, 4)))


_multiply_4_32, _multiply_4_128, _multiply_8_32, _multiply_8_128, _multiply_e2m1 = map(_multiply, FORMS)
