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
    norm: tuple[Array, float] | None = None,
    gate: int | None = None,
) -> Array:
    """(n, rows) float32: x, contiguous, n times `columns` numbers, by 32 or 16 bits or codes of 8 or 4.

    onto (n, rows), contiguous: what it is added to. norm: x goes through a RMS norm with these weights and eps
    first. gate: (n, rows / 2), the first half of the rows through the activation of this number, times the second.
    """
    rows = matrix.shape[0] // (1 if gate is None else 2)
    columns = columns or matrix.shape[1]
    n = x.size // columns
    y = driver.empty((n, rows), np.float32)
    per_thread = 128 // bits if bits < 16 else 8
    threads = min(THREADS, -(-columns // (32 * per_thread)) * 32)
    launch = Launch(linear_program(bits, block), "matvec", (-(-matrix.shape[0] // ROWS_PER_BLOCK), n), threads)
    blocks = 0 if scales is None else scales.shape[1]
    weight, eps = norm or (None, 0.0)
    scales, *others = (driver.shift if each is None else each for each in (scales, bias, onto, weight))
    given = (int(each is not None) for each in (bias, onto, weight))
    added = (each for pair in zip(others, given, strict=True) for each in pair)
    driver.launch(
        launch, matrix, scales, *added, float(eps), -1 if gate is None else gate, x, rows, columns, blocks, y
    )
    return y


@functools.cache
def linear_program(bits: int, block: int) -> Program:
    """linear.cu for weights of this form."""
    return Program(("activations", "linear"), (("WEIGHT_BITS", bits), ("BLOCK", block)))
