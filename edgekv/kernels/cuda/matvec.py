"""Products of a matrix and a few activations, whose time goes into reading the matrix."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from edgekv.kernels.cuda.driver import Array, Driver, Launch, Program

MATVEC_ROWS = 8  # activations at most; more go through cuBLAS
THREADS, ROWS_PER_BLOCK = 128, 4
MAX_CHUNKS = (32, 64, 128, 192, 256, 352)  # chunks of 16 bytes in a row of packed weights: the compiled sizes


class Matrix(NamedTuple):
    """A linear layer's weights (rows, columns): numbers of 32 or 16 bits, or codes of 8 or 4 bits with scales.

    block: inputs that share a scale. blocks: blocks of a row. scales: (rows, blocks). bias: (rows,). shift:
    (rows, blocks), what zero points or offsets add to each weight of a block.
    """

    rows: int
    columns: int
    bits: int
    block: int
    blocks: int
    data: Array
    scales: Array | None = None
    bias: Array | None = None
    shift: Array | None = None

    @property
    def chunks(self) -> int:
        """How many chunks of 16 bytes a row of codes has."""
        return self.blocks * self.block * self.bits // 128


def matvec(driver: Driver, x: Array, w: Matrix, onto: Array | None = None) -> Array:
    """Returns w times x (n, columns) plus ``onto`` (n, rows), as (n, rows) float32; all are contiguous."""
    n = x.size // w.columns
    y = driver.empty((n, w.rows), np.float32)
    threads = min(THREADS, -(-w.columns // 256) * 32)
    launch = Launch(linear_program(w.bits, w.block), "matvec", (-(-w.rows // ROWS_PER_BLOCK), n), threads)
    driver.launch(launch, w.data, w.scales, w.bias, onto, x, w.rows, w.columns, w.blocks, y)
    return y


def takes_packed(driver: Driver, w: Matrix) -> bool:
    """Returns whether `packed_matvec` takes a matrix: codes without shifts, in rows that are not too long."""
    return driver.has_integer_mma and w.bits < 16 and w.shift is None and w.chunks <= MAX_CHUNKS[-1]


def packed_matvec(
    driver: Driver,
    x: Array,
    w: Matrix,
    *,
    onto: Array | None = None,
    norm: tuple[Array, float] | None = None,
    gate: int | None = None,
) -> Array:
    """Returns what `matvec` returns, for codes from sm_80 on, with what stands before and behind the product.

    norm: (weights, eps) of an RMS norm that x goes through first. gate: the number of an activation; the result
    (n, rows / 2) is then the activation of the first half of the rows times the second half.
    """
    n, outputs = x.size // w.columns, w.rows if gate is None else w.rows // 2
    tiles = -(-outputs // (16 if gate is None else 8))  # of 16 rows
    # Warps of a block and blocks of a multiprocessor: more warps where a block has few tiles.
    warps, blocks = (8, 2) if tiles >= 4 * driver.multiprocessors else (16, 1)
    grid = min(tiles, driver.multiprocessors * blocks), n
    warps = min(warps, 1 << (-(-w.chunks // 8)).bit_length() - 1)  # each has 128 bytes of a row
    program = packed_program(w.bits, w.block, w.chunks, warps, blocks)
    launch = Launch(program, "tiled_matvec", grid, 32 * warps, early=True)
    y = driver.empty((n, outputs), np.float32)
    weight, eps = norm or (None, 0.0)
    added = w.bias, onto, weight, float(eps), -1 if gate is None else gate
    driver.launch(launch, w.data, w.scales, *added, x, outputs, w.columns, w.blocks, y)
    return y


@functools.cache
def linear_program(bits: int, block: int) -> Program:
    """Returns linear.cu for weights of this form."""
    return Program(("linear",), (("WEIGHT_BITS", bits), ("BLOCK", block)))


@functools.cache
def packed_program(bits: int, block: int, chunks: int, warps: int, blocks: int) -> Program:
    """Returns tiled_linear.cu for weights of this form; ``chunks``: chunks of 16 bytes in a row."""
    size = next(size for size in MAX_CHUNKS if size >= chunks)
    sizes = ("WEIGHT_BITS", bits), ("BLOCK", block), ("MAX_SPANS", size // 8)
    return Program(("tiled_linear",), (*sizes, ("WARPS_OF_BLOCK", warps), ("BLOCKS_AT_ONCE", blocks)))
