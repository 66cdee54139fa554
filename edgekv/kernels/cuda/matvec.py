"""A matrix times few activations, where the matrix's bytes are what takes the time."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from edgekv.kernels.cuda.driver import Array, Driver, Launch, Program

MATVEC_ROWS = 8  # activations; more go through cuBLAS
THREADS, ROWS_PER_BLOCK = 128, 4
MOST_CHUNKS = (32, 64, 128, 192, 256, 352)  # of 16 bytes, in a row of packed weights: sizes that are compiled


class Matrix(NamedTuple):
    """A linear layer (rows, columns): numbers of 32 or 16 bits, or codes of 8 or 4 with scales (rows, blocks).

    bias: (rows,). shift: (rows, blocks), by which each input of a block is multiplied too, where blocks have zero
    points or offsets.
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
        """Of 16 bytes, in a row of codes."""
        return self.blocks * self.block * self.bits // 128


def matvec(driver: Driver, x: Array, w: Matrix, onto: Array | None = None) -> Array:
    """(n, rows) float32: w times x, contiguous, n times w.columns numbers; plus ``onto`` (n, rows), contiguous."""
    n = x.size // w.columns
    y = driver.empty((n, w.rows), np.float32)
    threads = min(THREADS, -(-w.columns // 256) * 32)
    launch = Launch(linear_program(w.bits, w.block), "matvec", (-(-w.rows // ROWS_PER_BLOCK), n), threads)
    driver.launch(launch, w.data, w.scales, w.bias, onto, x, w.rows, w.columns, w.blocks, y)
    return y


def takes_packed(driver: Driver, w: Matrix) -> bool:
    """Whether `packed_matvec` takes a matrix: packed, without shifts, its rows not too long."""
    return driver.has_whole_tiles and w.bits < 16 and w.shift is None and w.chunks <= MOST_CHUNKS[-1]


def packed_matvec(
    driver: Driver,
    x: Array,
    w: Matrix,
    *,
    onto: Array | None = None,
    norm: tuple[Array, float] | None = None,
    gate: int | None = None,
) -> Array:
    """`matvec` of codes, from sm_80 on.

    norm: x goes through a RMS norm with these weights and eps first. gate: (n, rows / 2), the first half of the
    rows through the activation of this number, times the second.
    """
    n, outputs = x.size // w.columns, w.rows if gate is None else w.rows // 2
    tiles = -(-outputs // (16 if gate is None else 8))  # of 16 rows
    # Warps of a block and blocks to a multiprocessor; the second where a block has few tiles to do.
    warps, blocks = (8, 2) if tiles >= 4 * driver.multiprocessors else (16, 1)
    grid = min(tiles, driver.multiprocessors * blocks), n
    warps = min(warps, 1 << (-(-w.chunks // 8)).bit_length() - 1)  # none without 128 bytes of a row
    program = packed_program(w.bits, w.block, w.chunks, warps, blocks)
    launch = Launch(program, "tiled_matvec", grid, 32 * warps, early=True)
    y = driver.empty((n, outputs), np.float32)
    weight, eps = norm or (None, 0.0)
    added = w.bias, onto, weight, float(eps), -1 if gate is None else gate
    driver.launch(launch, w.data, w.scales, *added, x, outputs, w.columns, w.blocks, y)
    return y


@functools.cache
def linear_program(bits: int, block: int) -> Program:
    """linear.cu for weights of this form."""
    return Program(("linear",), (("WEIGHT_BITS", bits), ("BLOCK", block)))


@functools.cache
def packed_program(bits: int, block: int, chunks: int, warps: int, blocks: int) -> Program:
    """tiled_linear.cu for weights of this form with so many chunks in a row."""
    most = next(size for size in MOST_CHUNKS if size >= chunks)
    sizes = ("WEIGHT_BITS", bits), ("BLOCK", block), ("MOST_SPANS", most // 8)
    return Program(("tiled_linear",), (*sizes, ("WARPS_OF_BLOCK", warps), ("BLOCKS_AT_ONCE", blocks)))
