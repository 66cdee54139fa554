"""Many rows of activations times weights: PANEL rows of weights are unpacked once, side by side, for all of them.

A lane is one output: four elements of a row of activations, in every lane, times four codes of each of the
panel's rows. A block's sum in int32 then becomes a float32 once for LANES outputs. A panel is unpacked STRETCH
elements at a time, which stay in the first cache while all rows pass.
"""

import functools
from typing import Any

from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.jit import fast_jit, intrinsic
from edgekv.kernels.cpu.product_codes import INTS, add_products, load_some, transposed, unpack
from edgekv.kernels.cpu.product_rows import VECTOR, CodeLayout, Product, block_size, call_shift, fields, layout_of
from edgekv.kernels.cpu.simd import LANES

FLOATS = emit.vector(emit.F32, LANES)
ACROSS = 2 if emit.REGISTER == 16 else 1  # vectors of outputs
PANEL = ACROSS * LANES  # outputs
ROW_COUNTS = (6, 2, 1) if emit.REGISTER == 16 else (4, 2, 1)  # rows of activations at a time
STRETCH = 1024  # elements of a row of weights, a multiple of every unit
SCALES_AT = STRETCH * PANEL  # bytes, behind a stretch's codes
SHIFTS_AT = SCALES_AT + STRETCH // 32 * PANEL * 4
PANEL_BYTES = SHIFTS_AT + STRETCH // 32 * PANEL * 4


@fast_jit
def multiply_panels(first: int, last: int, memory: int, p: Product, place: int) -> None:
    """Panels first..last of the whole ones; memory: PANEL_BYTES of scratch.

    Outputs behind the last whole panel are a panel that overlaps it. Both add to the same outputs, so that one
    thread has to do both.
    """
    for panel in range(first, last):
        _panel_at(panel * PANEL, memory, p, place)
        if panel == p.outputs // PANEL - 1 and p.outputs % PANEL:
            _panel_at(p.outputs - PANEL, memory, p, place)


@fast_jit
def _panel_at(row: int, memory: int, p: Product, place: int) -> None:
    """Outputs row..row + PANEL."""
    step = STRETCH // block_size(p)
    for start in range(0, p.blocks, step):
        n = min(step, p.blocks - start)
        _unpack_panel(p, row, start, n, memory)
        _multiply_panel(p, row, start, n, memory)
        if p.shift:
            call_shift(p.shift, row, start, n, memory, place)


@intrinsic
def _unpack_panel(context: Any, product: Any, row: Any, start: Any, n: Any, memory: Any) -> Any:
    """Blocks start..start + n of PANEL rows of weights.

    codes as [unit][vector][part][lane][output] words, scales [block][output].
    """

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p, row, start, n, memory = args
        codes, row_bytes, scales, blocks = fields(b, p, "codes", "row_bytes", "scales", "blocks")
        layout = layout_of(product)
        first = b.add(b.mul(row, row_bytes), b.mul(start, emit.I64(layout.block_bytes)))
        sizes = b.mul(b.add(b.mul(row, blocks), start), emit.I64(4))
        codes, scales = b.add(codes, first), b.add(scales, sizes)
        write = functools.partial(_emit_unpack, layout)
        emit.call_own(b, "unpack_panel", write, codes, row_bytes, scales, blocks, n, memory)
        return context.get_dummy_value()

    return types.none(product, *[types.intp] * 4), build


@intrinsic
def _multiply_panel(context: Any, product: Any, row: Any, start: Any, n: Any, memory: Any) -> Any:
    """y of PANEL outputs = or, with start above 0, += what the rows x make of blocks start..start + n."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p, row, start, n_blocks, memory = args
        n, x, gap, rows, y = fields(b, p, "n", "records", "gap", "outputs", "y")
        layout, four, done = layout_of(product), emit.I64(4), emit.I64(0)
        records = b.add(x, b.mul(b.sdiv(start, emit.I64(layout.blocks)), emit.I64(layout.record)))
        outputs, y_gap = b.add(y, b.mul(row, four)), b.mul(rows, four)
        for together in ROW_COUNTS:
            with emit.loop(b, done, n, together) as turn:
                write = functools.partial(_emit_rows, layout, together)
                own, target = b.add(records, b.mul(turn.i, gap)), b.add(outputs, b.mul(turn.i, y_gap))
                name = f"multiply_panel_{together}"
                emit.call_own(b, name, write, own, gap, start, n_blocks, memory, target, y_gap)
            done = turn.i
        return context.get_dummy_value()

    return types.none(product, *[types.intp] * 4), build


def _emit_unpack(
    layout: CodeLayout, b: Any, codes: Any, row_bytes: Any, scales: Any, blocks: Any, n: Any, memory: Any
) -> None:
    targets = memory, b.add(memory, emit.I64(SCALES_AT))
    unit = functools.partial(_emit_unpack_unit, layout, b, codes, row_bytes, scales, blocks, targets)
    with emit.loop(b, emit.I64(0), n, layout.blocks) as turn:
        unit(turn.i, None)
    if layout.blocks > 1:
        with emit.loop(b, turn.i, b.add(n, emit.I64(layout.blocks - 1)), layout.blocks) as last:
            unit(last.i, b.sub(n, last.i))


def _emit_unpack_unit(
    layout: CodeLayout,
    b: Any,
    codes: Any,
    row_bytes: Any,
    scales: Any,
    blocks: Any,
    targets: Any,
    block: Any,
    n: Any,
) -> None:
    place, sizes_place = targets
    size = layout.vectors * layout.parts * VECTOR * PANEL // layout.blocks  # of a block's codes
    at = b.add(codes, b.mul(block, emit.I64(layout.block_bytes)))
    target = b.add(place, b.mul(block, emit.I64(size)))
    for across in range(ACROSS):
        rows = [b.add(at, b.mul(row_bytes, emit.I64(across * LANES + r))) for r in range(LANES)]
        for v in range(layout.vectors):
            words = [load_some(b, INTS, row, VECTOR * v, n, LANES // layout.blocks) for row in rows]
            for lane, word in enumerate(transposed(b, words)):
                for part, some in enumerate(unpack(b, layout, word)):
                    index = ((v * layout.parts + part) * LANES + lane) * ACROSS + across
                    emit.store(b, some, target, index * VECTOR)
    with emit.loop(b, emit.I64(0), emit.I64(PANEL), 1) as turn:
        few = emit.vector(emit.F32, layout.blocks)
        start = b.add(scales, b.mul(b.add(block, b.mul(blocks, turn.i)), emit.I64(4)))
        own = load_some(b, few, start, 0, n, 1)
        target = b.add(sizes_place, b.mul(b.add(b.mul(block, emit.I64(PANEL)), turn.i), emit.I64(4)))
        for i in range(layout.blocks):
            emit.store(b, b.extract_element(own, emit.I32(i)), target, 4 * PANEL * i)


def _emit_rows(
    layout: CodeLayout,
    n: int,
    b: Any,
    x: Any,
    gap: Any,
    start: Any,
    n_blocks: Any,
    memory: Any,
    y: Any,
    y_gap: Any,
) -> None:
    sizes = b.add(memory, emit.I64(SCALES_AT))
    some = b.add(n_blocks, emit.I64(layout.blocks - 1))  # what a unit lacks is 0
    with emit.loop(b, emit.I64(0), some, layout.blocks, [emit.constant(FLOATS, 0.0)] * (n * ACROSS)) as turn:
        unit = b.sdiv(turn.i, emit.I64(layout.blocks))
        record = b.add(x, b.mul(unit, emit.I64(layout.record)))
        rows = [b.add(record, b.mul(gap, emit.I64(m))) for m in range(n)]
        codes = b.add(memory, b.mul(unit, emit.I64(layout.vectors * layout.parts * VECTOR * PANEL)))
        scales = b.add(sizes, b.mul(turn.i, emit.I64(4 * PANEL)))
        for i in range(layout.blocks):
            turn.following = _emit_block(layout, n, b, i, rows, codes, scales, turn.following)
    is_first = b.icmp_signed("==", start, emit.I64(0))
    for m in range(n):
        row = b.add(y, b.mul(y_gap, emit.I64(m)))
        for across in range(ACROSS):
            here = b.add(row, emit.I64(VECTOR * across))
            total = turn.values[m * ACROSS + across]
            with b.if_else(is_first) as (then, otherwise):
                with then:
                    emit.store(b, total, here)
                with otherwise:
                    emit.store(b, b.fadd(emit.load(b, FLOATS, here), total), here)


def _emit_block(
    layout: CodeLayout, n: int, b: Any, i: int, rows: Any, codes: Any, scales: Any, sums: list[Any]
) -> list[Any]:
    """sums (n * ACROSS) after block i of a unit."""
    lanes = LANES // layout.blocks
    first = i * lanes  # lane of each vector at which the block begins
    whole = []
    for m in range(n):
        total = emit.splat(b, emit.load(b, emit.I32, rows[m], layout.sums_at + 4 * first), LANES)
        whole += [total] * ACROSS
    for vector in range(layout.vectors * layout.parts):
        with emit.loop(b, emit.I64(first), emit.I64(first + lanes), 4, whole) as turn:
            at = b.mul(turn.i, emit.I64(VECTOR * ACROSS))
            own = b.add(codes, at)
            for j in range(4):
                offset = (vector * LANES + j) * VECTOR * ACROSS
                words = [emit.load(b, INTS, own, offset + VECTOR * across) for across in range(ACROSS)]
                following = []
                for m in range(n):
                    place = b.add(rows[m], b.mul(turn.i, emit.I64(4)))
                    four = emit.splat(b, emit.load(b, emit.I32, place, vector * VECTOR + 4 * j), LANES)
                    for across in range(ACROSS):
                        so_far = turn.following[m * ACROSS + across]
                        following.append(add_products(b, layout.bits, words[across], four, so_far))
                turn.following = following
        whole = turn.values
    result = []
    for m in range(n):
        size = emit.splat(b, emit.load(b, emit.F32, rows[m], layout.scales_at + 4 * first), LANES)
        for across in range(ACROSS):
            own_size = emit.load(b, FLOATS, scales, 4 * (PANEL * i + LANES * across))
            scaled = b.fmul(b.sitofp(whole[m * ACROSS + across], FLOATS), size, flags=emit.CONTRACT)
            result.append(emit.multiply_add(b, scaled, own_size, sums[m * ACROSS + across]))
    return result
