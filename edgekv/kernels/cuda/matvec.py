"""A matrix times few activations, where the matrix's bytes are what takes the time."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from edgekv.kernels.cuda.driver import Array, Driver, Launch, Program

MATVEC_ROWS = 8  # activations; more go through cuBLAS
THREADS, ROWS_PER_BLOCK = 128, 4
MOST_CHUNKS = (32, 64, 128, 192, 256, 352)  # of 16 bytes, in a row of packed weights: sizes that are compiled


class Tiling(NamedTuple):
    """How tiled_linear.cu is cut: warps of a block, spans that each has on its way, blocks to a multiprocessor."""

    warps: int = 8
    ahead: int = 2
    blocks: int = 2


TILING, FEW_TILES = Tiling(), Tiling(16, 2, 1)  # the second where a block has few tiles of 16 rows to do


def matvec(
    driver: Driver,
    x: Array,
    matrix: Array,
    *,
    bits: int,
    block: int = 1,
    columns: int | None = None,
    scales: Array | None = None,
    bias: Array | None = None,
    onto: Array | None = None,
) -> Array:
    """(n, rows) float32: x, contiguous, n times `columns` numbers, by 32 or 16 bits or codes of 8 or 4.

    Added to ``onto`` (n, rows), contiguous, where that is given.
    """
    rows = matrix.shape[0]
    columns = columns or matrix.shape[1]
    n = x.size // columns
    y = driver.empty((n, rows), np.float32)
    threads = min(THREADS, -(-columns // 256) * 32)
    launch = Launch(linear_program(bits, block), "matvec", (-(-rows // ROWS_PER_BLOCK), n), threads)
    blocks = 0 if scales is None else scales.shape[1]
    scales, *others = (driver.shift if each is None else each for each in (scales, bias, onto))
    added = others[0], int(bias is not None), others[1], int(onto is not None)
    driver.launch(launch, matrix, scales, *added, x, rows, columns, blocks, y)
    return y


def takes_packed(driver: Driver, bits: int, scales: Array | None, block: int) -> bool:
    """Whether `packed_matvec` takes a matrix with scales (rows, blocks): packed, its rows not too long."""
    return (
        driver.has_whole_tiles
        and bits < 16
        and scales is not None
        and _chunks(bits, scales, block) <= MOST_CHUNKS[-1]
    )


def _chunks(bits: int, scales: Array, block: int) -> int:
    chunks: int = scales.shape[1] * block * bits // 128
    return chunks


def packed_matvec(
    driver: Driver,
    x: Array,
    codes: Array,
    scales: Array,
    *,
    bits: int,
    block: int,
    columns: int,
    bias: Array | None = None,
    onto: Array | None = None,
    norm: tuple[Array, float] | None = None,
    gate: int | None = None,
) -> Array:
    """(n, rows) float32 of codes of 8 or 4 bits times x, contiguous, n times ``columns`` numbers; from sm_80 on.

    onto (n, rows), contiguous: what it is added to. norm: x goes through a RMS norm with these weights and eps
    first. gate: (n, rows / 2), the first half of the rows through the activation of this number, times the second.
    """
    rows, n, chunks = codes.shape[0], x.size // columns, _chunks(bits, scales, block)
    outputs = rows if gate is None else rows // 2
    tiles = -(-outputs // (16 if gate is None else 8))  # of 16 rows
    tiling = TILING if tiles >= 4 * driver.multiprocessors else FEW_TILES
    warps = min(tiling.warps, 1 << (-(-chunks // 8)).bit_length() - 1)  # none without a span
    most = next(size for size in MOST_CHUNKS if size >= chunks)
    macros = (
        *(("WEIGHT_BITS", bits), ("BLOCK", block), ("MOST_SPANS", most // 8)),
        *(("WARPS_OF_BLOCK", warps), ("AHEAD", tiling.ahead), ("BLOCKS_AT_ONCE", tiling.blocks)),
    )
    grid = min(tiles, driver.multiprocessors * tiling.blocks), n
    launch = Launch(Program(("tiled_linear",), macros), "tiled_matvec", grid, 32 * warps, early=True)
    y = driver.empty((n, outputs), np.float32)
    weight, eps = norm or (None, 0.0)
    given = ((driver.shift, 0) if each is None else (each, 1) for each in (bias, onto, weight))
    added = (each for pair in given for each in pair)
    sizes = outputs, columns, scales.shape[1]
    driver.launch(launch, codes, scales, *added, float(eps), -1 if gate is None else gate, x, *sizes, y)
    return y


@functools.cache
def linear_program(bits: int, block: int) -> Program:
    """linear.cu for weights of this form."""
    return Program(("linear",), (("WEIGHT_BITS", bits), ("BLOCK", block)))
