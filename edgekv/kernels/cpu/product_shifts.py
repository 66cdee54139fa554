"""What zero points or offsets of weights, their shifts, add to a product, read as the weight store has them.

Words are those of `product_rows`. A zero point moves each weight of a block by minus itself times the block's
scale, an offset by itself: this is the block's shift, and its share the shift times the sum of the block's rounded
elements. Kernels of all formats call `SHIFT` for what they have just multiplied, while its scales are in the first
cache; it is compiled where there are such weights. LANES blocks of an output go through a vector.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.emit import Value
from edgekv.kernels.cpu.jit import intrinsic
from edgekv.kernels.cpu.loops import Loop
from edgekv.kernels.cpu.product_codes import INTS, load_some, transposed
from edgekv.kernels.cpu.product_panels import PANEL, PANEL_ROW_COUNTS, PANEL_VECTORS, SHIFTS_AT
from edgekv.kernels.cpu.product_rows import (
    OUTPUTS,
    VECTOR,
    Product,
    RowsAt,
    before_sums,
    fields,
    product_at,
    row_groups,
)
from edgekv.kernels.cpu.simd import LANES

FLOATS = emit.vector(emit.F32, LANES)
TILE_ROW_COUNTS = 4, 1  # rows that share a tile's shifts: fours while there are, then one by one
TILES_AHEAD = 2  # whose offsets are fetched
ZERO = 8  # the code of the zero point 0


class ShiftsAt(NamedTuple):
    """Where shifts of outputs are from a block on: addresses in the store, and how many blocks outputs have.

    Of offsets (float32) or zero points (half a byte) only one is there; zeros is 0 where there are none.
    """

    offsets: Value
    zeros: Value
    scales: Value
    blocks: Value


def _shift(output: int, start: int, n: int, memory: int, place: int) -> None:
    p = product_at(Product, place)
    if p.is_panel:
        _shift_panel(p, output, start, n, memory)
    else:
        _shift_tile(p, output)


SHIFT = Loop(_shift, 5, exact=True)
"""(output, start, n, memory, place): y of the `Product` at a place += the shifts' share, for outputs output...

Of a tile all blocks; of a panel blocks start..start + n, with the panel's scratch.
"""


@intrinsic
def _shift_tile(context: Any, product: Any, output: Any) -> Any:
    """y[:, output..output + OUTPUTS] += the share of all blocks."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p, output = args
        n, records, gap, n_outputs, y = fields(b, p, "n", "records", "gap", "outputs", "y")
        sums, four = RowsAt(b.add(records, before_sums(b, p)), gap), emit.I64(4)
        results = RowsAt(b.add(y, b.mul(output, four)), b.mul(n_outputs, four))
        shifts = _shifts_at(b, p, output, emit.I64(0))
        for count, x, to in row_groups(b, n, TILE_ROW_COUNTS, sums, results):
            _emit_tile_shifts(count, b, x, shifts, to)
        return context.get_dummy_value()

    return types.none(product, types.intp), build


@intrinsic
def _shift_panel(context: Any, product: Any, output: Any, start: Any, n: Any, memory: Any) -> Any:
    """y[:, output..output + PANEL] += the share of blocks start..start + n."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p, output, start, n_blocks, memory = args
        n, records, gap, n_outputs, y = fields(b, p, "n", "records", "gap", "outputs", "y")
        four, table = emit.I64(4), b.add(memory, emit.I64(SHIFTS_AT))
        _emit_panel_table(b, _shifts_at(b, p, output, start), n_blocks, table)
        sums = RowsAt(b.add(b.add(records, before_sums(b, p)), b.mul(start, four)), gap)
        results = RowsAt(b.add(y, b.mul(output, four)), b.mul(n_outputs, four))
        for count, x, to in row_groups(b, n, PANEL_ROW_COUNTS, sums, results):
            _emit_panel_shifts(count, b, x, n_blocks, table, to)
        return context.get_dummy_value()

    return types.none(product, *[types.intp] * 4), build


def _shifts_at(b: Any, p: Value, output: Value, start: Value) -> ShiftsAt:
    """Those of outputs from ``output`` on, from block ``start`` on, an even one."""
    offsets, zeros, scales, blocks = fields(b, p, "offsets", "zeros", "scales", "blocks")
    floats_before = b.mul(b.add(b.mul(output, blocks), start), emit.I64(4))
    zeros_at = b.add(zeros, b.add(b.mul(output, _bytes_of_zeros(b, blocks)), b.sdiv(start, emit.I64(2))))
    has_zeros = b.icmp_signed("!=", zeros, emit.I64(0))
    return ShiftsAt(
        b.add(offsets, floats_before), b.select(has_zeros, zeros_at, zeros), b.add(scales, floats_before), blocks
    )


def _bytes_of_zeros(b: Any, blocks: Value) -> Value:
    """Of an output's zero points."""
    return b.sdiv(b.add(blocks, emit.I64(1)), emit.I64(2))


def _emit_tile_shifts(n: int, b: Any, x: RowsAt, at: ShiftsAt, y: RowsAt) -> None:
    """y (n, OUTPUTS) += the share of a tile; x: the sums of n rows' blocks."""

    def add_blocks(block: Value, totals: Sequence[Value], n_blocks: Value | None) -> list[Value]:
        sums, result = RowsAt(b.add(x.first, b.mul(block, emit.I64(4))), x.gap), []
        shifts = _shifts(b, OUTPUTS, at, block, n_blocks)
        for m in range(n):
            row_sums = load_some(b, FLOATS, sums.row(b, m), 0, n_blocks, 1)
            row_totals = totals[m * OUTPUTS : (m + 1) * OUTPUTS]
            pairs = zip(shifts, row_totals, strict=True)
            result += [emit.multiply_add(b, shift, row_sums, total) for shift, total in pairs]
        return result

    zeros = [emit.constant(FLOATS, 0.0)] * (n * OUTPUTS)
    with emit.loop(b, emit.I64(0), at.blocks, LANES, zeros) as turn:
        turn.following = add_blocks(turn.i, turn.values, None)
    with emit.loop(b, turn.i, b.add(at.blocks, emit.I64(LANES - 1)), LANES, turn.values) as last:
        last.following = add_blocks(last.i, last.values, b.sub(at.blocks, last.i))
    for m in range(n):
        added = emit.totals(b, last.values[m * OUTPUTS : (m + 1) * OUTPUTS])
        to = y.row(b, m)
        emit.store(b, b.fadd(emit.load(b, added.type, to), added), to)


def _emit_panel_table(b: Any, at: ShiftsAt, n: Value, table: Value) -> None:
    """table [block][output] float32 = shifts of a panel's blocks 0..n."""
    zeros_gap = b.select(b.icmp_signed("!=", at.zeros, emit.I64(0)), _bytes_of_zeros(b, at.blocks), emit.I64(0))
    with emit.loop(b, emit.I64(0), emit.I64(PANEL), LANES) as output:
        floats_before = b.mul(b.mul(output.i, at.blocks), emit.I64(4))
        those = ShiftsAt(
            b.add(at.offsets, floats_before),
            b.add(at.zeros, b.mul(output.i, zeros_gap)),
            b.add(at.scales, floats_before),
            at.blocks,
        )
        column = b.add(table, b.mul(output.i, emit.I64(4)))
        with emit.loop(b, emit.I64(0), b.add(n, emit.I64(LANES - 1)), LANES) as block:
            shifts = _shifts(b, LANES, those, block.i, b.sub(n, block.i))
            for i, of_outputs in enumerate(transposed(b, shifts)):
                emit.store(b, of_outputs, b.add(column, b.mul(block.i, emit.I64(4 * PANEL))), 4 * PANEL * i)


def _emit_panel_shifts(n: int, b: Any, x: RowsAt, n_blocks: Value, table: Value, y: RowsAt) -> None:
    """y (n, PANEL) += the share of a panel; x: the sums of n rows' blocks, table: `_emit_panel_table`'s."""
    zeros = [emit.constant(FLOATS, 0.0)] * (n * PANEL_VECTORS)
    with emit.loop(b, emit.I64(0), n_blocks, 1, zeros) as block:
        shifts_at, before = b.add(table, b.mul(block.i, emit.I64(4 * PANEL))), b.mul(block.i, emit.I64(4))
        shifts = [emit.load(b, FLOATS, shifts_at, VECTOR * i) for i in range(PANEL_VECTORS)]
        block.following = []
        for m in range(n):
            row_sum = emit.splat(b, emit.load(b, emit.F32, b.add(x.row(b, m), before)), LANES)
            totals = block.values[m * PANEL_VECTORS : (m + 1) * PANEL_VECTORS]
            block.following += [emit.multiply_add(b, row_sum, *pair) for pair in zip(shifts, totals, strict=True)]
    for i, total in enumerate(block.values):
        m, vector = divmod(i, PANEL_VECTORS)
        to = b.add(y.row(b, m), emit.I64(VECTOR * vector))
        emit.store(b, b.fadd(emit.load(b, FLOATS, to), total), to)


def _shifts(b: Any, n_outputs: int, at: ShiftsAt, block: Value, n: Value | None) -> list[Value]:
    """Of LANES blocks from an even one on, a vector for each output; n: how many blocks there are, None: all."""
    gap, before = b.mul(at.blocks, emit.I64(4)), b.mul(block, emit.I64(4))

    def floats(start: Value, o: int) -> Value:
        return load_some(b, FLOATS, b.add(b.add(start, before), b.mul(gap, emit.I64(o))), 0, n, 1)

    def of_zeros() -> list[Value]:
        start, zeros_gap = b.add(at.zeros, b.sdiv(block, emit.I64(2))), _bytes_of_zeros(b, at.blocks)
        n_bytes = None if n is None else _bytes_of_zeros(b, n)
        kind, order = emit.vector(emit.I8, LANES // 2), [i // 2 + i % 2 * LANES // 2 for i in range(LANES)]
        found = []
        for o in range(n_outputs):
            both = load_some(b, kind, b.add(start, b.mul(zeros_gap, emit.I64(o))), 0, n_bytes, 1)
            low, high = b.and_(both, emit.constant(kind, 15)), b.lshr(both, emit.constant(kind, 4))
            codes = b.zext(emit.lanes(b, low, order, high), INTS)
            away = b.sitofp(b.sub(emit.constant(INTS, ZERO), codes), FLOATS)
            found.append(b.fmul(away, floats(at.scales, o), flags=emit.CONTRACT))
        return found

    def of_offsets() -> list[Value]:
        if n is None:
            for o in range(n_outputs):
                ahead = b.add(b.add(at.offsets, before), b.mul(gap, emit.I64(o + OUTPUTS * TILES_AHEAD)))
                emit.prefetch(b, ahead, VECTOR)
        return [floats(at.offsets, o) for o in range(n_outputs)]

    return emit.either(b, b.icmp_signed("!=", at.zeros, emit.I64(0)), of_zeros, of_offsets)
