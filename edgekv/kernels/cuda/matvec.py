"""A matrix times few activations, where the matrix's bytes are what takes the time."""

from __future__ import annotations

import functools

import numpy as np

from edgekv.kernels.cuda.program import Array, Driver, Launch, Program

MATVEC_ROWS = 8  # activations; more go through cuBLAS
THREADS, ROWS_PER_BLOCK = 128, 4


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
    per_thread = 128 // bits if bits < 16 else 8
    threads = min(THREADS, -(-columns // (32 * per_thread)) * 32)
    launch = Launch(linear_program(bits, block), "matvec", (-(-rows // ROWS_PER_BLOCK), n), threads)
    blocks = 0 if scales is None else scales.shape[1]
    scales, *others = (driver.shift if each is None else each for each in (scales, bias, onto))
    added = others[0], int(bias is not None), others[1], int(onto is not None)
    driver.launch(launch, matrix, scales, *added, x, rows, columns, blocks, y)
    return y


@functools.cache
def linear_program(bits: int, block: int) -> Program:
    """linear.cu for weights of this form."""
    return Program(("linear",), (("WEIGHT_BITS", bits), ("BLOCK", block)))
