"""Many rows times weights: a panel, PANEL outputs, is unpacked once, side by side, for all rows.

Words are those of `product_rows`. A lane is one output: four elements of a row, in every lane, times four codes of
each of the panel's outputs. A block's sum in int32 then becomes a float32 once for LANES outputs. A panel is
unpacked STRETCH elements at a time, which stay in the first cache while all rows pass.
"""

import functools
from collections.abc import Sequence
from typing import Any

from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.emit import Value
from edgekv.kernels.cpu.jit import fast_jit, intrinsic
from edgekv.kernels.cpu.product_codes import INTS, add_products, load_some, transposed, unpack
from edgekv.kernels.cpu.product_rows import (
    VECTOR,
    CodeLayout,
    OutputsAt,
    Product,
    RowsAt,
    block_size,
    call_shift,
    fields,
    layout_of,
    row_groups,
)
from edgekv.kernels.cpu.simd import LANES

FLOATS = emit.vector(emit.F32, LANES)
PANEL_VECTORS = 2 if emit.REGISTER == 16 else 1  # of a number for each of a panel's outputs
PANEL = PANEL_VECTORS * LANES  # outputs
# Rows that share a panel's loads: the first as many while there are, then the next. Their sums fit the registers.
PANEL_ROW_COUNTS = (6, 2, 1) if emit.REGISTER == 16 else (4, 2, 1)
STRETCH = 1024  # elements of an output, a multiple of every unit
# In a thread's scratch, of a stretch's blocks: codes, a byte each, and behind them float32 for each output, as
# [block][output]: scales, and shifts, which `product_shifts` puts there. No block has fewer than 32 elements.
SCALES_AT = STRETCH * PANEL
SHIFTS_AT = SCALES_AT + STRETCH // 32 * PANEL * 4
PANEL_BYTES = SHIFTS_AT + STRETCH // 32 * PANEL * 4


@fast_jit
def multiply_panels(first: int, last: int, memory: int, p: Product, place: int) -> None:
    """Panels first..last of the whole ones; memory: PANEL_BYTES of scratch; place: the address of p's numbers.

    Outputs behind the last whole panel are a panel that overlaps it. Both add to the same outputs, so that one
    thread has to do both.
    """
    for panel in range(first, last):
        _multiply_outputs(panel * PANEL, memory, p, place)
        if panel == p.outputs // PANEL - 1 and p.outputs % PANEL:
            _multiply_outputs(p.outputs - PANEL, memory, p, place)


@fast_jit
def _multiply_outputs(output: int, memory: int, p: Product, place: int) -> None:
    """Outputs output..output + PANEL, stretch by stretch."""
    step = STRETCH // block_size(p)
    for start in range(0, p.blocks, step):
        n = min(step, p.blocks - start)
        _unpack_panel(p, output, start, n, memory)
        _multiply_panel(p, output, start, n, memory)
        if p.shift:
            call_shift(p.shift, output, start, n, memory, place)


@intrinsic
def _unpack_panel(context: Any, product: Any, output: Any, start: Any, n: Any, memory: Any) -> Any:
    """Blocks start..start + n of PANEL outputs.

    codes as [unit][vector][part][lane][output] words of four codes, scales [block][output].
    """

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p, output, start, n, memory = args
        codes, row_bytes, scales, blocks = fields(b, p, "codes", "row_bytes", "scales", "blocks")
        layout = layout_of(product)
        codes_before = b.add(b.mul(output, row_bytes), b.mul(start, emit.I64(layout.block_bytes)))
        scales_before = b.mul(b.add(b.mul(output, blocks), start), emit.I64(4))
        outputs = OutputsAt(b.add(codes, codes_before), row_bytes, b.add(scales, scales_before), blocks)
        emit.call_own(b, "unpack_panel", functools.partial(_emit_unpack_panel, layout), outputs, n, memory)
        return context.get_dummy_value()

    return types.none(product, *[types.intp] * 4), build


@intrinsic
def _multiply_panel(context: Any, product: Any, output: Any, start: Any, n: Any, memory: Any) -> Any:
    """y of PANEL outputs = or, with start above 0, += what the rows x make of blocks start..start + n."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p, output, start, n_blocks, memory = args
        n, x, gap, n_outputs, y = fields(b, p, "n", "records", "gap", "outputs", "y")
        layout, four = layout_of(product), emit.I64(4)
        records = RowsAt(b.add(x, b.mul(b.sdiv(start, emit.I64(layout.blocks)), emit.I64(layout.record))), gap)
        results = RowsAt(b.add(y, b.mul(output, four)), b.mul(n_outputs, four))
        for count, rows, to in row_groups(b, n, PANEL_ROW_COUNTS, records, results):
            write = functools.partial(_emit_panel_products, layout, count)
            emit.call_own(b, f"multiply_panel_{count}", write, rows, start, n_blocks, memory, to)
        return context.get_dummy_value()

    return types.none(product, *[types.intp] * 4), build


def _emit_unpack_panel(layout: CodeLayout, b: Any, outputs: OutputsAt, n: Value, memory: Value) -> None:
    """n blocks of PANEL outputs."""
    scales_to = b.add(memory, emit.I64(SCALES_AT))
    unit = functools.partial(_emit_unpack_unit, layout, b, outputs, memory, scales_to)
    with emit.loop(b, emit.I64(0), n, layout.blocks) as turn:
        unit(turn.i, None)
    if layout.blocks > 1:
        with emit.loop(b, turn.i, b.add(n, emit.I64(layout.blocks - 1)), layout.blocks) as last:
            unit(last.i, b.sub(n, last.i))


def _emit_unpack_unit(
    layout: CodeLayout,
    b: Any,
    outputs: OutputsAt,
    codes_to: Value,
    scales_to: Value,
    block: Value,
    n_blocks: Value | None,
) -> None:
    """The unit that begins with a block, of PANEL outputs; n_blocks: how many it has, None: all."""
    size = layout.vectors * layout.parts * VECTOR * PANEL // layout.blocks  # of a block's codes
    codes = b.add(outputs.codes, b.mul(block, emit.I64(layout.block_bytes)))
    target = b.add(codes_to, b.mul(block, emit.I64(size)))
    for i in range(PANEL_VECTORS):
        places = [b.add(codes, b.mul(outputs.row_bytes, emit.I64(i * LANES + o))) for o in range(LANES)]
        for v in range(layout.vectors):
            words = [load_some(b, INTS, place, VECTOR * v, n_blocks, LANES // layout.blocks) for place in places]
            for lane, word in enumerate(transposed(b, words)):
                for part, some in enumerate(unpack(b, layout, word)):
                    index = ((v * layout.parts + part) * LANES + lane) * PANEL_VECTORS + i
                    emit.store(b, some, target, index * VECTOR)
    with emit.loop(b, emit.I64(0), emit.I64(PANEL), 1) as output:
        kind = emit.vector(emit.F32, layout.blocks)
        place = b.add(outputs.scales, b.mul(b.add(block, b.mul(outputs.blocks, output.i)), emit.I64(4)))
        scales = load_some(b, kind, place, 0, n_blocks, 1)
        target = b.add(scales_to, b.mul(b.add(b.mul(block, emit.I64(PANEL)), output.i), emit.I64(4)))
        for i in range(layout.blocks):
            emit.store(b, b.extract_element(scales, emit.I32(i)), target, 4 * PANEL * i)


def _emit_panel_products(
    layout: CodeLayout, n: int, b: Any, x: RowsAt, start: Value, n_blocks: Value, memory: Value, y: RowsAt
) -> None:
    """y (n, PANEL) = or += n rows times n_blocks unpacked blocks, to which x begins; = if start is 0."""
    panel_scales = b.add(memory, emit.I64(SCALES_AT))
    end = b.add(n_blocks, emit.I64(layout.blocks - 1))  # what a unit lacks is 0
    zeros = [emit.constant(FLOATS, 0.0)] * (n * PANEL_VECTORS)
    with emit.loop(b, emit.I64(0), end, layout.blocks, zeros) as turn:
        unit = b.sdiv(turn.i, emit.I64(layout.blocks))
        at = RowsAt(b.add(x.first, b.mul(unit, emit.I64(layout.record))), x.gap)
        records = [at.row(b, m) for m in range(n)]
        codes = b.add(memory, b.mul(unit, emit.I64(layout.vectors * layout.parts * VECTOR * PANEL)))
        scales = b.add(panel_scales, b.mul(turn.i, emit.I64(4 * PANEL)))
        for i in range(layout.blocks):
            turn.following = _emit_block_products(layout, b, i, records, codes, scales, turn.following)
    is_first = b.icmp_signed("==", start, emit.I64(0))
    for m in range(n):
        row = y.row(b, m)
        for i in range(PANEL_VECTORS):
            to = b.add(row, emit.I64(VECTOR * i))
            total = turn.values[m * PANEL_VECTORS + i]
            with b.if_else(is_first) as (then, otherwise):
                with then:
                    emit.store(b, total, to)
                with otherwise:
                    emit.store(b, b.fadd(emit.load(b, FLOATS, to), total), to)


def _emit_block_products(
    layout: CodeLayout,
    b: Any,
    block: int,
    records: Sequence[Value],
    codes: Value,
    scales: Value,
    sums: Sequence[Value],
) -> list[Value]:
    """sums (rows, PANEL_VECTORS) of LANES float32 after a block of a unit, whose codes and scales are unpacked."""
    lanes = LANES // layout.blocks
    first = block * lanes  # lane of each vector at which the block begins
    dots = []
    for record in records:
        start = emit.splat(b, emit.load(b, emit.I32, record, layout.sums_at + 4 * first), LANES)
        dots += [start] * PANEL_VECTORS
    for vector in range(layout.vectors * layout.parts):
        with emit.loop(b, emit.I64(first), emit.I64(first + lanes), 4, dots) as turn:
            lane_codes = b.add(codes, b.mul(turn.i, emit.I64(VECTOR * PANEL_VECTORS)))
            for j in range(4):
                offset = (vector * LANES + j) * VECTOR * PANEL_VECTORS
                words = [emit.load(b, INTS, lane_codes, offset + VECTOR * i) for i in range(PANEL_VECTORS)]
                following = []
                for m, record in enumerate(records):
                    place = b.add(record, b.mul(turn.i, emit.I64(4)))
                    four = emit.splat(b, emit.load(b, emit.I32, place, vector * VECTOR + 4 * j), LANES)
                    for i, word in enumerate(words):
                        so_far = turn.following[m * PANEL_VECTORS + i]
                        following.append(add_products(b, layout.bits, word, four, so_far))
                turn.following = following
        dots = turn.values
    result = []
    for m, record in enumerate(records):
        row_scale = emit.splat(b, emit.load(b, emit.F32, record, layout.scales_at + 4 * first), LANES)
        for i in range(PANEL_VECTORS):
            output_scales = emit.load(b, FLOATS, scales, 4 * (PANEL * block + LANES * i))
            dot = b.sitofp(dots[m * PANEL_VECTORS + i], FLOATS)
            scaled = b.fmul(dot, row_scale, flags=emit.CONTRACT)
            result.append(emit.multiply_add(b, scaled, output_scales, sums[m * PANEL_VECTORS + i]))
    return result
