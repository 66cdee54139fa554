"""Products of rows with chosen parts of one large matrix, which may lie in a mapped file: of the others nothing is
read. What belongs to one part is a product as `products` has it; all of them are shared over the threads together.
"""

from __future__ import annotations

import functools

import numpy as np

from edgekv.kernels import threads
from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.jit import jit
from edgekv.kernels.cpu.loops import Loop, address_of, aligned_size, numbers, scratch_memory
from edgekv.kernels.cpu.product_panels import PANEL_BYTES
from edgekv.kernels.cpu.product_rows import OUTPUTS, PRODUCTS, CodeLayout, Product, product_at, put_product
from edgekv.kernels.cpu.product_weights import PackedWeights
from edgekv.kernels.cpu.products import multiply_tiles, run, tiles_of
from edgekv.kernels.cpu.quantized_rows import prepare_rows
from edgekv.kernels.cpu.scalar import get, put
from edgekv.types import F32, I64

MIN_PARALLEL_ELEMENTS = 1 << 17
# Kernels get the number of products, and of their tiles (or panels) together, then for each product its fields and
# where it stands among all: its first row, its first tile, its tiles.
N_PRODUCTS, N_TILES, BEFORE = range(3)
N_FIELDS = len(Product._fields)
FIRST_ROW, FIRST_TILE, TILES = range(N_FIELDS, N_FIELDS + 3)
N_NUMBERS = N_FIELDS + 3


class ChosenProduct:
    """Products with experts' parts of the same weights: of n_experts with as many outputs, at least OUTPUTS."""

    def __init__(self, weights: PackedWeights, n_experts: int) -> None:
        self._weights, self._at, self._stages = weights, weights.at(), stages(weights.layout)
        self._outputs, self._row_bytes = len(weights.scales) // n_experts, self._at.gap + 4 * weights.layout.block

    def __call__(self, x: F32, experts: I64, n_threads: int | None = None) -> F32:
        """Each row of x (m, columns) times the transpose of its expert's part: (m, outputs of a part).

        experts (m,): each row's, ascending. n_threads: None, all of `threads.count()`.
        """
        x, experts, outputs = np.ascontiguousarray(x), np.ascontiguousarray(experts), self._outputs
        (m, columns), n_threads = x.shape, n_threads or threads.count()
        x_bytes = aligned_size(m * self._row_bytes)
        memory = scratch_memory("products", x_bytes + n_threads * PANEL_BYTES)
        y = np.empty((m, outputs), np.float32)
        own = address_of(x), m, columns, 0, memory, outputs, address_of(y), memory + x_bytes
        first_part = np.array(own + self._at, np.int64)
        given = np.empty(BEFORE + m * N_NUMBERS, np.int64)
        LAY_OUT.call(address_of(first_part), self._row_bytes, address_of(experts), m, address_of(given))
        shares = n_threads if m * outputs * columns >= launch.MIN_PARALLEL_WORK else 1
        preparing = n_threads if m * columns >= MIN_PARALLEL_ELEMENTS else 1
        run(self._stages, given, m, int(given[N_TILES]), preparing, shares)
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
        for i in range(get(numbers(given), N_PRODUCTS)):
            place = given + 8 * (BEFORE + i * N_NUMBERS)
            p, start = product_at(product, place), get(numbers(place), FIRST_ROW)
            a, b = max(first - start, 0), min(last - start, p.n)
            if a < b:
                prepare_rows(a, b, p)

    def tiles(first: int, last: int, part: int, given: int) -> None:
        for i in range(get(numbers(given), N_PRODUCTS)):
            place = given + 8 * (BEFORE + i * N_NUMBERS)
            start, n = get(numbers(place), FIRST_TILE), get(numbers(place), TILES)
            a, b = max(first - start, 0), min(last - start, n)
            if a < b:
                multiply_tiles(a, b, part, product_at(product, place), place)

    return launch.Stage(prepare), launch.Stage(tiles)


def _lay_out(first_part: int, row_bytes: int, experts: int, m: int, given: int) -> None:
    """What kernels get, from the product of all m rows with the first part; experts (m,): each row's, ascending.

    row_bytes: of a rounded row, and of its room for a block.
    """
    p, own_experts = product_at(Product, first_part), numbers(experts)
    first = n_products = n_tiles = 0
    while first < m:
        n = 1
        while first + n < m and get(own_experts, first + n) == get(own_experts, first):
            n += 1
        outputs, place = p.outputs * get(own_experts, first), given + 8 * (BEFORE + n_products * N_NUMBERS)
        is_panel, tiles = _tiles_of(n, p.outputs)
        offsets = p.offsets and p.offsets + 4 * p.blocks * outputs
        zeros = p.zeros and p.zeros + (p.blocks + 1) // 2 * outputs
        own = Product(
            x=p.x + 4 * p.columns * first,
            n=n,
            columns=p.columns,
            is_panel=int(is_panel),
            records=p.records + row_bytes * first,
            outputs=p.outputs,
            y=p.y + 4 * p.outputs * first,
            panels=p.panels,
            blocks=p.blocks,
            gap=p.gap,
            codes=p.codes + p.row_bytes * outputs,
            row_bytes=p.row_bytes,
            scales=p.scales + 4 * p.blocks * outputs,
            offsets=offsets,
            zeros=zeros,
            shift=p.shift,
        )
        put_product(own, place)
        put(numbers(place), FIRST_ROW, first)
        put(numbers(place), FIRST_TILE, n_tiles)
        put(numbers(place), TILES, tiles)
        first, n_products, n_tiles = first + n, n_products + 1, n_tiles + tiles
    put(numbers(given), N_PRODUCTS, n_products)
    put(numbers(given), N_TILES, n_tiles)


_tiles_of = jit(tiles_of)
LAY_OUT = Loop(_lay_out, 5, exact=True)
