"""Products of rows with chosen parts of one large matrix, which may lie in a mapped file: of the others nothing is
read. What belongs to one part is a product as `products` has it; all of them are shared over the threads together.
"""

from __future__ import annotations

import functools

import numpy as np

from edgekv.kernels import threads
from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.loops import address_of, aligned_size, numbers, scratch_memory
from edgekv.kernels.cpu.product_panels import PANEL_BYTES
from edgekv.kernels.cpu.product_rows import OUTPUTS, PRODUCTS, CodeLayout, Product, product_at
from edgekv.kernels.cpu.product_weights import PackedWeights
from edgekv.kernels.cpu.products import FEW_ROWS, multiply_tiles, run, tiles_of
from edgekv.kernels.cpu.quantized_rows import prepare_rows
from edgekv.kernels.cpu.scalar import get
from edgekv.types import F32, I64

MIN_PARALLEL_ELEMENTS = 1 << 17
# Kernels get the number of products, then for each of them its fields and where it stands among all: its first
# row, its rows, its first tile (or panel), its tiles.
N_FIELDS = len(Product._fields)
FIRST_ROW, ROWS, FIRST_TILE, TILES = range(N_FIELDS, N_FIELDS + 4)
N_NUMBERS = N_FIELDS + 4


class ChosenProduct:
    """Products with parts of the same weights: of n_parts with as many outputs, at least OUTPUTS."""

    def __init__(self, weights: PackedWeights, n_parts: int) -> None:
        self._weights, self._at, self._stages = weights, weights.at(), stages(weights.layout)
        self._outputs, self._row_bytes = len(weights.scales) // n_parts, self._at.gap + 4 * weights.layout.block
        few, many = (tiles_of(n, self._outputs) for n in (FEW_ROWS, FEW_ROWS + 1))
        self._tiles = tuple(zip(few, many, strict=True))

    def __call__(self, x: F32, of: I64, n_threads: int | None = None) -> F32:
        """Each row of x (m, columns) times the transpose of part of[row]: (m, outputs of a part).

        of (m,) ascending. n_threads: None, all of `threads.count()`.
        """
        x, at, outputs = np.ascontiguousarray(x), self._at, self._outputs
        (m, columns), n_threads = x.shape, n_threads or threads.count()
        first = np.append(0, np.flatnonzero(of[1:] != of[:-1]) + 1)  # rows of one part lie between two
        n = np.append(first[1:], m) - first
        x_bytes = aligned_size(m * self._row_bytes)
        memory = scratch_memory("products", x_bytes + n_threads * PANEL_BYTES)
        y = np.empty((m, outputs), np.float32)
        is_panel, n_tiles = (np.where(n > FEW_ROWS, many, few) for few, many in self._tiles)
        tiles_before = n_tiles.cumsum() - n_tiles
        given = np.empty(1 + len(first) * N_NUMBERS, np.int64)
        given[0], fields = len(first), given[1:].reshape(-1, N_NUMBERS).T
        for field, value in zip(
            fields,
            (
                *(address_of(x) + 4 * columns * first, n, columns, is_panel, memory + self._row_bytes * first),
                *(outputs, address_of(y) + 4 * outputs * first, memory + x_bytes),
                *at.from_outputs(outputs * of[first]),
                *(first, n, tiles_before, n_tiles),
            ),
            strict=True,
        ):
            field[:] = value
        shares = n_threads if m * outputs * columns >= launch.MIN_PARALLEL_WORK else 1
        preparing = n_threads if m * columns >= MIN_PARALLEL_ELEMENTS else 1
        run(self._stages, given, m, int(n_tiles.sum()), preparing, shares)
        return y


def warm_up(layout: CodeLayout) -> None:
    """Compiles what a `ChosenProduct` calls for a format."""
    codes, scales = np.zeros((OUTPUTS, 1, layout.block_bytes), np.uint8), np.zeros((OUTPUTS, 1), np.float32)
    product = ChosenProduct(PackedWeights(codes, scales, layout), 1)
    product(np.zeros((1, layout.block), np.float32), np.zeros(1, np.int64))
    stages(layout)[1].run_parallel(0, np.zeros(1, np.int64))


@functools.cache
def stages(layout: CodeLayout) -> tuple[launch.Stage, launch.Stage]:
    """What prepares rows, and what multiplies tiles or panels with them; both are counted over all products."""
    product = PRODUCTS[layout]

    def prepare(first: int, last: int, part: int, given: int) -> None:
        for i in range(get(numbers(given), 0)):
            place = given + 8 * (1 + i * N_NUMBERS)
            start, n = get(numbers(place), FIRST_ROW), get(numbers(place), ROWS)
            a, b = max(first - start, 0), min(last - start, n)
            if a < b:
                prepare_rows(a, b, product_at(product, place))

    def tiles(first: int, last: int, part: int, given: int) -> None:
        for i in range(get(numbers(given), 0)):
            place = given + 8 * (1 + i * N_NUMBERS)
            start, n = get(numbers(place), FIRST_TILE), get(numbers(place), TILES)
            a, b = max(first - start, 0), min(last - start, n)
            if a < b:
                multiply_tiles(a, b, part, product_at(product, place), place)

    return launch.Stage(prepare), launch.Stage(tiles)
