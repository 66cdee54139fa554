"""Weights of 2 to 5 bits: levels for a Gaussian, behind a rotation, with one scale for 128 inputs.

inputs    each 128 of a row go through random signs and a Hadamard transform, in weights and activations alike,
          which leaves their product as it is and makes weights nearly Gaussian (HIGGS, arXiv:2411.17525)
levels    whole numbers that fit a byte, looked up by a shuffle of bytes, as `CODEBOOKS` has them
pairs     inputs i and i + 64 of a block are partners. There are two tables of levels: a code is looked up in the
          first if its partner's code is even, in the second if it is odd. Together they are rounded with less
          squared error than one by one, by 2, 10, 14 and 12% for 2, 3, 4 and 5 bits of a Gaussian
scales    bfloat16, the best of several for each block of a row's 128 inputs
planes    how the codes of a block are packed: `code_planes`
"""

from __future__ import annotations

import functools

import numpy as np

from edgekv.checkpoint.tensors import BFLOAT16
from edgekv.kernels.cpu.compile import inline_jit
from edgekv.kernels.cpu.launch import MIN_PARALLEL_WORK, exact_division_kernel
from edgekv.kernels.cpu.loops import chars, floats, load_arguments
from edgekv.kernels.cpu.scalar import clamp, get, put, where
from edgekv.kernels.weight_codes import FLIPS, ROTATED_INPUTS, code_planes, level_tables
from edgekv.types import F32, U8, Array

BEST_SCALES = {2: 0.03513, 3: 0.04042, 4: 0.04904, 5: 0.06848}
"""By bits, the best scale of `CODEBOOKS` levels for a deviation of 1."""
SQUARED_ERRORS = {2: 0.1146, 3: 0.0310, 4: 0.0082, 5: 0.0022}
"""By bits, the mean squared error of a Gaussian of deviation 1 at that scale; `quantize` searches better ones."""
SCALE_FACTORS = np.arange(0.84, 1.13, 0.04).astype(np.float32)
"""Scales to try, as factors of the one that is best for a Gaussian of the block's deviation."""
HALF = ROTATED_INPUTS // 2
REACH = 128
"""Levels lie within +-REACH. `nearest` is a table in half steps over that range."""


@functools.cache
def rotation() -> F32:
    """Returns R (128, 128), orthogonal: 128 inputs x are rotated to x R."""
    hadamard = np.ones((1, 1), np.float32)
    while len(hadamard) < ROTATED_INPUTS:
        hadamard = np.kron(np.array([[1, 1], [1, -1]], np.float32), hadamard)
    rotated: F32 = FLIPS[:, None] * hadamard / np.float32(np.sqrt(ROTATED_INPUTS))
    return rotated


def rotate(x: F32) -> F32:
    """Returns rows x (n, columns), each 128 columns rotated; the last ones are padded with zeros to 128."""
    columns = x.shape[1]
    padded = x if columns % ROTATED_INPUTS == 0 else np.pad(x, ((0, 0), (0, -columns % ROTATED_INPUTS)))
    return (padded.reshape(-1, ROTATED_INPUTS) @ rotation()).reshape(padded.shape)


def dequantize(codes: U8, scales: Array, bits: int, columns: int) -> F32:
    """Returns the weights (rows, columns) float32 of codes (rows, blocks, 16 bits) and scales (rows, blocks)."""
    unpacked = unpack_planes(codes, bits)
    partners = np.roll(unpacked, HALF, axis=-1)
    levels = level_tables(bits)[partners & 1, unpacked].astype(np.float32)
    levels *= scales.astype(np.float32)[..., None]
    weights: F32 = (levels @ rotation().T).reshape(len(codes), -1)
    return weights[:, :columns]


def pack_planes(codes: U8, bits: int) -> U8:
    """Packs codes (..., 128) of 2 to 5 bits in `code_planes`: (..., 16 bits) bytes."""
    packed = []
    for width, before in code_planes(bits):
        chunks = (codes >> before & (1 << width) - 1).reshape(*codes.shape[:-1], 8 // width, 16 * width)
        shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
        packed.append(np.bitwise_or.reduce(chunks << shifts, axis=-2))
    return np.concatenate(packed, axis=-1)


def unpack_planes(packed: U8, bits: int) -> U8:
    """Returns the codes (..., 128) that `pack_planes` has packed."""
    codes = np.zeros((*packed.shape[:-1], ROTATED_INPUTS), np.uint8)
    for width, before in code_planes(bits):
        plane = packed[..., None, 16 * before : 16 * (before + width)]
        shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
        codes |= (plane >> shifts & (1 << width) - 1).reshape(codes.shape) << before
    return codes


@functools.cache
def nearest(bits: int) -> tuple[U8, F32]:
    """Returns the nearest codes and their levels (2, 2, 4 REACH): [code's parity, its partner's, half step]."""
    tables, half_steps = level_tables(bits), np.arange(-2 * REACH, 2 * REACH)
    found, levels_found = np.empty((2, 2, 4 * REACH), np.uint8), np.empty((2, 2, 4 * REACH), np.float32)
    for parity, partner in np.ndindex(2, 2):
        codes = np.arange(parity, 1 << bits, 2)
        levels = tables[partner, codes].astype(np.int64)
        places = np.searchsorted(levels[:-1] + levels[1:], half_steps, side="right")
        found[parity, partner], levels_found[parity, partner] = codes[places], levels[places]
    return found, levels_found


def quantize(weight: F32, bits: int) -> tuple[U8, Array]:
    """Quantizes weight (r, k), padded with zeros: codes (r, blocks, 16 bits) and scales (r, blocks) bfloat16."""
    rotated = rotate(weight)
    shape = len(weight), rotated.shape[1] // ROTATED_INPUTS
    codes, scales = np.empty((*shape, ROTATED_INPUTS), np.uint8), np.empty(shape, np.float32)
    arrays = rotated, SCALE_FACTORS * np.float32(BEST_SCALES[bits]), *nearest(bits), codes, scales
    numbers = shape[1], len(SCALE_FACTORS)
    _quantize_rows(len(weight), MIN_PARALLEL_WORK, *numbers, *arrays)
    return pack_planes(codes, bits), scales.astype(BFLOAT16)


@inline_jit
def place_of(x: np.float32) -> np.float32:
    """Returns the index in `nearest` of a multiple x of the scale, before it is cut to a whole number."""
    place: np.float32 = clamp(np.float32(2) * x + np.float32(2 * REACH), np.float32(0), np.float32(4 * REACH - 1))
    return place


@inline_jit
def round_pair(
    x: np.float32, y: np.float32, share: np.float32, ratio: np.float32, near: U8, levels: F32
) -> tuple[int, int, np.float32, np.float32]:
    """Returns the best codes of two partners for x and y, multiples of the scale, and their levels, x's first.

    share: x's target grows by share times y's rounding error. ratio: what y's squared error costs; x's costs 1.
    near, levels: `nearest`.
    """
    at_x, at_y, best = place_of(x), int(place_of(y)), np.float32(np.inf)
    best_at_x, best_odd = np.float32(0), np.float32(0)
    for odd in range(4):
        odd_x, odd_y = odd & 1, odd >> 1
        lost_y = y - get(levels, (2 * odd_y + odd_x) * 4 * REACH + at_y)
        if share != 0:
            at_x = place_of(x + share * lost_y)
        lost_x = x + share * lost_y - get(levels, (2 * odd_x + odd_y) * 4 * REACH + int(at_x))
        error = lost_x * lost_x + ratio * lost_y * lost_y
        is_less = error < best
        best_at_x, best_odd = where(is_less, at_x, best_at_x), where(is_less, np.float32(odd), best_odd)
        best = where(is_less, error, best)
    odd_x, odd_y = int(best_odd) & 1, int(best_odd) >> 1
    of_x, of_y = (2 * odd_x + odd_y) * 4 * REACH + int(best_at_x), (2 * odd_y + odd_x) * 4 * REACH + at_y
    return get(near, of_x), get(near, of_y), get(levels, of_x), get(levels, of_y)


@exact_division_kernel
def _quantize_rows(first: int, last: int, thread: int, arguments: int) -> None:
    n_blocks, n_factors, weight, factors, near_at, levels_at, codes_at, scales = load_arguments(arguments, 8)
    near, levels, zero, one = chars(near_at), floats(levels_at), np.float32(0), np.float32(1)
    for i in range(first * n_blocks, last * n_blocks):
        w, codes = floats(weight + 4 * ROTATED_INPUTS * i), chars(codes_at + ROTATED_INPUTS * i)
        squares = zero
        for j in range(ROTATED_INPUTS):
            squares += get(w, j) * get(w, j)
        deviation = np.sqrt(squares / np.float32(ROTATED_INPUTS))
        most, scale = zero, zero
        for k in range(n_factors + 1):  # at last with the best scale
            tried = deviation * get(floats(factors), k) if k < n_factors else scale
            inverse = one / tried if tried != 0 else zero
            level_squares, product = zero, zero
            for j in range(HALF):
                x, y = get(w, j), get(w, j + HALF)
                code_x, code_y, level_x, level_y = round_pair(x * inverse, y * inverse, zero, one, near, levels)
                level_squares += level_x * level_x + level_y * level_y
                product += level_x * x + level_y * y
                if k == n_factors:
                    put(codes, j, code_x)
                    put(codes, j + HALF, code_y)
            # product^2 / level_squares is how much these codes lessen the error at their best scale.
            if product * product > most * level_squares:
                most, scale = product * product / level_squares, product / level_squares
        put(floats(scales), i, scale)
