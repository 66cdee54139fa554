"""Products of activations with quantized weights, their formats and codes, in LLVM code.

    y[m, o] = sum over blocks k of row_scale[m, k] * (
                  scale[o, k] * (sum over i of (code[o, k, i] - zero point) * x[m, k, i])
                  + correction[o, k] * (sum over i of x[m, k, i]))

    row         activations of one token, (columns,) float32; a product has n of them. x is a row rounded to bytes
    output      one row of the weights, (columns,), or the number that it gives for a row
    block       elements of a row, or of an output, with one scale: 32 or 128
    unit        the blocks whose codes fill a vector of VECTOR bytes, or a block of several vectors
    tile        OUTPUTS outputs, multiplied with few rows (gemv)
    panel       PANEL outputs, unpacked once, side by side, for many rows (gemm)
    correction  what an output's zero points or offsets add to it

A rounded row (`matmul.prepare_rows`) has its units one behind the other:

    elements    one byte each, in the order in which codes are unpacked: first those in the low bits of a vector's
                bytes, then those in the higher bits
    sums        an int32 for each lane: the first one of each block holds -zero_point * sum(elements), the others 0
    scales      a float32 for each lane: its block's

In a panel a lane is one output: four elements of a row, in every lane, times four codes of each of the panel's
outputs. A block's sum in int32 then becomes a float32 once for LANES outputs. A panel is unpacked PANEL_K
at a time, which stay in the first cache while all rows pass.

With corrections, codes are multiplied as they are (zero point 0). The block's zero point z or offset o is added
afterwards: -z * scale, or o, times the sum of the rounded row's block, in float32 (`CORRECTION`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import fast_jit, intrinsic
from edgekv.kernels.cpu.emit import LANES, Value, at
from edgekv.kernels.cpu.loops import Loop, call, chars, floats, load_tuple
from edgekv.kernels.cpu.rows import score_rows
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.weight_codes import CODEBOOKS, ROTATED_INPUTS, code_of_zero, code_planes, level_tables

VECTOR = 4 * LANES  # bytes
OUTPUTS = 4  # of a tile


class CodeLayout(NamedTuple):
    """A weight format: bits of a code, elements of a block, and what a code stands for if that isn't itself.

    rotated: elements are behind a Hadamard transform of their block, scales bfloat16, and codes in planes; else a
    byte has neighbouring codes. has_corrections: whether such weights may have zero points or offsets.
    """

    bits: int
    block: int
    levels: tuple[int, ...] = ()
    rotated: bool = False
    has_corrections: bool = False

    @property
    def zero_point(self) -> int:
        """The byte, as it is multiplied, that stands for 0 where there are no corrections."""
        return -min(self.levels) if self.levels else self.code_0 + code_of_zero(self.bits)

    @property
    def code_0(self) -> int:
        """The byte, as it is multiplied, of the code 0; Arm multiplies signed bytes, also for 8 bits."""
        return -code_of_zero(8) if emit.IS_ARM and self.bits == 8 else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scale."""
        return 2 if self.rotated else 4

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's codes."""
        return self.block * self.bits // 8

    @property
    def unit_blocks(self) -> int:
        """Blocks in a unit."""
        return 1 if self.rotated else max(1, VECTOR // self.block_bytes)

    @property
    def run(self) -> int:
        """Bytes of a vector that are codes of one block."""
        return VECTOR // self.unit_blocks

    @property
    def vectors(self) -> int:
        """Vectors of codes in a unit, as they are multiplied, a byte each."""
        return self.unit_blocks * self.block // VECTOR

    @property
    def bit_bytes(self) -> int:
        """Bytes that a bit of each of a unit's codes takes."""
        return self.unit_blocks * self.block // 8

    def elements(self, vector: int) -> range:
        """Returns the elements of a block that a vector of a unit holds; vector: its number in the unit."""
        per_byte = 1 if self.rotated else 8 // self.bits
        part, before = divmod(vector, self.vectors // per_byte)
        start = before * per_byte * self.run + part
        return range(start, start + per_byte * self.run, per_byte)

    @property
    def sums_at(self) -> int:
        """Bytes of a rounded row's unit before its sums."""
        return self.vectors * VECTOR

    @property
    def scales_at(self) -> int:
        """Bytes of a rounded row's unit before its scales."""
        return self.sums_at + VECTOR

    @property
    def unit_bytes(self) -> int:
        """Bytes of a rounded row's unit."""
        return self.scales_at + VECTOR

    def row_bytes(self, blocks: int) -> int:
        """Bytes of a rounded row: its units, and one vector more where rows would else share places of a cache."""
        return (-(-blocks // self.unit_blocks) * self.unit_bytes // VECTOR | 1) * VECTOR


def integer_layout(bits: int, block: int) -> CodeLayout:
    """Returns the layout of codes of 4 or 8 bits for whole numbers."""
    return CodeLayout(bits, block, has_corrections=bits == 4)


def rotated_layout(bits: int) -> CodeLayout:
    """Returns the layout of codes of 2 to 5 bits for Gaussian levels."""
    return CodeLayout(bits, ROTATED_INPUTS, tuple(level_tables(bits).ravel().tolist()), rotated=True)


class Product(NamedTuple):
    """One product as kernels get it: addresses and sizes. Kernels are compiled for the class, hence its layout."""

    first_row: int  # its first row, tile and tiles among those of all products of a call; tiles may be panels
    first_tile: int
    tiles: int
    x: int  # (n, columns) float32
    n: int  # rows
    columns: int
    is_panel: int  # 0: tiles
    rounded: int  # rows, rounded
    sums: int  # (n, blocks) float32: of the elements of each rounded row's blocks, for corrections
    outputs: int
    y: int  # (n, outputs) float32
    scratch: int  # scratch of each thread, `scratch_bytes`
    blocks: int  # of an output, and of a row; from here on what only depends on the weights
    row_bytes: int  # bytes from a rounded row to the next one
    codes: int
    code_bytes: int  # of an output's codes
    scales: int  # (outputs, blocks) float32, or bfloat16
    offsets: int  # (outputs, blocks) float32; 0: none
    zeros: int  # in place of offsets (outputs, blocks) uint8, the codes that stand for 0; 0: none
    correction: int  # address of what adds their share, `CORRECTION`; 0: there are none
    decode: int  # address of a `BlockType.loop`, which decodes ``codes`` before they are multiplied; 0: none


MXFP4 = CodeLayout(4, 32, levels=(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
"""Codes of e2m1: `edgekv.checkpoint.quantized.E2M1_DOUBLED`, which kernels cannot import."""
BYTE_CODES = CodeLayout(8, 16, has_corrections=True)
"""What `decode` makes of blocks of another layout: codes of 8 bits with offsets."""
LAYOUTS = (
    *(integer_layout(bits, block) for bits in (4, 8) for block in (32, 128)),
    *(MXFP4, BYTE_CODES),
    *(rotated_layout(bits) for bits in CODEBOOKS),
)
PRODUCTS = {layout: type(f"Product{i}", (Product,), {"layout": layout}) for i, layout in enumerate(LAYOUTS)}
"""A class for each layout: Numba compiles a kernel for each, and `layout_of` has the layout while that is emitted.
All fields are int64, so that a kernel reads a product from memory as so many numbers (`load_tuple`)."""


def layout_of(product: Any) -> CodeLayout:
    """Returns the layout of a `Product`, from its Numba type."""
    layout: CodeLayout = product.instance_class.layout
    return layout


class Rows(NamedTuple):
    """Rows inside a kernel, rounded or of y: the first one's address, and the bytes from one to the next."""

    first: Value
    row_bytes: Value

    def row(self, b: Any, m: int) -> Value:
        """Returns the address of row m."""
        return at(b, self.first, (self.row_bytes, m))

    def behind(self, b: Any, *offsets: Any) -> Rows:
        """Returns the rows from so many bytes behind their beginnings on (`emit.at`)."""
        return Rows(at(b, self.first, *offsets), self.row_bytes)


class Outputs(NamedTuple):
    """Outputs inside a kernel: the first one's codes and scales; bytes of codes, and blocks, to the next one's."""

    codes: Value
    code_bytes: Value
    scales: Value
    blocks: Value


def fields(b: Any, product: Value, *names: str) -> list[Value]:
    """Returns fields of a `Product` inside a kernel."""
    return [b.extract_value(product, Product._fields.index(name)) for name in names]


def _row_groups(
    b: Any, p: Value, output: Value, counts: Sequence[int], before: Value
) -> Iterator[tuple[int, Rows, Rows]]:
    """Loops over a product's rows: counts[0] in each pass, those left over counts[1] in each, and so on.

    Yields a count, rounded rows from so many bytes ``before`` on, and rows of y from an output on: what the caller
    emits for them is the body of a loop.
    """
    n, rounded, row_bytes, n_outputs, y = fields(b, p, "n", "rounded", "row_bytes", "outputs", "y")
    x, to = Rows(at(b, rounded, before), row_bytes), Rows(at(b, y, (output, 4)), b.mul(n_outputs, emit.I64(4)))
    done = emit.I64(0)
    for count in counts:
        with emit.loop(b, done, n, count) as loop:
            yield count, x.behind(b, (loop.i, x.row_bytes)), to.behind(b, (loop.i, to.row_bytes))
        done = loop.i


def _outputs_from(b: Any, layout: CodeLayout, p: Value, output: Value, start: Value) -> Outputs:
    """Returns the outputs of a product from ``output`` on, from block ``start`` on."""
    codes, code_bytes, scales, blocks = fields(b, p, "codes", "code_bytes", "scales", "blocks")
    codes = at(b, codes, (output, code_bytes), (start, layout.block_bytes))
    scales = at(b, scales, (output, blocks, layout.scale_bytes), (start, layout.scale_bytes))
    return Outputs(codes, code_bytes, scales, blocks)


INTS, FLOATS = emit.vector(emit.I32, LANES), emit.vector(emit.F32, LANES)
LOW = 0x0F0F0F0F  # the lower four bits of every byte
SIGN = -0x7F7F7F80  # 0x80 in every byte


def _levels(b: Any, layout: CodeLayout, codes: Value, partners: Value) -> Value:
    """Returns a byte for each code, as `add_products` takes them; partners: the codes' partners, where rotated."""
    if not layout.levels:
        return b.xor(codes, emit.constant(INTS, SIGN)) if emit.IS_ARM and layout.bits == 8 else codes
    entries = [level + layout.zero_point for level in layout.levels]
    if layout.rotated:
        is_odd = b.and_(partners, emit.constant(INTS, 0x01010101))
        codes = b.or_(codes, b.shl(is_odd, emit.constant(INTS, layout.bits)))
    index = b.bitcast(codes, emit.vector(emit.I8, VECTOR))
    return b.bitcast(emit.look_up_entries(b, entries, index), INTS)


def _planes_code(b: Any, layout: CodeLayout, planes: Sequence[tuple[Value, Sequence[int]]]) -> Value:
    """Returns a byte for each code; planes: of each its bytes, and by how many bits each lane is shifted."""
    code = None
    for (bits, before), (packed, shifts) in zip(code_planes(layout.bits), planes, strict=True):
        some = b.lshr(packed, ir.Constant(INTS, list(shifts))) if any(shifts) else packed
        some = b.and_(some, emit.constant(INTS, 0x01010101 * ((1 << bits) - 1))) if bits < 8 else some
        code = b.or_(code, b.shl(some, emit.constant(INTS, before))) if before else some
    return code


def load_codes(b: Any, layout: CodeLayout, start: Value, n_blocks: Value | None) -> list[Value]:
    """Returns the codes of the unit at an address, bytes in vectors; n_blocks: how many it has, None: all."""
    block_lanes = LANES // layout.unit_blocks
    planes = []  # of each plane, for each vector: the words that have its codes, and each lane's shift
    for bits, before in code_planes(layout.bits):
        n_bytes, first = layout.bit_bytes * bits, layout.bit_bytes * before  # byte j has codes j, j + n_bytes, ...
        kind = emit.vector(emit.I32, min(n_bytes, VECTOR) // 4)
        offsets = range(first, first + n_bytes, VECTOR)
        loads = [emit.masked_load(b, kind, start, offset, n_blocks, block_lanes) for offset in offsets]
        words = [emit.shuffle(b, load, [i % kind.count for i in range(LANES)]) for load in loads]
        shifts = [[(VECTOR * v + 4 * i) // n_bytes * bits for i in range(LANES)] for v in range(layout.vectors)]
        planes.append([(words[v % len(words)], shift) for v, shift in enumerate(shifts)])
    codes = [_planes_code(b, layout, of_vector) for of_vector in zip(*planes, strict=True)]
    half = len(codes) // 2  # partners are half a unit away
    return [_levels(b, layout, code, codes[i - half]) for i, code in enumerate(codes)]


def load_scales(b: Any, layout: CodeLayout, scales: Value, block: Value, n_blocks: Value | None) -> Value:
    """Returns the scales of a unit, (unit_blocks,) float32, from a block on; n_blocks as in `load_codes`."""
    if not layout.rotated:
        kind = emit.vector(emit.F32, layout.unit_blocks)
        return emit.masked_load(b, kind, at(b, scales, (block, 4)), 0, n_blocks)
    bits = b.zext(emit.load(b, emit.vector(emit.I16, 1), at(b, scales, (block, 2))), emit.vector(emit.I32, 1))
    return b.bitcast(b.shl(bits, emit.constant(bits.type, 16)), emit.vector(emit.F32, 1))


def high(b: Any, packed: Value) -> Value:
    """Returns the upper four bits of every byte."""
    return b.and_(b.lshr(packed, emit.constant(INTS, 4)), emit.constant(INTS, LOW))


def add_products(b: Any, bits: int, codes: Value, x: Value, acc: Value) -> Value:
    """Returns acc (LANES int32) + the products of codes with signed bytes x, four to a lane."""
    if bits < 8 or not emit.SUMS_PAIRS_IN_16_BITS:
        return emit.add_products(b, codes, x, acc, "s")
    # Codes of 8 bits would overflow sums in 16 bits: they are multiplied as 4 and 4.
    upper = emit.add_products(b, high(b, codes), x, emit.constant(INTS, 0), "s")
    acc = emit.add_products(b, b.and_(codes, emit.constant(INTS, LOW)), x, acc, "s")
    return b.add(acc, b.shl(upper, emit.constant(INTS, 4)))


def transpose(b: Any, rows: Sequence[Value]) -> list[Value]:
    """Returns vectors of which the i-th has lane i of each of ``rows``, as many vectors as they have lanes."""
    n, rows = len(rows), list(rows)
    half = n // 2
    while half:  # swaps the blocks off the diagonal, of half the size each time
        for i in range(n):
            if not i & half:
                upper, lower = rows[i], rows[i + half]
                first = [lane - half + n if lane & half else lane for lane in range(n)]
                second = [lane + n if lane & half else lane + half for lane in range(n)]
                rows[i] = emit.shuffle(b, upper, first, lower)
                rows[i + half] = emit.shuffle(b, upper, second, lower)
        half //= 2
    return rows


PANEL_VECTORS = 2 if emit.REGISTER == 16 else 1  # of a number for each of a panel's outputs
PANEL = PANEL_VECTORS * LANES  # outputs
# Rows that share a panel's loads: the first as many while there are, then the next. Their sums fit the registers.
PANEL_ROW_COUNTS = (6, 2, 1) if emit.REGISTER == 16 else (4, 2, 1)
PANEL_K = 1024  # elements of an output, a multiple of every unit: a block of the gemm's inner dimension
# In a thread's scratch, of PANEL_K: codes, a byte each, and behind them float32 scales, as
# [block][output]. No block has fewer than 16 elements.
SCALES_AT = PANEL_K * PANEL
PANEL_BYTES = SCALES_AT + PANEL_K // 16 * PANEL * 4


@intrinsic
def _unpack_panel(context: Any, product: Any, output: Any, start: Any, n: Any, memory: Any) -> Any:
    """Unpacks blocks start..start + n of PANEL outputs into ``memory``.

    codes as [unit][vector][part][lane][output] words of four codes, scales [block][output].
    """

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        (p, output, start, n, memory), layout = args, layout_of(product)
        outputs, write = _outputs_from(b, layout, p, output, start), functools.partial(_emit_unpack_panel, layout)
        emit.call_internal(b, "unpack_panel", write, outputs, n, memory)
        return context.get_dummy_value()

    return types.none(product, *[types.intp] * 4), build


@intrinsic
def _multiply_panel(context: Any, product: Any, output: Any, start: Any, n: Any, memory: Any) -> Any:
    """y[:, output..output + PANEL] = or, with start above 0, += rows times unpacked blocks start..start + n."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        (p, output, start, n_blocks, memory), layout = args, layout_of(product)
        before = b.mul(b.sdiv(start, emit.I64(layout.unit_blocks)), emit.I64(layout.unit_bytes))
        for count, rows, to in _row_groups(b, p, output, PANEL_ROW_COUNTS, before):
            write = functools.partial(_emit_panel_products, layout, count)
            emit.call_internal(b, f"multiply_panel_{count}", write, rows, start, n_blocks, memory, to)
        return context.get_dummy_value()

    return types.none(product, *[types.intp] * 4), build


def _emit_unpack_panel(layout: CodeLayout, b: Any, outputs: Outputs, n: Value, memory: Value) -> None:
    """Unpacks n blocks of PANEL outputs into ``memory``."""
    with emit.loop(b, 0, n, layout.unit_blocks) as loop:
        _emit_unpack_unit(layout, b, outputs, memory, loop.i, None)
    if layout.unit_blocks > 1:
        with emit.loop(b, loop.i, at(b, n, layout.unit_blocks - 1), layout.unit_blocks) as rest:
            _emit_unpack_unit(layout, b, outputs, memory, rest.i, b.sub(n, rest.i))


def _emit_unpack_unit(
    layout: CodeLayout, b: Any, outputs: Outputs, memory: Value, block: Value, n_blocks: Value | None
) -> None:
    """Unpacks the unit of PANEL outputs that begins with a block; n_blocks: how many it has, None: all."""
    size = layout.vectors * VECTOR * PANEL // layout.unit_blocks  # of a block's codes
    codes, target = at(b, outputs.codes, (block, layout.block_bytes)), at(b, memory, (block, size))
    for i in range(PANEL_VECTORS):
        addresses = [at(b, codes, (outputs.code_bytes, i * LANES + o)) for o in range(LANES)]
        for address in addresses:  # of the next PANEL_K, which then wait for no memory
            ahead = at(b, address, PANEL_K * layout.bits // 8)
            emit.prefetch(b, ahead, layout.block_bytes * layout.unit_blocks, locality=2)
        for index, some in _emit_transposed_codes(layout, b, addresses, n_blocks):
            emit.store(b, some, target, (index * PANEL_VECTORS + i) * VECTOR)
    with emit.loop(b, 0, PANEL, 1) as output:
        first = b.add(block, b.mul(outputs.blocks, output.i))
        scales = load_scales(b, layout, outputs.scales, first, n_blocks)
        target = at(b, memory, SCALES_AT, (b.add(b.mul(block, emit.I64(PANEL)), output.i), 4))
        for i in range(layout.unit_blocks):
            emit.store(b, b.extract_element(scales, emit.I32(i)), target, 4 * PANEL * i)


def _emit_transposed_codes(
    layout: CodeLayout, b: Any, addresses: Sequence[Value], n_blocks: Value | None
) -> Iterator[tuple[int, Value]]:
    """Yields, of the units at LANES addresses, four codes each side by side, and which four elements they are."""
    n, unit_words = layout.vectors * LANES, layout.bit_bytes * layout.bits // 4

    @functools.cache
    def words(start: int) -> list[Value]:
        is_whole = start + LANES <= unit_words
        some, width = (n_blocks, LANES // layout.unit_blocks) if is_whole else (emit.I64(unit_words - start), 1)
        return transpose(b, [emit.masked_load(b, INTS, address, 4 * start, some, width) for address in addresses])

    @functools.cache
    def code(four: int) -> Value:
        planes = []
        for bits, before in code_planes(layout.bits):
            n_words = layout.bit_bytes * bits // 4  # word j has the fours j, j + n_words, ...
            start, word = divmod(layout.bit_bytes * before // 4 + four % n_words, LANES)
            planes.append((words(start * LANES)[word], [four // n_words * bits] * LANES))
        return _planes_code(b, layout, planes)

    for four in range(n):
        partners = code((four + n // 2) % n) if layout.rotated else None
        yield four, _levels(b, layout, code(four), partners)


def _emit_panel_products(
    layout: CodeLayout, n: int, b: Any, x: Rows, start: Value, n_blocks: Value, memory: Value, y: Rows
) -> None:
    """y (n, PANEL) = or += n rows times n_blocks unpacked blocks, to which x begins; = if start is 0."""
    panel_scales = at(b, memory, SCALES_AT)
    end = at(b, n_blocks, layout.unit_blocks - 1)  # what a unit lacks is 0
    zeros = [emit.constant(FLOATS, 0.0)] * (n * PANEL_VECTORS)
    with emit.loop(b, 0, end, layout.unit_blocks, zeros) as loop:
        unit = b.sdiv(loop.i, emit.I64(layout.unit_blocks))
        of_unit = x.behind(b, (unit, layout.unit_bytes))
        units = [of_unit.row(b, m) for m in range(n)]
        codes = at(b, memory, (unit, layout.vectors * VECTOR * PANEL))
        scales = at(b, panel_scales, (loop.i, 4 * PANEL))
        for i in range(layout.unit_blocks):
            loop.next = _emit_block_products(layout, b, i, units, codes, scales, loop.next)
    is_first = b.icmp_signed("==", start, emit.I64(0))
    for i, total in enumerate(loop.values):
        m, vector = divmod(i, PANEL_VECTORS)
        target = at(b, y.row(b, m), VECTOR * vector)
        with b.if_else(is_first) as (then, otherwise):
            with then:
                emit.store(b, total, target)
            with otherwise:
                emit.store(b, b.fadd(emit.load(b, FLOATS, target), total), target)


def _emit_block_products(
    layout: CodeLayout,
    b: Any,
    block: int,
    units: Sequence[Value],
    codes: Value,
    scales: Value,
    sums: Sequence[Value],
) -> list[Value]:
    """Returns sums (rows, PANEL_VECTORS), LANES float32 each, after a block of a unit.

    units: of each row, rounded; codes, scales: of the unit, unpacked.
    """
    lanes = LANES // layout.unit_blocks
    first_lane = block * lanes  # of each vector, at which the block begins
    dots = []
    for unit in units:
        start = emit.splat(b, emit.load(b, emit.I32, unit, layout.sums_at + 4 * first_lane), LANES)
        dots += [start] * PANEL_VECTORS
    for vector in range(layout.vectors):
        with emit.loop(b, first_lane, first_lane + lanes, 4, dots) as loop:
            lane_codes = at(b, codes, (loop.i, VECTOR * PANEL_VECTORS))
            for j in range(4):
                offset = (vector * LANES + j) * VECTOR * PANEL_VECTORS
                words = [emit.load(b, INTS, lane_codes, offset + VECTOR * i) for i in range(PANEL_VECTORS)]
                updated = []
                for m, unit in enumerate(units):
                    address = at(b, unit, (loop.i, 4))
                    four = emit.splat(b, emit.load(b, emit.I32, address, vector * VECTOR + 4 * j), LANES)
                    for i, word in enumerate(words):
                        acc = loop.next[m * PANEL_VECTORS + i]
                        updated.append(add_products(b, layout.bits, word, four, acc))
                loop.next = updated
        dots = loop.values
    result = []
    for m, unit in enumerate(units):
        row_scale = emit.splat(b, emit.load(b, emit.F32, unit, layout.scales_at + 4 * first_lane), LANES)
        for i in range(PANEL_VECTORS):
            output_scales = emit.load(b, FLOATS, scales, 4 * (PANEL * block + LANES * i))
            dot = b.sitofp(dots[m * PANEL_VECTORS + i], FLOATS)
            scaled = b.fmul(dot, row_scale, flags=emit.CONTRACT)
            result.append(emit.multiply_add(b, scaled, output_scales, sums[m * PANEL_VECTORS + i]))
    return result


PREFETCH_BYTES = 8192  # of codes: into the second cache, as the first has no more room for lines on their way
UNITS = 4  # of an output in one pass, where a single row reads it: less lies between loads than one by one
TILE_ROW_COUNTS = 4, 2, 1  # rows that share a tile's loads: fours while there are, then a pair, then one


@fast_jit
def multiply_tiles(first: int, last: int, memory: int, p: Product, address: int, panel_blocks: int) -> None:
    """Multiplies tiles or panels first..last of p, a product whose fields are at an address.

    Outputs left over form one more tile, which overlaps the last whole one; one thread computes both, since panels
    add to y. memory: a thread's scratch. panel_blocks: blocks of PANEL_K.
    """
    size = PANEL if p.is_panel else OUTPUTS
    if first < last == p.outputs // size:
        last = (p.outputs + size - 1) // size
    for tile in range(first, last):
        output = min(tile * size, p.outputs - size)
        if p.is_panel:
            for start in range(0, p.blocks, panel_blocks):
                n = min(panel_blocks, p.blocks - start)
                _unpack_panel(p, output, start, n, memory)
                _multiply_panel(p, output, start, n, memory)
        else:
            _multiply_tile(p, output)
        if p.correction:
            call(p.correction, (output, size, memory + PANEL_BYTES, address))


@intrinsic
def _multiply_tile(context: Any, product: Any, output: Any) -> Any:
    """y[:, output..output + OUTPUTS] = rows times a tile."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        (p, output), layout = args, layout_of(product)
        outputs = _outputs_from(b, layout, p, output, emit.I64(0))
        for count, rows, to in _row_groups(b, p, output, TILE_ROW_COUNTS, emit.I64(0)):
            write = functools.partial(_emit_tile_products, layout, count)
            emit.call_internal(b, f"multiply_rows_{count}", write, rows, outputs, to)
        return context.get_dummy_value()

    return types.none(product, types.intp), build


def _emit_tile_products(layout: CodeLayout, n: int, b: Any, x: Rows, outputs: Outputs, y: Rows) -> None:
    """y (n, OUTPUTS) = n rows times a tile."""
    scale_bytes = b.mul(outputs.blocks, emit.I64(layout.scale_bytes))  # of an output
    with emit.loop(b, 0, b.mul(scale_bytes, emit.I64(OUTPUTS)), emit.LINE) as loop:
        ahead = at(b, outputs.scales, loop.i, (scale_bytes, OUTPUTS * PREFETCH_TILES))
        emit.prefetch(b, ahead, emit.LINE, locality=2)
    if n == 1:  # waits for memory, which is fastest in order
        sums, write = [], functools.partial(_emit_row_product, layout)
        for o in range(OUTPUTS):
            addresses = at(b, outputs.codes, (outputs.code_bytes, o)), at(b, outputs.scales, (scale_bytes, o))
            sums.append(
                emit.call_internal(b, "multiply_row", write, x.first, *addresses, outputs.blocks, result=FLOATS)
            )
    else:  # share what is loaded of rows
        add_unit = functools.partial(_emit_unit, layout, n, OUTPUTS, b, x, outputs)
        sums = _emit_sums(layout, n * OUTPUTS, 1, b, outputs.blocks, add_unit)
    for m in range(n):
        totals = emit.lane_sums(b, sums[m * OUTPUTS : (m + 1) * OUTPUTS])
        emit.store(b, totals, y.row(b, m))


def _emit_row_product(layout: CodeLayout, b: Any, x: Value, codes: Value, scales: Value, blocks: Value) -> Value:
    """Returns one row times one output: LANES float32, to be added up."""
    zero = emit.I64(0)
    x_row, output = Rows(x, zero), Outputs(codes, zero, scales, blocks)
    add_unit = functools.partial(_emit_unit, layout, 1, 1, b, x_row, output)
    return _emit_sums(layout, 1, UNITS, b, blocks, add_unit)[0]


def _emit_sums(
    layout: CodeLayout, n: int, at_once: int, b: Any, blocks: Value, add_unit: Callable[..., list[Value]]
) -> list[Value]:
    """Returns n sums of LANES float32 over all blocks, ``at_once`` units at a time while there are.

    add_unit(block, sums, n_blocks): the sums after a unit, as `_emit_unit` returns them.
    """
    first, sums = emit.I64(0), [emit.constant(FLOATS, 0.0)] * n
    for n_units in sorted({at_once, 1}, reverse=True):
        with emit.loop(b, first, blocks, n_units * layout.unit_blocks, sums) as loop:
            loop.next = loop.values
            for i in range(n_units):
                loop.next = add_unit(at(b, loop.i, i * layout.unit_blocks), loop.next, None)
        first, sums = loop.i, loop.values
    if layout.unit_blocks > 1:  # what is no whole unit
        with emit.loop(b, first, at(b, blocks, layout.unit_blocks - 1), layout.unit_blocks, sums) as rest:
            rest.next = add_unit(rest.i, rest.values, b.sub(blocks, rest.i))
        sums = rest.values
    return sums


def _emit_unit(
    layout: CodeLayout,
    n: int,
    n_outputs: int,
    b: Any,
    x: Rows,
    outputs: Outputs,
    block: Value,
    sums: list[Value],
    n_blocks: Value | None,
) -> list[Value]:
    """Returns sums (n, n_outputs) after the unit that begins with a block; n_blocks: its blocks, None: all."""
    units = x.behind(b, (b.sdiv(block, emit.I64(layout.unit_blocks)), layout.unit_bytes))
    codes_at = at(b, outputs.codes, (block, layout.block_bytes))
    codes, scales = [], []  # of each output: the unit's, unpacked, and its blocks', in every lane of theirs
    for o in range(n_outputs):
        start = at(b, codes_at, (outputs.code_bytes, o))
        if n_blocks is None:
            emit.prefetch(b, at(b, start, PREFETCH_BYTES), layout.block_bytes * layout.unit_blocks, locality=2)
        codes.append(load_codes(b, layout, start, n_blocks))
        first_block = b.add(block, b.mul(outputs.blocks, emit.I64(o)))
        unit_scales = load_scales(b, layout, outputs.scales, first_block, n_blocks)
        scales.append(emit.shuffle(b, unit_scales, [lane * layout.unit_blocks // LANES for lane in range(LANES)]))
    updated = list(sums)
    for m in range(n):
        unit = units.row(b, m)
        elements = [emit.load(b, INTS, unit, VECTOR * i) for i in range(layout.vectors)]
        row_sums = emit.load(b, INTS, unit, layout.sums_at)
        row_scales = emit.load(b, FLOATS, unit, layout.scales_at)
        for o in range(n_outputs):
            dots = row_sums
            for codes_of, elements_of in zip(codes[o], elements, strict=True):
                dots = add_products(b, layout.bits, codes_of, elements_of, dots)
            scaled = b.fmul(b.sitofp(dots, FLOATS), row_scales, flags=emit.CONTRACT)
            i = m * n_outputs + o
            updated[i] = emit.multiply_add(b, scaled, scales[o], updated[i])
    return updated


PREFETCH_TILES = 2  # whose scales are fetched
_add_corrections = score_rows(4, batch_invariant=True, adds=True)


@emit.procedure
def _fetch(b: Any, start: Value, n_bytes: Value) -> None:
    """Fetches so many bytes into the second cache: the first has no room for them."""
    with emit.loop(b, 0, n_bytes, emit.LINE) as loop:
        emit.prefetch(b, at(b, start, loop.i), emit.LINE, locality=2)


def _correct(output: int, n: int, memory: int, address: int) -> None:
    p = load_tuple(Product, address)
    first, size = output * p.blocks, n * p.blocks
    offsets = p.offsets + 4 * first
    if p.zeros:
        zeros, scales, offsets = chars(p.zeros + first), floats(p.scales + 4 * first), memory
        for i in range(size):
            put(floats(offsets), i, -np.float32(get(zeros, i)) * get(scales, i))
    else:
        _fetch(offsets + 4 * size * PREFETCH_TILES, 4 * size)
    _add_corrections(p.sums, p.n, offsets, p.blocks, n, p.y + 4 * output, p.outputs)


CORRECTION = Loop(_correct, fastmath=False)
"""(output, n, memory, address): add the corrections of n outputs of the `Product` there to y; memory: scratch."""
