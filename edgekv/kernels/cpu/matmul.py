"""Products of activations with weights: quantized ones, those of chosen experts, and float32.

The terms are those of `gemm`. Weights of 2 to 8 bits are read as the store has them; activations are rounded
to bytes, row by row. Products of bytes are summed in int32 over a unit, then multiplied by both scales in float32.
Up to GEMV_ROWS rows take the steps of one row, in tiles of OUTPUTS outputs: a token's logits do not depend on what
else is computed with it. More rows go through panels.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from edgekv.kernels import threads
from edgekv.kernels.cpu import emit, launch
from edgekv.kernels.cpu.blocks import BLOCK_WEIGHTS, GROUP, GROUPS, BlockType
from edgekv.kernels.cpu.compile import fast_jit, intrinsic, jit
from edgekv.kernels.cpu.emit import Value
from edgekv.kernels.cpu.gemm import (
    BYTE_CODES,
    CORRECTION,
    OUTPUTS,
    PANEL,
    PANEL_BYTES,
    PANEL_K,
    PRODUCTS,
    VECTOR,
    CodeLayout,
    Product,
    fields,
    layout_of,
    multiply_tiles,
)
from edgekv.kernels.cpu.launch import RangeKernel
from edgekv.kernels.cpu.loops import (
    address_of,
    aligned_size,
    call,
    exact_loop,
    floats,
    int64s,
    load_arguments,
    load_tuple,
    scratch_memory,
)
from edgekv.kernels.cpu.rope import hadamard_vector
from edgekv.kernels.cpu.rows import score_rows
from edgekv.kernels.cpu.scalar import ROUND, get, put
from edgekv.kernels.interface import GEMV_ROWS
from edgekv.kernels.weight_codes import FLIPS
from edgekv.machine import blas_threads
from edgekv.types import F32, I64, U8, Array, Threads


class QuantizedWeights(NamedTuple):
    """Weights (outputs, columns) in blocks of a format, as `edgekv.weights.formats` packs them.

    The last block of an output is padded. At most one of offsets and zeros is there. With a
    block_type, codes are raw GGUF blocks (outputs, bytes), and scales is None.
    """

    codes: U8  # (outputs, blocks, layout.block_bytes)
    scales: Array | None  # (outputs, blocks) float32, or bits of bfloat16 where elements are rotated
    layout: CodeLayout
    offsets: F32 | None = None  # (outputs, blocks)
    zeros: U8 | None = None  # (outputs, blocks), the codes that stand for 0
    block_type: BlockType | None = None

    def product_fields(self) -> tuple[int, ...]:
        """Returns the last fields of a `Product` with these weights, which must stay alive.

        Raises ValueError for offsets or zeros in a format whose products have none.
        """
        layout, kind, arrays = self.layout, self.block_type, (self.codes, self.scales, self.offsets, self.zeros)
        corrections = self.offsets is not None or self.zeros is not None
        if corrections and not layout.has_corrections:
            accepted = "whole numbers of 4 bits, or of 8 in blocks of 16"
            raise ValueError(f"weights in {layout} with zero points or offsets; accepted: {accepted}")
        blocks = self.codes.shape[1] // kind.n_bytes * GROUPS if kind else self.codes.shape[1]
        codes, *others = (0 if array is None else address_of(array) for array in arrays)
        correction = CORRECTION.address if corrections or (kind and kind.has_offsets) else 0
        sizes, decode = (blocks, layout.row_bytes(blocks)), kind.loop.address if kind else 0
        return *sizes, codes, self.codes.strides[0], *others, correction, decode


ZERO = np.float32(0)
INT8_MAX = 127
MIN_PEAK = np.float32(1e-30)  # of max|x|: all elements are 0 below it
NO_SIGN, INFINITE = 0x7FFFFFFF, 0x7F800000  # numbers without signs are in the order of their bits, NaN behind all
EXACT = ("nsz",)
PREFETCH_BLOCKS = 8  # of x, which are fetched


@fast_jit
def prepare_rows(first: int, last: int, tail: int, p: Product, block: int, unit_blocks: int) -> None:
    """Rounds rows first..last of x, padded with zeros.

    tail: scratch for a block of float32. block: elements of one. unit_blocks: of a unit.
    """
    n_whole, n_units = p.columns // block, (p.blocks + unit_blocks - 1) // unit_blocks
    for m in range(first, last):
        row, target = p.x + 4 * m * p.columns, p.rounded + m * p.row_bytes
        for b in range(n_whole):
            _quantize_block(p, row + 4 * b * block, target, b, m)
        for b in range(n_whole, n_units * unit_blocks):
            for i in range(block):
                column = b * block + i
                put(floats(tail), i, get(floats(row), column) if column < p.columns else ZERO)
            _quantize_block(p, tail, target, b, m)


@intrinsic
def _quantize_block(context: Any, product: Any, x: Any, row: Any, block: Any, m: Any) -> Any:
    """Rounds block ``block`` of row m, x (block size,) float32, into its place in the rounded row."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        layout, (p, x, row, block, m) = layout_of(product), args
        blocks, sums, correction = fields(b, p, "blocks", "sums", "correction")
        # Padding blocks have no place in `sums`: their 0 is written over their own scratch.
        sum_at = b.select(b.icmp_signed("<", block, blocks), emit.at(b, sums, (m, blocks, 4), (block, 4)), x)
        is_plain = b.icmp_signed("==", correction, emit.I64(0))
        zero = b.select(is_plain, emit.I32(layout.zero_point), emit.I32(layout.code_0))
        write = functools.partial(_emit_quantized_block, layout)
        emit.call_internal(b, "quantize_block", write, x, row, block, sum_at, zero)
        return context.get_dummy_value()

    return types.none(product, *[types.intp] * 4), build


def _emit_quantized_block(
    layout: CodeLayout, b: Any, x: Value, row: Value, block: Value, sum_at: Value, zero: Value
) -> None:
    """Rounds one block; sum_at: where its elements' sum goes, for corrections; zero: the weights' zero point."""
    n = layout.block
    floats, ints = emit.vector(emit.F32, n), emit.vector(emit.I32, n)
    emit.prefetch(b, emit.at(b, x, PREFETCH_BLOCKS * 4 * n), 4 * n)
    elements = emit.load(b, floats, x)
    if layout.rotated:
        flipped = b.fmul(elements, ir.Constant(floats, FLIPS.tolist()), flags=EXACT)
        root = emit.constant(floats, float(np.float32(1 / np.sqrt(n))))
        elements = b.fmul(hadamard_vector(b, flipped), root, flags=EXACT)
    sizes = b.and_(b.bitcast(elements, ints), emit.constant(ints, NO_SIGN))
    top = emit.call(b, f"llvm.vector.reduce.smax.v{n}i32", emit.I32, sizes)
    peak, is_finite = b.bitcast(top, emit.F32), b.icmp_signed("<", top, emit.I32(INFINITE))
    is_nothing = b.icmp_signed("<", top, emit.I32(int(MIN_PEAK.view(np.int32))))
    factor = b.select(is_nothing, emit.F32(0.0), b.fdiv(emit.F32(float(INT8_MAX)), peak))
    scale = b.select(is_nothing, emit.F32(0.0), b.fmul(peak, emit.F32(float(np.float32(1 / INT8_MAX)))))
    scale = b.select(is_finite, scale, emit.F32(float("nan")))
    # Not fused: a fused one would round other halves than processors without it.
    shifted = b.fadd(
        b.fmul(elements, emit.splat(b, factor, n), flags=EXACT), emit.constant(floats, ROUND), flags=EXACT
    )
    rounded = b.sub(b.bitcast(shifted, ints), emit.constant(ints, int(ROUND.view(np.int32))))
    unit, run = b.sdiv(block, emit.I64(layout.unit_blocks)), layout.run
    inside = b.mul(b.srem(block, emit.I64(layout.unit_blocks)), emit.I64(run))
    address = emit.at(b, row, (unit, layout.unit_bytes), inside)
    for v in range(layout.vectors):
        some = emit.shuffle(b, rounded, layout.elements(v))
        emit.store(b, b.trunc(some, emit.vector(emit.I8, run)), address, v * VECTOR)
    total = emit.reduce_sum(b, rounded)
    if layout.has_corrections:
        emit.store(b, b.fmul(b.sitofp(total, emit.F32), scale), sum_at)
    sums = emit.constant(emit.vector(emit.I32, run // 4), 0)
    first = b.mul(total, b.neg(zero))
    emit.store(b, b.insert_element(sums, first, emit.I32(0)), address, layout.sums_at)
    emit.store(b, emit.splat(b, scale, run // 4), address, layout.scales_at)


# Kernels get the number of products, and of their tiles (or panels) together, then each product.
N_PRODUCTS, N_TILES, N_HEADER = range(3)
N_FIELDS = len(Product._fields)
FIRST_ROW, FIRST_TILE, TILES, X, N, IS_PANEL, ROUNDED, SUMS, Y = (
    Product._fields.index(name)
    for name in ("first_row", "first_tile", "tiles", "x", "n", "is_panel", "rounded", "sums", "y")
)
CODES, CODE_BYTES, SCALES, OFFSETS, ZEROS = (
    Product._fields.index(name) for name in ("codes", "code_bytes", "scales", "offsets", "zeros")
)
MIN_PARALLEL_ELEMENTS = 1 << 17  # from which rows are prepared by all threads


class QuantizedMatmul:
    """A product with quantized weights (outputs, columns), or with those of each row's expert."""

    def __init__(self, weights: QuantizedWeights, n_experts: int = 1) -> None:
        """Takes the weights' addresses. Raises ValueError for an expert of fewer than OUTPUTS outputs."""
        self._weights, self._fields, self._kernels = weights, weights.product_fields(), kernels_for(weights.layout)
        (blocks, self._row_bytes), block = self._fields[:2], weights.layout.block
        self._scratch_bytes, self._sums_bytes = scratch_bytes(blocks), 4 * blocks
        self._outputs = len(weights.codes) // n_experts
        self._widths = range((blocks - 1) * block + 1, blocks * block + 1)  # the last block may be padded
        if self._outputs < OUTPUTS:
            raise ValueError(f"weights of {self._outputs} rows; accepted: {OUTPUTS} or more")

    def __call__(self, x: F32, n_threads: int | None = None, experts: I64 | None = None) -> F32:
        """Returns x (n, columns) times the transpose of the weights, or of each row's expert's part: (n, outputs).

        A row with a number that is infinite or NaN becomes NaN. n_threads: None, all of `threads.count()`. experts
        (n,): each row's, ascending. Raises ValueError for x of another type or width.
        """
        x = np.ascontiguousarray(x)
        (n, columns), outputs = x.shape, self._outputs
        if x.dtype != np.float32 or columns not in self._widths:
            first, last = self._widths[0], self._widths[-1]
            raise ValueError(f"{columns} columns of {x.dtype}; accepted: float32, {first} to {last} columns")
        n_threads = n_threads or threads.count()
        is_panel, n_tiles = tiles_of(n, outputs)
        rows_bytes, sums_bytes = (aligned_size(n * size) for size in (self._row_bytes, self._sums_bytes))
        memory = scratch_memory("products", rows_bytes + sums_bytes + n_threads * self._scratch_bytes)
        y, sums = np.empty((n, outputs), np.float32), memory + rows_bytes
        rows = 0, 0, n_tiles, address_of(x), n, columns, is_panel, memory, sums
        product = *rows, outputs, address_of(y), sums + sums_bytes, *self._fields
        arguments = np.array((1, n_tiles, *product), np.int64)
        if experts is not None:
            whole, experts = arguments, np.ascontiguousarray(experts)
            arguments = np.empty(N_HEADER + n * N_FIELDS, np.int64)
            template = address_of(whole) + 8 * N_HEADER
            scale_bytes = self._weights.layout.scale_bytes
            _split_by_expert.call(template, scale_bytes, address_of(experts), n, address_of(arguments))
        n_threads = n_threads if n * outputs * columns >= launch.MIN_PARALLEL_WORK else 1
        prepare, multiply = self._kernels
        prepare.run(n, address_of(arguments), n_threads if n * columns >= MIN_PARALLEL_ELEMENTS else 1)
        multiply.run(int(arguments[N_TILES]), address_of(arguments), n_threads)
        return y


def tiles_of(n: int, n_outputs: int) -> tuple[bool, int]:
    """Returns whether n rows go through panels, and the number of panels or tiles of the outputs.

    The last tile or panel also takes the outputs that fill no tile.
    """
    is_panel = n > GEMV_ROWS and n_outputs >= PANEL
    return is_panel, n_outputs // (PANEL if is_panel else OUTPUTS)


@functools.cache
def kernels_for(layout: CodeLayout) -> tuple[RangeKernel, RangeKernel]:
    """Returns the kernel that prepares rows, and the one that multiplies tiles or panels with them.

    Their items are the rows, and the tiles or panels, of all products.
    """
    product, block = PRODUCTS[layout], layout.block
    unit_blocks, panel_blocks = layout.unit_blocks, PANEL_K // block
    may_decode = layout == BYTE_CODES

    @RangeKernel
    def prepare(first: int, last: int, thread: int, arguments: int) -> None:
        for i in range(get(int64s(arguments), N_PRODUCTS)):
            address = arguments + 8 * (N_HEADER + i * N_FIELDS)
            p = load_tuple(product, address)
            a, b = max(first - p.first_row, 0), min(last - p.first_row, p.n)
            if a < b:
                prepare_rows(a, b, p.scratch + thread * _scratch_bytes(p.blocks), p, block, unit_blocks)

    @RangeKernel
    def multiply(first: int, last: int, thread: int, arguments: int) -> None:
        for i in range(get(int64s(arguments), N_PRODUCTS)):
            address = arguments + 8 * (N_HEADER + i * N_FIELDS)
            p = load_tuple(product, address)
            a, b = max(first - p.first_tile, 0), min(last - p.first_tile, p.tiles)
            if a < b:
                memory = p.scratch + thread * _scratch_bytes(p.blocks)
                if may_decode and p.decode:
                    multiply_decoded(a, b, memory, p, address, panel_blocks)
                else:
                    multiply_tiles(a, b, memory, p, address, panel_blocks)

    return prepare, multiply


_tiles_of = jit(tiles_of)
_DecodedBlocks = PRODUCTS[BYTE_CODES]
MAX_DECODED = 2 * PANEL - 1  # outputs: the last whole panel and those behind it
PRODUCT_BYTES = aligned_size(8 * N_FIELDS)


def scratch_bytes(blocks: int) -> int:
    """Returns the bytes of a thread's scratch for outputs of so many blocks, which may have to be decoded."""
    return PANEL_BYTES + PRODUCT_BYTES + MAX_DECODED * blocks * (GROUP + 8)


_scratch_bytes = jit(scratch_bytes)


@fast_jit
def multiply_decoded(first: int, last: int, memory: int, p: Product, source: int, panel_blocks: int) -> None:
    """Multiplies tiles or panels first..last as `multiply_tiles` does, each after its outputs are decoded.

    Scratch: a panel's, the product's fields, then codes, scales and offsets of outputs.
    """
    size = PANEL if p.is_panel else OUTPUTS
    address = memory + PANEL_BYTES
    codes = address + PRODUCT_BYTES
    scales = codes + MAX_DECODED * p.blocks * GROUP
    offsets, target = scales + MAX_DECODED * p.blocks * 4, int64s(address)
    for i in range(N_FIELDS):
        put(target, i, get(int64s(source), i))
    put(target, CODE_BYTES, p.blocks * GROUP)
    for tile in range(first, last):
        output = tile * size
        n = size if tile + 1 < p.outputs // size else p.outputs - output  # the last has those behind it, too
        call(
            p.decode,
            (p.codes + output * p.code_bytes, n * p.blocks * GROUP // BLOCK_WEIGHTS, codes, scales, offsets),
        )
        before = output * p.blocks  # as if all outputs were there
        put(target, CODES, codes - before * GROUP)
        put(target, SCALES, scales - before * 4)
        put(target, OFFSETS, offsets - before * 4)
        multiply_tiles(tile, tile + 1, memory, load_tuple(_DecodedBlocks, address), address, panel_blocks)


@exact_loop
def _split_by_expert(template: int, scale_bytes: int, experts: int, m: int, arguments: int) -> None:
    """Lays out a product for each expert, from that of all m rows with the first expert's weights.

    scale_bytes: of a block's scale. experts (m,): each row's expert, ascending.
    """
    p, expert_ids = load_tuple(Product, template), int64s(experts)
    first = n_products = n_tiles = 0
    while first < m:
        n = 1
        while first + n < m and get(expert_ids, first + n) == get(expert_ids, first):
            n += 1
        outputs, address = p.outputs * get(expert_ids, first), arguments + 8 * (N_HEADER + n_products * N_FIELDS)
        is_panel, tiles = _tiles_of(n, p.outputs)
        target = int64s(address)
        for field in range(N_FIELDS):
            put(target, field, get(int64s(template), field))
        put(target, X, p.x + 4 * p.columns * first)
        put(target, N, n)
        put(target, IS_PANEL, int(is_panel))
        put(target, ROUNDED, p.rounded + p.row_bytes * first)
        put(target, SUMS, p.sums + 4 * p.blocks * first)
        put(target, Y, p.y + 4 * p.outputs * first)
        put(target, CODES, p.codes + p.code_bytes * outputs)
        put(target, SCALES, p.scales + scale_bytes * p.blocks * outputs)
        put(target, OFFSETS, p.offsets and p.offsets + 4 * p.blocks * outputs)
        put(target, ZEROS, p.zeros and p.zeros + p.blocks * outputs)
        put(target, FIRST_ROW, first)
        put(target, FIRST_TILE, n_tiles)
        put(target, TILES, tiles)
        first, n_products, n_tiles = first + n, n_products + 1, n_tiles + tiles
    put(int64s(arguments), N_PRODUCTS, n_products)
    put(int64s(arguments), N_TILES, n_tiles)


FLOAT_PANEL = 1 << 16  # float32 weights that stay in the second cache while all rows pass
MAX_ROWS = 64  # up to which the kernel is as fast as BLAS, or faster
FLOAT_BLOCK = 512  # outputs that a thread multiplies at a time by BLAS


def float_matmul(x: F32, weights: F32, n_threads: Threads) -> F32:
    """Returns x (n, columns) times the transpose of weights (outputs, columns), contiguous: (n, outputs).

    Up to MAX_ROWS rows by `multiply_rows`. More by NumPy, in blocks of outputs of a thread each: threads of
    BLAS that share a product wait for one another. The blocks do not depend on how many threads there are.
    """
    if len(x) <= MAX_ROWS:
        return multiply_rows(x, weights, n_threads.decode if len(x) <= GEMV_ROWS else n_threads.prompt)
    y = np.empty((len(x), len(weights)), np.float32)
    with blas_threads(1):
        blocks = (slice(a, a + FLOAT_BLOCK) for a in range(0, len(weights), FLOAT_BLOCK))
        pool = _pool(n_threads.prompt)
        for job in [pool.submit(np.matmul, x, weights[block].T, y[:, block]) for block in blocks]:
            job.result()
    return y


@functools.cache
def _pool(n_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_threads, thread_name_prefix="edgekv-products")


def multiply_rows(x: F32, weights: F32, n_threads: int | None = None) -> F32:
    """Returns x (n, columns) times the transpose of weights (outputs, columns), both float32: (n, outputs).

    Each number is one sum over the columns, in the same order for any n and any number of threads (None: of
    `threads.count()`). Raises ValueError for weights that are not contiguous.
    """
    x = np.ascontiguousarray(x, np.float32)
    (n, columns), outputs = x.shape, len(weights)
    n_threads = n_threads or threads.count()
    y = np.empty((n, outputs), np.float32)
    size = max(1, min(FLOAT_PANEL // max(1, columns), outputs // n_threads) // OUTPUTS) * OUTPUTS  # of a panel
    arguments = x, n, columns, weights, outputs, y, size
    _multiply_floats(-(-outputs // size), n * outputs * columns, *arguments, n_threads=n_threads)
    return y


_score = score_rows(4, batch_invariant=True)


@RangeKernel
def _multiply_floats(first: int, last: int, thread: int, arguments: int) -> None:
    x, n, columns, weights, outputs, y, size = load_arguments(arguments, 7)
    for output in range(first * size, min(last * size, outputs), size):
        panel, target, width = weights + 4 * output * columns, y + 4 * output, min(size, outputs - output)
        _score(x, n, panel, columns, width, target, outputs)
