"""Rows of activations times weights of 4 or 8 bits, which are read as the weight store has them.

Products of bytes are summed in int32 for a block, or as many blocks as a vector holds, and times both scales in
float32. A few rows take the same steps as one: a token's logits do not depend on which others are computed with
it. Many rows go through panels (`product_panels`).
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from edgekv.kernels import threads
from edgekv.kernels.cpu import emit, launch
from edgekv.kernels.cpu.jit import fast_jit, intrinsic
from edgekv.kernels.cpu.loops import address_of, aligned_size, scratch_memory
from edgekv.kernels.cpu.product_codes import INTS, add_products, load_some, unpack
from edgekv.kernels.cpu.product_panels import PANEL, PANEL_BYTES, multiply_panels
from edgekv.kernels.cpu.product_rows import (
    OUTPUTS,
    PRODUCTS,
    VECTOR,
    CodeLayout,
    Product,
    call_shift,
    fields,
    layout_of,
    prepare_rows,
    product_at,
)
from edgekv.kernels.cpu.product_weights import PackedWeights
from edgekv.kernels.cpu.simd import LANES
from edgekv.types import F32, U8

FLOATS = emit.vector(emit.F32, LANES)
AHEAD = 8192  # bytes of codes: fetched into the second cache, as the first has no more room for lines on their way
TILES_AHEAD = 2  # whose scales are fetched
UNITS = 4  # at a time of weights that one row of activations reads: less between memory's loads than one by one
ROW_COUNTS = 4, 2, 1  # rows of activations at a time
FEW_ROWS = 8


def multiply(x: F32, codes: U8, scales: F32, layout: CodeLayout, n_threads: int | None = None) -> F32:
    """One product with weights that stay nowhere: see `PackedProduct`."""
    return PackedProduct(PackedWeights(codes, scales, layout))(x, n_threads)


class PackedProduct:
    """Products with the same weights (rows, columns), whose addresses are taken once; rows at least OUTPUTS."""

    def __init__(self, weights: PackedWeights) -> None:
        self._weights, self._at, self._stages = weights, weights.at(), stages(weights.layout)
        self._rows, self._row_bytes = len(weights.scales), self._at.gap + 4 * weights.layout.block

    def __call__(self, x: F32, n_threads: int | None = None) -> F32:
        """x (n, columns) times the transpose of the weights: (n, rows).

        A row with a number that is infinite or NaN becomes NaN. n_threads: None, all of `threads.count()`.
        """
        x = np.ascontiguousarray(x)
        (n, columns), rows = x.shape, self._rows
        is_panel, n_tiles = tiles_of(n, rows)
        n_threads = n_threads or threads.count()
        row_bytes = aligned_size(n * self._row_bytes)
        memory = scratch_memory("products", row_bytes + (n_threads * PANEL_BYTES if is_panel else 0))
        y = np.empty((n, rows), np.float32)
        own = address_of(x), n, columns, is_panel, memory, rows, address_of(y), memory + row_bytes
        numbers = np.array(own + self._at, np.int64)
        shares = n_threads if n * rows * columns >= launch.MIN_PARALLEL_WORK else 1
        run(self._stages, numbers, n, n_tiles, n_threads if n >= n_threads else 1, shares)
        return y


def tiles_of(n: int, rows: int) -> tuple[bool, int]:
    """Whether n rows of activations go through panels of so many rows of weights, and the tiles to share out.

    The last whole tile has the rows behind it, too: an output belongs to one.
    """
    is_panel = n > FEW_ROWS and rows >= PANEL
    return is_panel, rows // (PANEL if is_panel else OUTPUTS)


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
    """Compiles what `multiply` calls for a format."""
    codes = np.zeros((OUTPUTS, 1, layout.block_bytes), np.uint8)
    multiply(np.zeros((1, layout.block), np.float32), codes, np.zeros((OUTPUTS, 1), np.float32), layout)
    stages(layout)[1].run_parallel(0, np.zeros(len(Product._fields), np.int64))


@functools.cache
def stages(layout: CodeLayout) -> tuple[launch.Stage, launch.Stage]:
    """What prepares rows of activations, and what multiplies tiles of weights with them."""
    product = PRODUCTS[layout]

    def prepare(first: int, last: int, part: int, numbers: int) -> None:
        prepare_rows(first, last, product_at(product, numbers))

    def tiles(first: int, last: int, part: int, numbers: int) -> None:
        multiply_tiles(first, last, part, product_at(product, numbers), numbers)

    return launch.Stage(prepare), launch.Stage(tiles)


@fast_jit
def multiply_tiles(first: int, last: int, part: int, p: Product, place: int) -> None:
    """Tiles first..last of the outputs of the product whose numbers are at a place, with the part's scratch."""
    if p.is_panel:
        multiply_panels(first, last, p.panels + part * PANEL_BYTES, p, place)
        return
    if first < last == p.rows // OUTPUTS:
        last = (p.rows + OUTPUTS - 1) // OUTPUTS
    for tile in range(first, last):
        row = min(tile * OUTPUTS, p.rows - OUTPUTS)
        _multiply_tile(p, p.codes + row * p.row_bytes, p.scales + 4 * row * p.blocks, p.y + 4 * row)
        if p.shift:
            call_shift(p.shift, row, 0, 0, 0, place)


@intrinsic
def _multiply_tile(context: Any, product: Any, codes: Any, scales: Any, y: Any) -> Any:
    """y[m, r] of all rows m of activations and OUTPUTS rows r of weights."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p, codes, scales, y = args
        x, n, gap, row_bytes, blocks, rows = fields(b, p, "records", "n", "gap", "row_bytes", "blocks", "rows")
        y_gap, done = b.mul(rows, emit.I64(4)), emit.I64(0)
        for together in ROW_COUNTS:
            with emit.loop(b, done, n, together) as turn:
                own, target = b.add(x, b.mul(turn.i, gap)), b.add(y, b.mul(turn.i, y_gap))
                write = functools.partial(_emit_tile, layout_of(product), together)
                name = f"multiply_rows_{together}"
                emit.call_own(b, name, write, own, gap, codes, row_bytes, scales, blocks, target, y_gap)
            done = turn.i
        return context.get_dummy_value()

    return types.none(product, *[types.intp] * 3), build


def _emit_tile(
    layout: CodeLayout,
    n: int,
    b: Any,
    x: Any,
    gap: Any,
    codes: Any,
    row_bytes: Any,
    scales: Any,
    blocks: Any,
    y: Any,
    y_gap: Any,
) -> None:
    scale_bytes = b.mul(blocks, emit.I64(4))
    with emit.loop(b, emit.I64(0), b.mul(scale_bytes, emit.I64(OUTPUTS)), emit.LINE) as turn:
        ahead = b.add(turn.i, b.mul(scale_bytes, emit.I64(OUTPUTS * TILES_AHEAD)))
        emit.prefetch(b, b.add(scales, ahead), emit.LINE, locality=2)
    if n == 1:  # waits for memory, which is fastest in order
        sums, write = [], functools.partial(_emit_row, layout)
        for r in map(emit.I64, range(OUTPUTS)):
            own = b.add(codes, b.mul(row_bytes, r)), b.add(scales, b.mul(scale_bytes, r))
            sums.append(emit.call_own(b, "multiply_row", write, x, *own, blocks, result=FLOATS))
    else:  # share what is loaded of activations
        unit = functools.partial(_emit_unit, layout, n, OUTPUTS, b, x, gap, codes, row_bytes, scales, blocks)
        sums = _emit_sums(layout, n * OUTPUTS, 1, b, blocks, unit)
    for m in range(n):
        totals = emit.totals(b, sums[m * OUTPUTS : (m + 1) * OUTPUTS])
        emit.store(b, totals, b.add(y, b.mul(y_gap, emit.I64(m))))


def _emit_row(layout: CodeLayout, b: Any, x: Any, codes: Any, scales: Any, blocks: Any) -> Any:
    """The sum of one row of activations times one of weights, to be added up."""
    zero = emit.I64(0)
    unit = functools.partial(_emit_unit, layout, 1, 1, b, x, zero, codes, zero, scales, blocks)
    return _emit_sums(layout, 1, UNITS, b, blocks, unit)[0]


def _emit_sums(
    layout: CodeLayout, n: int, units: int, b: Any, blocks: Any, unit: Callable[..., list[Any]]
) -> list[Any]:
    """n sums over all blocks, so many units at a time while there are."""
    first, sums = emit.I64(0), [emit.constant(FLOATS, 0.0)] * n
    for at_a_time in sorted({units, 1}, reverse=True):
        with emit.loop(b, first, blocks, at_a_time * layout.blocks, sums) as turn:
            turn.following = turn.values
            for i in range(at_a_time):
                turn.following = unit(b.add(turn.i, emit.I64(i * layout.blocks)), turn.following, None)
        first, sums = turn.i, turn.values
    if layout.blocks > 1:  # what is no whole vector
        some = b.add(blocks, emit.I64(layout.blocks - 1))
        with emit.loop(b, first, some, layout.blocks, sums) as last:
            last.following = unit(last.i, last.values, b.sub(blocks, last.i))
        sums = last.values
    return sums


def _emit_unit(
    layout: CodeLayout,
    n: int,
    outputs: int,
    b: Any,
    x: Any,
    gap: Any,
    codes: Any,
    row_bytes: Any,
    scales: Any,
    blocks: Any,
    block: Any,
    sums: Any,
    n_blocks: Any,
) -> list[Any]:
    """The n * outputs sums after a unit from a block on; n_blocks: how many it has, None: all."""
    record = b.add(x, b.mul(b.sdiv(block, emit.I64(layout.blocks)), emit.I64(layout.record)))
    at = b.add(codes, b.mul(block, emit.I64(layout.block_bytes)))
    words, sizes = [], []
    for r in range(outputs):
        start = b.add(at, b.mul(row_bytes, emit.I64(r)))
        if n_blocks is None:
            emit.prefetch(b, b.add(start, emit.I64(AHEAD)), layout.vectors * VECTOR, locality=2)
        vectors = (
            load_some(b, INTS, start, VECTOR * v, n_blocks, LANES // layout.blocks) for v in range(layout.vectors)
        )
        words.append([codes_of for vector in vectors for codes_of in unpack(b, layout, vector)])
        size = b.add(scales, b.mul(b.add(block, b.mul(blocks, emit.I64(r))), emit.I64(4)))
        few = load_some(b, emit.vector(emit.F32, layout.blocks), size, 0, n_blocks, 1)
        sizes.append(emit.lanes(b, few, [lane * layout.blocks // LANES for lane in range(LANES)]))
    following = list(sums)
    for m in range(n):
        own = b.add(record, b.mul(gap, emit.I64(m)))
        elements = [emit.load(b, INTS, own, VECTOR * i) for i in range(layout.vectors * layout.parts)]
        middle = emit.load(b, INTS, own, VECTOR * len(elements))
        x_size = emit.load(b, FLOATS, own, VECTOR * (len(elements) + 1))
        for r in range(outputs):
            whole = middle
            for codes_of, x_of in zip(words[r], elements, strict=True):
                whole = add_products(b, layout.bits, codes_of, x_of, whole)
            scaled = b.fmul(b.sitofp(whole, FLOATS), x_size, flags=emit.CONTRACT)
            i = m * outputs + r
            following[i] = emit.multiply_add(b, scaled, sizes[r], following[i])
    return following
