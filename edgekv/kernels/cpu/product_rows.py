"""Rows of activations as bytes, in the order in which vectors of packed weights are unpacked.

A block of elements gets a scale, max|x| / 127, or NaN where one of them is infinite or NaN. The blocks whose codes
fill a vector, or a block of several vectors, are a unit, and a row is a run of records, one for each unit:

    elements    a byte each: of each vector of codes those of its bytes' low bits, then those of the high bits
    sums        an int32 for each lane of codes: minus the weights' zero point times the sum of its elements,
                or, as panels want it, of the whole block's
    scales      a float32 for each lane: its block's

Behind the records of a row are the sums of its blocks' elements as float32, for zero points and offsets of weights
(`product_shifts`).
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import types

from edgekv.kernels.cpu import arm, emit
from edgekv.kernels.cpu.jit import Scalar, fast_jit, intrinsic
from edgekv.kernels.cpu.loops import call
from edgekv.kernels.cpu.simd import LANES

VECTOR = 4 * LANES  # bytes
OUTPUTS = 4  # rows of weights at a time, where rows of activations are few
ZERO_POINTS = {4: 8, 8: 0 if arm.IS_ARM else 128}  # Arm multiplies signed bytes: codes of 8 bits become such
E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)  # what such codes stand for, doubled, plus 12
TOP = 127
LEAST = np.float32(1e-30)  # of max|x|: all elements are 0 below it
NO_SIGN, INFINITE = 0x7FFFFFFF, 0x7F800000  # numbers without signs are in the order of their bits, NaN behind all
EXACT = ("nsz",)
ROUND = 1.5 * 2**23  # x + ROUND has in its low bits x, rounded to an integer


class CodeLayout(NamedTuple):
    """A weight format: bits of a code, elements of a block; e2m1: codes are floating-point numbers (`E2M1`)."""

    bits: int
    block: int
    e2m1: bool = False

    @property
    def zero_point(self) -> int:
        """What codes, as they are multiplied, are more than they stand for."""
        return E2M1[0] if self.e2m1 else ZERO_POINTS[self.bits]

    @property
    def block_bytes(self) -> int:
        """Of its codes."""
        return self.block * self.bits // 8

    @property
    def vectors(self) -> int:
        """Of a unit's codes."""
        return max(1, self.block_bytes // VECTOR)

    @property
    def blocks(self) -> int:
        """Of a unit."""
        return max(1, VECTOR // self.block_bytes)

    @property
    def parts(self) -> int:
        """Elements of a byte of codes."""
        return 8 // self.bits

    @property
    def sums_at(self) -> int:
        """Bytes before a record's sums."""
        return self.vectors * self.parts * VECTOR

    @property
    def scales_at(self) -> int:
        """Bytes before a record's scales."""
        return self.sums_at + VECTOR

    @property
    def record(self) -> int:
        """Bytes of a unit of a row."""
        return self.scales_at + VECTOR

    @property
    def can_shift(self) -> bool:
        """Whether there are weights with zero points or offsets in this format."""
        return self.bits == 4 and not self.e2m1

    def gap(self, blocks: int) -> int:
        """Bytes of a row's records, and of its blocks' sums."""
        return -(-blocks // self.blocks) * self.record + (-(-blocks // LANES) * VECTOR if self.can_shift else 0)


class Product(NamedTuple):
    """One product as kernels get it: addresses and sizes. They are compiled for the class, hence its layout."""

    x: int  # (n, columns) float32
    n: int
    columns: int
    is_panel: int
    records: int
    rows: int  # of weights
    y: int  # (n, rows) float32
    panels: int  # scratch of each thread
    blocks: int  # of a row; from here on what only depends on the weights
    gap: int  # bytes from a row's records to the next one's
    codes: int
    row_bytes: int  # of codes
    scales: int
    offsets: int  # (rows, blocks) float32; 0: none
    zeros: int  # in place of offsets zero points, two to a byte; 0: none
    shift: int  # address of what adds their share, `product_shifts.SHIFT`; 0: there are none


class Int4(Product):
    layout = CodeLayout(4, 128)


class Int4In32(Product):
    layout = CodeLayout(4, 32)


class Int8(Product):
    layout = CodeLayout(8, 128)


class Int8In32(Product):
    layout = CodeLayout(8, 32)


class Float4In32(Product):
    layout = CodeLayout(4, 32, e2m1=True)


PRODUCTS = {product.layout: product for product in (Int4, Int4In32, Int8, Int8In32, Float4In32)}


def layout_of(product: Any) -> CodeLayout:
    """Of the Numba type of a `Product`."""
    layout: CodeLayout = product.instance_class.layout
    return layout


def fields(b: Any, product: Any, *names: str) -> list[Any]:
    """Of a `Product` inside a kernel."""
    return [b.extract_value(product, Product._fields.index(name)) for name in names]


def before_sums(b: Any, product: Any) -> Any:
    """Bytes of a row before the sums of its blocks."""
    gap, blocks = fields(b, product, "gap", "blocks")
    vectors = b.sdiv(b.add(blocks, emit.I64(LANES - 1)), emit.I64(LANES))
    return b.sub(gap, b.mul(vectors, emit.I64(VECTOR)))


@intrinsic
def call_shift(context: Any, shift: Any, row: Any, start: Any, n: Any, memory: Any, place: Any) -> Any:
    """Calls `product_shifts.SHIFT` by its address."""
    return call(5)


@intrinsic
def product_at(context: Any, product: Any, numbers: Any) -> Any:
    """The `Product` of a class, whose fields are int64 at an address."""
    kind = types.NamedUniTuple(types.intp, len(Product._fields), product.instance_class)

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        fields = [emit.load(b, emit.I64, args[1], 8 * i) for i in range(len(Product._fields))]
        return context.make_tuple(b, kind, fields)

    return kind(product, types.intp), build


@fast_jit
def prepare_rows(first: int, last: int, p: Product) -> None:
    """Rows first..last of x into records, padded with zeros."""
    block = block_size(p)
    for m in range(first, last):
        row, target, tail = p.x + 4 * m * p.columns, p.records + m * p.gap, p.records + p.n * p.gap + 4 * block * m
        whole = p.columns // block
        for b in range(whole):
            _quantize_block(p, row + 4 * b * block, target, b)
        n_left = p.columns - whole * block
        for b in range(whole, whole_units(p)):
            copy_block(row + 4 * b * block, n_left, tail, block)
            _quantize_block(p, tail, target, b)
            n_left = 0


def _of_layout(name: str) -> Any:
    @intrinsic
    def number(context: Any, product: Any) -> Any:
        n = getattr(layout_of(product), name)

        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return emit.I64(n)

        return types.intp(product), build

    return number


# Elements of a block, and blocks of a unit, inside a kernel.
block_size, blocks_of_unit = _of_layout("block"), _of_layout("blocks")


@fast_jit
def whole_units(p: Product) -> Scalar:
    """Blocks of a row, and those that its last unit lacks."""
    n = blocks_of_unit(p)
    return (p.blocks + n - 1) // n * n


@intrinsic
def copy_block(context: Any, x: Any, n: Any, y: Any, size: Any) -> Any:
    """y (size,) float32 = the n numbers x, then zeros."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, n, y, size = args
        four = emit.I64(4)
        with emit.loop(b, emit.I64(0), n, 1) as turn:
            at = b.mul(turn.i, four)
            emit.store(b, emit.load(b, emit.F32, b.add(x, at)), b.add(y, at))
        with emit.loop(b, n, size, 1) as turn:
            emit.store(b, emit.F32(0.0), b.add(y, b.mul(turn.i, four)))
        return context.get_dummy_value()

    return types.none(*[types.intp] * 4), build


@intrinsic
def _quantize_block(context: Any, product: Any, x: Any, row: Any, block: Any) -> Any:
    """Block ``block`` of a row, x, into the row's records."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        layout, (p, *rest) = layout_of(product), args
        block_sum = b.add(b.add(rest[1], before_sums(b, p)), b.mul(rest[2], emit.I64(4)))
        is_panel = b.icmp_signed("!=", *fields(b, p, "is_panel"), emit.I64(0))
        with b.if_else(is_panel) as cases:
            for panel, case in zip((True, False), cases, strict=True):
                with case:
                    write = functools.partial(_emit_block, layout, panel)
                    emit.call_own(b, f"quantize_{'panel' if panel else 'rows'}", write, *rest, block_sum)
        return context.get_dummy_value()

    return types.none(product, *[types.intp] * 3), build


def _emit_block(layout: CodeLayout, panel: bool, b: Any, x: Any, row: Any, block: Any, block_sum: Any) -> None:
    n = layout.block
    wide, whole = emit.vector(emit.F32, n), emit.vector(emit.I32, n)
    elements = emit.load(b, wide, x)
    sizes = b.and_(b.bitcast(elements, whole), emit.constant(whole, NO_SIGN))
    top = emit.call(b, f"llvm.vector.reduce.smax.v{n}i32", emit.I32, sizes)
    peak, is_finite = b.bitcast(top, emit.F32), b.icmp_signed("<", top, emit.I32(INFINITE))
    is_nothing = b.icmp_signed("<", top, emit.I32(int(LEAST.view(np.int32))))
    factor = b.select(is_nothing, emit.F32(0.0), b.fdiv(emit.F32(float(TOP)), peak))
    scale = b.select(is_nothing, emit.F32(0.0), b.fmul(peak, emit.F32(float(np.float32(1 / TOP)))))
    scale = b.select(is_finite, scale, emit.F32(float("nan")))
    # Not fused: a fused one would round other halves than processors without it.
    shifted = b.fadd(
        b.fmul(elements, emit.splat(b, factor, n), flags=EXACT), emit.constant(wide, ROUND), flags=EXACT
    )
    codes = b.sub(b.bitcast(shifted, whole), emit.constant(whole, int(np.float32(ROUND).view(np.int32))))
    unit = b.sdiv(block, emit.I64(layout.blocks))
    run = layout.block_bytes // layout.vectors  # bytes of codes of the block in a vector
    inside = b.mul(b.srem(block, emit.I64(layout.blocks)), emit.I64(run))
    target = b.add(b.add(row, b.mul(unit, emit.I64(layout.record))), inside)
    sums = emit.constant(emit.vector(emit.I32, run // 4), 0)
    for v in range(layout.vectors):
        for part in range(layout.parts):
            start = v * run * layout.parts + part
            mine = emit.lanes(b, codes, range(start, start + run * layout.parts, layout.parts))
            emit.store(b, b.trunc(mine, emit.vector(emit.I8, run)), target, (v * layout.parts + part) * VECTOR)
            for i in range(0 if panel else 4):
                sums = b.add(sums, emit.lanes(b, mine, range(i, run, 4)))
    if panel or layout.can_shift:
        total = emit.total(b, codes if panel else sums)
    if panel:
        sums = emit.splat(b, total, run // 4)
    if layout.can_shift:
        emit.store(b, b.fmul(b.sitofp(total, emit.F32), scale), block_sum)
    zero = emit.constant(sums.type, -layout.zero_point)
    emit.store(b, b.mul(sums, zero), target, layout.sums_at)
    emit.store(b, emit.splat(b, scale, run // 4), target, layout.scales_at)
