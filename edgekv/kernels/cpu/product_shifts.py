"""What zero points or offsets of weights add to a product, read as the weight store has them.

A zero point moves each weight of a block by minus itself times the block's scale, an offset by itself: the share
is that times the sum of the block's rounded inputs. Kernels of all formats call `SHIFT` for what they have just
multiplied, while its scales are in the first cache; it is compiled where there are such weights. LANES blocks of a
row of weights go through a vector.
"""

from collections.abc import Sequence
from typing import Any

from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.jit import intrinsic
from edgekv.kernels.cpu.loops import Loop
from edgekv.kernels.cpu.product_codes import INTS, load_some, transposed
from edgekv.kernels.cpu.product_panels import ACROSS, PANEL, ROW_COUNTS, SHIFTS_AT
from edgekv.kernels.cpu.product_rows import OUTPUTS, VECTOR, Product, before_sums, fields, product_at
from edgekv.kernels.cpu.simd import LANES

FLOATS = emit.vector(emit.F32, LANES)
TILE_ROW_COUNTS = 4, 1  # rows of activations at a time, where they are few
TILES_AHEAD = 2  # are fetched
ZERO = 8  # the code of the zero point 0


def _shift(row: int, start: int, n: int, memory: int, place: int) -> None:
    p = product_at(Product, place)
    if p.is_panel:
        _shift_panel(p, row, start, n, memory)
    else:
        _shift_tile(p, row)


SHIFT = Loop(_shift, 5, exact=True)
"""(row, start, n, memory, place): y of the `Product` at a place += the shifts' share, for outputs row...

Of OUTPUTS outputs, or a panel, of which only blocks start..start + n, with its scratch.
"""


@intrinsic
def _shift_tile(context: Any, product: Any, row: Any) -> Any:
    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p, row = args
        n, records, gap, rows, y = fields(b, p, "n", "records", "gap", "outputs", "y")
        sums, four, done = b.add(records, before_sums(b, p)), emit.I64(4), emit.I64(0)
        outputs, y_gap, weights = b.add(y, b.mul(row, four)), b.mul(rows, four), _weights(b, p, row, emit.I64(0))
        for together in TILE_ROW_COUNTS:
            with emit.loop(b, done, n, together) as turn:
                own, target = b.add(sums, b.mul(turn.i, gap)), b.add(outputs, b.mul(turn.i, y_gap))
                _emit_tile(together, b, own, gap, *weights, target, y_gap)
            done = turn.i
        return context.get_dummy_value()

    return types.none(product, types.intp), build


@intrinsic
def _shift_panel(context: Any, product: Any, row: Any, start: Any, n: Any, memory: Any) -> Any:
    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p, row, start, n_blocks, memory = args
        n, records, gap, rows, y = fields(b, p, "n", "records", "gap", "outputs", "y")
        four, done, table = emit.I64(4), emit.I64(0), b.add(memory, emit.I64(SHIFTS_AT))
        _emit_table(b, *_weights(b, p, row, start), n_blocks, table)
        sums = b.add(b.add(records, before_sums(b, p)), b.mul(start, four))
        outputs, y_gap = b.add(y, b.mul(row, four)), b.mul(rows, four)
        for together in ROW_COUNTS:
            with emit.loop(b, done, n, together) as turn:
                own, target = b.add(sums, b.mul(turn.i, gap)), b.add(outputs, b.mul(turn.i, y_gap))
                _emit_panel(together, b, own, gap, n_blocks, table, target, y_gap)
            done = turn.i
        return context.get_dummy_value()

    return types.none(product, *[types.intp] * 4), build


def _weights(b: Any, p: Any, row: Any, start: Any) -> tuple[Any, Any, Any, Any]:
    """Where a row's offsets, zero points and scales are from block ``start`` on, and how many blocks rows have.

    Of offsets or zero points only one is there; zero points are at 0 where there are none.
    """
    offsets, zeros, scales, blocks = fields(b, p, "offsets", "zeros", "scales", "blocks")
    place = b.mul(b.add(b.mul(row, blocks), start), emit.I64(4))
    own = b.add(zeros, b.add(b.mul(row, _bytes_of(b, blocks)), b.sdiv(start, emit.I64(2))))
    has_zeros = b.icmp_signed("!=", zeros, emit.I64(0))
    return b.add(offsets, place), b.select(has_zeros, own, zeros), b.add(scales, place), blocks


def _bytes_of(b: Any, blocks: Any) -> Any:
    """Of their zero points."""
    return b.sdiv(b.add(blocks, emit.I64(1)), emit.I64(2))


def _emit_tile(
    n: int, b: Any, sums: Any, gap: Any, offsets: Any, zeros: Any, scales: Any, blocks: Any, y: Any, y_gap: Any
) -> None:
    """Of n rows of activations and OUTPUTS of weights."""

    def following(i: Any, totals: Sequence[Any], n_blocks: Any) -> list[Any]:
        place, result = b.add(sums, b.mul(i, emit.I64(4))), []
        shifts = _shifts(b, OUTPUTS, offsets, zeros, scales, blocks, i, n_blocks)
        for m in range(n):
            x = load_some(b, FLOATS, b.add(place, b.mul(gap, emit.I64(m))), 0, n_blocks, 1)
            own = totals[m * OUTPUTS : (m + 1) * OUTPUTS]
            result += [emit.multiply_add(b, shift, x, total) for shift, total in zip(shifts, own, strict=True)]
        return result

    with emit.loop(b, emit.I64(0), blocks, LANES, [emit.constant(FLOATS, 0.0)] * (n * OUTPUTS)) as turn:
        turn.following = following(turn.i, turn.values, None)
    with emit.loop(b, turn.i, b.add(blocks, emit.I64(LANES - 1)), LANES, turn.values) as last:
        last.following = following(last.i, last.values, b.sub(blocks, last.i))
    for m in range(n):
        added = emit.totals(b, last.values[m * OUTPUTS : (m + 1) * OUTPUTS])
        here = b.add(y, b.mul(y_gap, emit.I64(m)))
        emit.store(b, b.fadd(emit.load(b, added.type, here), added), here)


def _emit_table(b: Any, offsets: Any, zeros: Any, scales: Any, blocks: Any, n: Any, table: Any) -> None:
    """Shifts of a panel's blocks 0..n as [block][output]."""
    zeros_gap = b.select(b.icmp_signed("!=", zeros, emit.I64(0)), _bytes_of(b, blocks), emit.I64(0))
    with emit.loop(b, emit.I64(0), emit.I64(PANEL), LANES) as across:
        place = b.mul(b.mul(across.i, blocks), emit.I64(4))
        own = b.add(offsets, place), b.add(zeros, b.mul(across.i, zeros_gap)), b.add(scales, place)
        column = b.add(table, b.mul(across.i, emit.I64(4)))
        with emit.loop(b, emit.I64(0), b.add(n, emit.I64(LANES - 1)), LANES) as turn:
            shifts = _shifts(b, LANES, *own, blocks, turn.i, b.sub(n, turn.i))
            for i, outputs in enumerate(transposed(b, shifts)):
                emit.store(b, outputs, b.add(column, b.mul(turn.i, emit.I64(4 * PANEL))), 4 * PANEL * i)


def _emit_panel(n: int, b: Any, sums: Any, gap: Any, n_blocks: Any, table: Any, y: Any, y_gap: Any) -> None:
    """Of n rows of activations and PANEL of weights."""
    with emit.loop(b, emit.I64(0), n_blocks, 1, [emit.constant(FLOATS, 0.0)] * (n * ACROSS)) as turn:
        row, place = b.add(table, b.mul(turn.i, emit.I64(4 * PANEL))), b.mul(turn.i, emit.I64(4))
        shifts = [emit.load(b, FLOATS, row, VECTOR * i) for i in range(ACROSS)]
        turn.following = []
        for m in range(n):
            x = emit.splat(b, emit.load(b, emit.F32, b.add(b.add(sums, b.mul(gap, emit.I64(m))), place)), LANES)
            totals = turn.values[m * ACROSS : (m + 1) * ACROSS]
            turn.following += [emit.multiply_add(b, x, *pair) for pair in zip(shifts, totals, strict=True)]
    for i, total in enumerate(turn.values):
        m, column = divmod(i, ACROSS)
        here = b.add(b.add(y, b.mul(y_gap, emit.I64(m))), emit.I64(VECTOR * column))
        emit.store(b, b.fadd(emit.load(b, FLOATS, here), total), here)


def _shifts(
    b: Any, n_rows: int, offsets: Any, zeros: Any, scales: Any, blocks: Any, block: Any, n: Any
) -> list[Any]:
    """Of LANES blocks from an even one on, a vector for each row; n: how many there are, None: all."""
    gap, place = b.mul(blocks, emit.I64(4)), b.mul(block, emit.I64(4))

    def floats(start: Any, r: int) -> Any:
        return load_some(b, FLOATS, b.add(b.add(start, place), b.mul(gap, emit.I64(r))), 0, n, 1)

    def of_zeros() -> list[Any]:
        start, zeros_gap = b.add(zeros, b.sdiv(block, emit.I64(2))), _bytes_of(b, blocks)
        n_bytes = None if n is None else _bytes_of(b, n)
        kind, order = emit.vector(emit.I8, LANES // 2), [i // 2 + i % 2 * LANES // 2 for i in range(LANES)]
        found = []
        for r in range(n_rows):
            both = load_some(b, kind, b.add(start, b.mul(zeros_gap, emit.I64(r))), 0, n_bytes, 1)
            low, high = b.and_(both, emit.constant(kind, 15)), b.lshr(both, emit.constant(kind, 4))
            codes = b.zext(emit.lanes(b, low, order, high), INTS)
            away = b.sitofp(b.sub(emit.constant(INTS, ZERO), codes), FLOATS)
            found.append(b.fmul(away, floats(scales, r), flags=emit.CONTRACT))
        return found

    def of_offsets() -> list[Any]:
        if n is None:
            for r in range(n_rows):
                ahead = b.add(b.add(offsets, place), b.mul(gap, emit.I64(r + OUTPUTS * TILES_AHEAD)))
                emit.prefetch(b, ahead, VECTOR)
        return [floats(offsets, r) for r in range(n_rows)]

    return emit.either(b, b.icmp_signed("!=", zeros, emit.I64(0)), of_zeros, of_offsets)
