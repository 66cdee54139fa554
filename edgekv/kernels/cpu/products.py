"""Rows of activations times weights of 4 or 8 bits, which are read as the weight store has them.

Words are those of `product_rows`. Products of bytes are summed in int32 for a unit, and times both scales in
float32. A few rows take the same steps as one: a token's logits do not depend on which others are computed with
it. They go through tiles of OUTPUTS outputs, many rows through panels (`product_panels`).
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from edgekv.kernels import threads
from edgekv.kernels.cpu import emit, launch
from edgekv.kernels.cpu.emit import Value
from edgekv.kernels.cpu.jit import fast_jit, intrinsic
from edgekv.kernels.cpu.loops import address_of, aligned_size, scratch_memory
from edgekv.kernels.cpu.product_codes import INTS, add_products, load_some, unpack
from edgekv.kernels.cpu.product_panels import PANEL, PANEL_BYTES, multiply_panels
from edgekv.kernels.cpu.product_rows import (
    OUTPUTS,
    PRODUCTS,
    VECTOR,
    CodeLayout,
    OutputsAt,
    Product,
    RowsAt,
    call_shift,
    fields,
    layout_of,
    product_at,
    row_groups,
)
from edgekv.kernels.cpu.product_weights import PackedWeights
from edgekv.kernels.cpu.quantized_rows import prepare_rows
from edgekv.kernels.cpu.simd import LANES
from edgekv.types import F32

FLOATS = emit.vector(emit.F32, LANES)
AHEAD = 8192  # bytes of codes: fetched into the second cache, as the first has no more room for lines on their way
TILES_AHEAD = 2  # whose scales are fetched
UNITS = 4  # of an output in one pass, where a single row reads it: less lies between loads than one by one
TILE_ROW_COUNTS = 4, 2, 1  # rows that share a tile's loads: fours while there are, then a pair, then one
FEW_ROWS = 8  # more go through panels


class PackedProduct:
    """Products with the same weights (outputs, columns), whose addresses are taken once; at least OUTPUTS."""

    def __init__(self, weights: PackedWeights) -> None:
        """Raises ValueError for fewer outputs."""
        self._weights, self._at, self._stages = weights, weights.at(), stages(weights.layout)
        self._outputs, self._row_bytes = len(weights.scales), self._at.gap + 4 * weights.layout.block
        most = self._at.blocks * weights.layout.block
        self._widths = range(most - weights.layout.block + 1, most + 1)  # the last block may be padded
        if self._outputs < OUTPUTS:
            raise ValueError(f"weights of {self._outputs} rows; accepted: {OUTPUTS} or more")

    def __call__(self, x: F32, n_threads: int | None = None) -> F32:
        """x (n, columns) times the transpose of the weights: (n, outputs).

        A row with a number that is infinite or NaN becomes NaN. n_threads: None, all of `threads.count()`. Raises
        ValueError for x of another type or width.
        """
        x = np.ascontiguousarray(x)
        (n, columns), outputs = x.shape, self._outputs
        if x.dtype != np.float32 or columns not in self._widths:
            first, last = self._widths[0], self._widths[-1]
            raise ValueError(f"{columns} columns of {x.dtype}; accepted: float32, {first} to {last} columns")
        is_panel, n_tiles = tiles_of(n, outputs)
        n_threads = n_threads or threads.count()
        row_bytes = aligned_size(n * self._row_bytes)
        memory = scratch_memory("products", row_bytes + (n_threads * PANEL_BYTES if is_panel else 0))
        y = np.empty((n, outputs), np.float32)
        own = address_of(x), n, columns, is_panel, memory, outputs, address_of(y), memory + row_bytes
        numbers = np.array(own + self._at, np.int64)
        shares = n_threads if n * outputs * columns >= launch.MIN_PARALLEL_WORK else 1
        run(self._stages, numbers, n, n_tiles, n_threads if n >= n_threads else 1, shares)
        return y


def tiles_of(n: int, n_outputs: int) -> tuple[bool, int]:
    """Whether n rows go through panels, and how many panels or tiles of the outputs there are to share out.

    The last whole one has the outputs behind it, too: an output belongs to one.
    """
    is_panel = n > FEW_ROWS and n_outputs >= PANEL
    return is_panel, n_outputs // (PANEL if is_panel else OUTPUTS)


def run(
    both: tuple[launch.Stage, launch.Stage],
    numbers: npt.NDArray[np.int64],
    n: int,
    n_tiles: int,
    preparing: int,
    multiplying: int,
) -> None:
    """The two stages, on so many threads each; rows are prepared on one where the multiplication is."""
    _run(both[0], n, numbers, min(preparing, multiplying))
    _run(both[1], n_tiles, numbers, multiplying)


def _run(stage: launch.Stage, n_items: int, numbers: npt.NDArray[np.int64], n_threads: int) -> None:
    if n_threads == 1:
        stage.run(n_items, numbers)
    else:
        stage.run_parallel(n_items, numbers, n_threads)


def warm_up(layout: CodeLayout) -> None:
    """Compiles what a `PackedProduct` calls for a format."""
    codes, scales = np.zeros((OUTPUTS, 1, layout.block_bytes), np.uint8), np.zeros((OUTPUTS, 1), np.float32)
    PackedProduct(PackedWeights(codes, scales, layout))(np.zeros((1, layout.block), np.float32))
    stages(layout)[1].run_parallel(0, np.zeros(len(Product._fields), np.int64))


@functools.cache
def stages(layout: CodeLayout) -> tuple[launch.Stage, launch.Stage]:
    """What prepares rows, and what multiplies tiles or panels of outputs with them."""
    product = PRODUCTS[layout]

    def prepare(first: int, last: int, part: int, numbers: int) -> None:
        prepare_rows(first, last, product_at(product, numbers))

    def tiles(first: int, last: int, part: int, numbers: int) -> None:
        multiply_tiles(first, last, part, product_at(product, numbers), numbers)

    return launch.Stage(prepare), launch.Stage(tiles)


@fast_jit
def multiply_tiles(first: int, last: int, part: int, p: Product, place: int) -> None:
    """Tiles or panels first..last of the product whose numbers are at a place, with the part's scratch."""
    if p.is_panel:
        multiply_panels(first, last, p.panels + part * PANEL_BYTES, p, place)
        return
    if first < last == p.outputs // OUTPUTS:
        last = (p.outputs + OUTPUTS - 1) // OUTPUTS
    for tile in range(first, last):
        output = min(tile * OUTPUTS, p.outputs - OUTPUTS)
        _multiply_tile(p, p.codes + output * p.row_bytes, p.scales + 4 * output * p.blocks, p.y + 4 * output)
        if p.shift:
            call_shift(p.shift, output, 0, 0, 0, place)


@intrinsic
def _multiply_tile(context: Any, product: Any, codes: Any, scales: Any, y: Any) -> Any:
    """y[m, o] of all rows m and OUTPUTS outputs o, from the tile's codes and scales on."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p, codes, scales, y = args
        x, n, gap, row_bytes, blocks, n_outputs = fields(
            b, p, "records", "n", "gap", "row_bytes", "blocks", "outputs"
        )
        outputs = OutputsAt(codes, row_bytes, scales, blocks)
        results = RowsAt(y, b.mul(n_outputs, emit.I64(4)))
        for count, rows, to in row_groups(b, n, TILE_ROW_COUNTS, RowsAt(x, gap), results):
            write = functools.partial(_emit_tile_products, layout_of(product), count)
            emit.call_own(b, f"multiply_rows_{count}", write, rows, outputs, to)
        return context.get_dummy_value()

    return types.none(product, *[types.intp] * 3), build


def _emit_tile_products(layout: CodeLayout, n: int, b: Any, x: RowsAt, outputs: OutputsAt, y: RowsAt) -> None:
    """y (n, OUTPUTS) = n rows times a tile."""
    scale_bytes = b.mul(outputs.blocks, emit.I64(4))  # of an output
    with emit.loop(b, emit.I64(0), b.mul(scale_bytes, emit.I64(OUTPUTS)), emit.LINE) as turn:
        ahead = b.add(turn.i, b.mul(scale_bytes, emit.I64(OUTPUTS * TILES_AHEAD)))
        emit.prefetch(b, b.add(outputs.scales, ahead), emit.LINE, locality=2)
    if n == 1:  # waits for memory, which is fastest in order
        sums, write = [], functools.partial(_emit_row_product, layout)
        for o in map(emit.I64, range(OUTPUTS)):
            codes = b.add(outputs.codes, b.mul(outputs.row_bytes, o))
            scales = b.add(outputs.scales, b.mul(scale_bytes, o))
            sums.append(
                emit.call_own(b, "multiply_row", write, x.first, codes, scales, outputs.blocks, result=FLOATS)
            )
    else:  # share what is loaded of rows
        unit = functools.partial(_emit_unit, layout, n, OUTPUTS, b, x, outputs)
        sums = _emit_sums(layout, n * OUTPUTS, 1, b, outputs.blocks, unit)
    for m in range(n):
        totals = emit.totals(b, sums[m * OUTPUTS : (m + 1) * OUTPUTS])
        emit.store(b, totals, y.row(b, m))


def _emit_row_product(layout: CodeLayout, b: Any, x: Value, codes: Value, scales: Value, blocks: Value) -> Value:
    """One row times one output: LANES float32, to be added up."""
    zero = emit.I64(0)
    x_row, output = RowsAt(x, zero), OutputsAt(codes, zero, scales, blocks)
    unit = functools.partial(_emit_unit, layout, 1, 1, b, x_row, output)
    return _emit_sums(layout, 1, UNITS, b, blocks, unit)[0]


def _emit_sums(
    layout: CodeLayout, n: int, units: int, b: Any, blocks: Value, unit: Callable[..., list[Value]]
) -> list[Value]:
    """n sums of LANES float32 over all blocks, so many units at a time while there are.

    unit(block, sums, n_blocks): the sums after a unit, as `_emit_unit` has it.
    """
    first, sums = emit.I64(0), [emit.constant(FLOATS, 0.0)] * n
    for at_a_time in sorted({units, 1}, reverse=True):
        with emit.loop(b, first, blocks, at_a_time * layout.blocks, sums) as turn:
            turn.following = turn.values
            for i in range(at_a_time):
                turn.following = unit(b.add(turn.i, emit.I64(i * layout.blocks)), turn.following, None)
        first, sums = turn.i, turn.values
    if layout.blocks > 1:  # what is no whole unit
        end = b.add(blocks, emit.I64(layout.blocks - 1))
        with emit.loop(b, first, end, layout.blocks, sums) as last:
            last.following = unit(last.i, last.values, b.sub(blocks, last.i))
        sums = last.values
    return sums


def _emit_unit(
    layout: CodeLayout,
    n: int,
    n_outputs: int,
    b: Any,
    x: RowsAt,
    outputs: OutputsAt,
    block: Value,
    sums: list[Value],
    n_blocks: Value | None,
) -> list[Value]:
    """sums (n * n_outputs) after the unit that begins with a block; n_blocks: how many it has, None: all."""
    records = RowsAt(b.add(x.first, b.mul(b.sdiv(block, emit.I64(layout.blocks)), emit.I64(layout.record))), x.gap)
    codes_at = b.add(outputs.codes, b.mul(block, emit.I64(layout.block_bytes)))
    codes, scales = [], []  # of each output: the unit's, unpacked, and its blocks', in every lane of theirs
    for o in range(n_outputs):
        start = b.add(codes_at, b.mul(outputs.row_bytes, emit.I64(o)))
        if n_blocks is None:
            emit.prefetch(b, b.add(start, emit.I64(AHEAD)), layout.vectors * VECTOR, locality=2)
        vectors = (
            load_some(b, INTS, start, VECTOR * v, n_blocks, LANES // layout.blocks) for v in range(layout.vectors)
        )
        codes.append([some for vector in vectors for some in unpack(b, layout, vector)])
        scale_at = b.add(outputs.scales, b.mul(b.add(block, b.mul(outputs.blocks, emit.I64(o))), emit.I64(4)))
        each = load_some(b, emit.vector(emit.F32, layout.blocks), scale_at, 0, n_blocks, 1)
        scales.append(emit.lanes(b, each, [lane * layout.blocks // LANES for lane in range(LANES)]))
    following = list(sums)
    for m in range(n):
        record = records.row(b, m)
        elements = [emit.load(b, INTS, record, VECTOR * i) for i in range(layout.vectors * layout.parts)]
        record_sums = emit.load(b, INTS, record, layout.sums_at)
        record_scales = emit.load(b, FLOATS, record, layout.scales_at)
        for o in range(n_outputs):
            dots = record_sums
            for codes_of, elements_of in zip(codes[o], elements, strict=True):
                dots = add_products(b, layout.bits, codes_of, elements_of, dots)
            scaled = b.fmul(b.sitofp(dots, FLOATS), record_scales, flags=emit.CONTRACT)
            i = m * n_outputs + o
            following[i] = emit.multiply_add(b, scaled, scales[o], following[i])
    return following
