"""Products of a matrix and a few activations, whose time goes into reading the matrix."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgekv.kernels.cuda.driver import Array, Driver, Launch, Macros, Program
from edgekv.kernels.weight_codes import FLIPS, ROTATED_INPUTS, code_planes, level_tables

MATVEC_ROWS = 8  # activations at most; more go through cuBLAS
WARPS, WARPS_OF_TILE = 16, 8  # of a thread block of `packed_matvec`, and of those that share a tile of rows
THREADS, ROWS_AT_ONCE, ROWS_PER_WIDENING = 128, 4, 8  # of a thread block of linear.cu
MAX_GRID_Y = 65535
COMPILED_CHUNKS = (32, 64, 128, 192, 224, 256, 352, 448)  # to which a row's are rounded up, for few programs
# By `Matrix.first_plane_bits`. Of 2 bits, the inputs of 352 chunks would pass the 48 KiB of static shared memory.
MAX_CHUNKS = {2: 224, 4: 448, 8: 448}
TABLE_BYTES = 1 << 16  # of the tables of levels, in shared memory


class Matrix(NamedTuple):
    """A linear layer's weights (rows, columns): numbers of 32 or 16 bits, or codes of fewer bits with scales.

    block: inputs that share a scale. blocks: blocks of a row. scales: (rows, blocks). bias: (rows,).
    corrections: (rows, blocks), what zero points or offsets add to each weight of a block. rotated: whether
    codes stand for rotated weights (`edgekv.weights.gaussian`); their scales are the bits of bfloat16.
    """

    rows: int
    columns: int
    bits: int
    block: int
    blocks: int
    data: Array
    scales: Array | None = None
    bias: Array | None = None
    corrections: Array | None = None
    rotated: bool = False

    @property
    def form(self) -> tuple[int, int, bool]:
        """What programs are compiled for: bits, block, and whether weights are rotated."""
        return self.bits, self.block, self.rotated

    @property
    def first_plane_bits(self) -> int:
        """Bits of the first plane of rotated codes (`code_planes`); of other codes all."""
        return code_planes(self.bits)[0][0] if self.rotated else self.bits

    @property
    def chunks(self) -> int:
        """How many chunks of 16 bytes a row has of the first plane of codes."""
        return self.blocks * self.block * self.first_plane_bits // 128


def matvec(driver: Driver, x: Array, w: Matrix, onto: Array | None = None) -> Array:
    """Returns w times x (n, columns) plus ``onto`` (n, rows), as (n, rows) float32; all are contiguous."""
    n, columns = x.size // w.columns, w.columns
    if w.rotated:
        x, columns = rotated(driver, x.reshape(n, columns), w), w.blocks * w.block
    y = driver.empty((n, w.rows), np.float32)
    threads = min(THREADS, -(-columns // 256) * 32)
    launch = Launch(linear_program(*w.form), "matvec", (-(-w.rows // ROWS_AT_ONCE), n), threads)
    driver.launch(launch, w.data, w.scales, w.bias, onto, x, w.rows, columns, w.blocks, y)
    return y


def rotated(driver: Driver, x: Array, w: Matrix) -> Array:
    """Returns x (n, columns), float16 or float32, rotated for w, (n, blocks * ROTATED_INPUTS)."""
    y = driver.empty((len(x), w.blocks * ROTATED_INPUTS), x.dtype)
    launch = Launch(rotated_program(w.bits), "rotate", (-(-w.blocks * 8 // THREADS), len(x)), THREADS)
    driver.launch(launch, x, w.columns, w.blocks, int(x.dtype == np.float16), y)
    return y


def widen(driver: Driver, w: Matrix, rows: slice, dtype: npt.DTypeLike) -> Array:
    """Returns some rows of a matrix as float16 or float32 (rows, columns); rotated ones in whole blocks."""
    n, columns = rows.stop - rows.start, w.blocks * w.block if w.rotated else w.columns
    out = driver.empty((n, columns), dtype)
    grid = -(-columns // (8 * 256)), min(-(-n // ROWS_PER_WIDENING), MAX_GRID_Y)
    launch = Launch(linear_program(*w.form), "widen", grid, 256)
    scales = None if w.scales is None else w.scales[rows]
    driver.launch(launch, w.data[rows], scales, n, columns, w.blocks, out, int(dtype == np.float16))
    return out


def takes_packed(driver: Driver, w: Matrix) -> bool:
    """Returns whether `packed_matvec` takes a matrix: uncorrected codes, rows of whole fours, not too long."""
    is_packed = driver.has_integer_mma and w.bits < 16 and w.corrections is None and w.columns % 4 == 0
    return is_packed and w.chunks <= MAX_CHUNKS[w.first_plane_bits] and w.data.nbytes < 1 << 32


def packed_matvec(
    driver: Driver,
    x: Array,
    w: Matrix,
    *,
    onto: Array | None = None,
    norm: tuple[Array, float] | None = None,
    gate: int | None = None,
) -> Array:
    """Returns what `matvec` returns, for codes from sm_80 on, together with an RMS norm or a gate's activation.

    norm: (weights, eps) of an RMS norm that x goes through first. gate: the number of an activation; the result
    (n, rows / 2) is then the activation of the first half of the rows times the second half.
    """
    n, outputs = x.size // w.columns, w.rows if gate is None else w.rows // 2
    tiles = -(-outputs // (16 if gate is None else 8))  # of 16 rows
    warps = min(WARPS_OF_TILE, 1 << (-(-w.chunks // 8)).bit_length() - 1)  # each has 128 bytes of a row
    grid = min(tiles, driver.multiprocessors), n
    program = packed_program(*w.form, w.chunks, warps)
    shared = TABLE_BYTES if w.rotated else 0
    launch = Launch(program, "tiled_matvec", grid, 32 * WARPS, early=True, shared=shared)
    y = driver.empty((n, outputs), np.float32)
    weight, eps = norm or (None, 0.0)
    added = w.bias, onto, weight, float(eps), -1 if gate is None else gate
    driver.launch(launch, w.data, w.scales, *added, x, outputs, w.columns, w.blocks, y)
    return y


@functools.cache
def linear_program(bits: int, block: int, rotated: bool = False) -> Program:
    """Returns linear.cu for weights of this form."""
    return Program(("levels", "linear"), _form_macros(bits, block, rotated))


@functools.cache
def rotated_program(bits: int) -> Program:
    """Returns rotated.cu for weights of 2 to 5 bits."""
    return Program(("levels", "rotated"), _form_macros(bits, ROTATED_INPUTS, True))


@functools.cache
def packed_program(bits: int, block: int, rotated: bool, chunks: int, warps: int) -> Program:
    """Returns tiled_linear.cu for weights of this form; chunks: of 16 bytes in a row; warps: for a tile."""
    size = next(size for size in COMPILED_CHUNKS if size >= chunks)
    sizes = ("MAX_SPANS", size // 8), ("WARPS_OF_TILE", warps), ("N_WARPS", WARPS)
    return Program(("levels", "tiled_linear"), (*_form_macros(bits, block, rotated), *sizes))


def _form_macros(bits: int, block: int, rotated: bool) -> Macros:
    macros: Macros = ("WEIGHT_BITS", bits), ("BLOCK_INPUTS", block)
    if not rotated:
        return macros
    levels = level_tables(bits).ravel().view(np.uint32)
    flips = np.packbits(FLIPS < 0, bitorder="little").view(np.uint32)
    return *macros, ("LEVELS", ",".join(map(hex, levels))), ("FLIPS", ",".join(map(hex, flips)))
