"""Values in 1 to 4 bits, four tokens side by side, summed with 8-bit weights in integer dot products."""

from typing import Any

import numpy as np
from numba import prange

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.planes import GAUSS_STEP, LEAST_WEIGHT
from edgekv.kernels.cpu import dot, simd
from edgekv.kernels.cpu.half import as_float, float_to_half
from edgekv.kernels.cpu.int4 import round_to_even
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, jit, parallel_jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import (
    Loops,
    add_loop,
    address_of,
    chars,
    finish_loop,
    floats,
    halves,
    numbers,
    words32,
)
from edgekv.kernels.cpu.rotate import rotate_back_row, rotation_numbers
from edgekv.kernels.cpu.scalar import get, maximum, minimum, put
from edgekv.types import F32, U8, U16, U32

LANES = simd.LANES
TILE = 4 * LANES
VECTOR = 4 * LANES  # bytes
QUADS = BLOCK // 4
LINE = 64
PREFETCHED = TILE * 4 // LINE  # cache lines of a row of a tile
BLOCKS_AHEAD = 4
ZERO, ONE, TWO, TOP_WEIGHT, LEAST = np.array([0, 1, 2, 255, LEAST_WEIGHT], np.float32)
Scale = tuple[Scalar, Scalar]
LARGEST_F16 = np.float64(65504)


def encode_interleaved(x: F32, codes: U8, scale: U16, t0: int) -> None:
    bits = codes.shape[2] // 2
    args = np.ascontiguousarray(x), codes, scale, t0, bits, GAUSS_STEP[bits]
    run(_encode_blocks, _encode_parallel, x.shape[0] * x.shape[1] // BLOCK, 8 * x.size, args)


@add_loop
def _add_block(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    x = numbers(store)
    codes, scale, bits, head_dim = chars(get(x, 0)), halves(get(x, 1)), get(x, 4), get(x, 5)
    weights, bytes_, whole = floats(scratch), chars(scratch + 4 * BLOCK), words32(scratch + 4 * BLOCK)
    block, i = t // BLOCK, t % BLOCK
    token, code = g * get(x, 2) + block * BLOCK, (g * get(x, 3) + block) * 8 * bits * head_dim
    middle = np.float32((1 << bits) - 1) / TWO
    for j in range(0, BLOCK, LINE // 2):
        simd.prefetch(scale, token + BLOCKS_AHEAD * BLOCK + j)
    column, target = -i, 0
    for m in range(0, rows, 2):
        pair = min(2, rows - m)
        scale0 = _weigh(floats(p), column, i, i + n, scale, token, middle, weights, 0, bytes_, 0)
        scale1 = scale0
        if pair == 2:
            scale1 = _weigh(floats(p), column + gap, i, i + n, scale, token, middle, weights, 0, bytes_, BLOCK)
        if bits == 3:
            rest, (size0, shift0), (size1, shift1) = code + 16 * head_dim, scale0, scale1
            scale0, scale1 = (TWO * size0, shift0), (TWO * size1, shift1)
            _add_rows(pair, whole, 0, scale0, scale1, codes, code, 2, floats(out), target, head_dim)
            scale0, scale1 = (size0, ZERO), (size1, ZERO)
            _add_rows(pair, whole, 0, scale0, scale1, codes, rest, 1, floats(out), target, head_dim)
        else:
            _add_rows(pair, whole, 0, scale0, scale1, codes, code, bits, floats(out), target, head_dim)
        column, target = column + 2 * gap, target + 2 * head_dim


@finish_loop
def _finish(store: int, sums: int, out: int, rows: int) -> None:
    x = numbers(store)
    d = get(x, 5)
    for m in range(rows):
        row = m * d
        rotate_back_row(floats(sums), row, d, floats(get(x, 7)), floats(get(x, 8)), get(x, 6), floats(out), row, d)


def _store_numbers(codec: Any) -> tuple[int, ...]:
    codes, scale = codec.arrays["codes"], codec.arrays["scale"]
    sizes = codec.capacity, codes.shape[1], codec.bits, codec.head_dim
    return (address_of(codes), address_of(scale), *sizes, *rotation_numbers(codec.rotation))


INTERLEAVED = Loops(
    _store_numbers, add=_add_block, finish=_finish, scratch=lambda codec, rows: 4 * BLOCK + 8 * QUADS
)


@jit
def _encode_blocks(first: int, last: int, args: Args) -> None:
    x, codes, scale, t0, bits, gauss_step = args
    (_, n, head_dim), capacity = x.shape, scale.shape[1]
    x, scale = x.reshape(-1), scale.reshape(-1)
    blocks, n_stored, block_bytes = n // BLOCK, codes.shape[1], 8 * bits * head_dim
    codes = codes.reshape(-1)
    for item in range(first, last):
        g, block = item // blocks, t0 // BLOCK + item % blocks
        start = (g * n_stored + block) * block_bytes
        codes[start : start + block_bytes] = 0
        for t in range(BLOCK):
            row = (item * BLOCK + t) * head_dim
            square = _square(x, row, head_dim)
            step = np.float32(np.sqrt(square / head_dim) * gauss_step)
            along = _encode_token(x, row, head_dim, step, bits, codes, start, t)
            size = square / along if along > 0 else 0.0
            put(scale, g * capacity + block * BLOCK + t, float_to_half(np.float32(min(size, LARGEST_F16))))


@fast_jit
def _square(x: F32, row: int, head_dim: int) -> Scalar:
    total = 0.0
    for d in range(row, row + head_dim):
        wide = np.float64(get(x, d))
        total += wide * wide
    return total


@fast_jit
def _encode_token(
    x: F32, row: int, head_dim: int, step: Scalar, bits: int, codes: U8, start: int, t: int
) -> Scalar:
    """Adds token t's codes to the block's bytes; returns x times its levels."""
    half = np.float32(1 << (bits - 1))
    top = half + half - ONE
    middle = np.float64(half) - 0.5
    divisor = ONE if step == ZERO else step
    along = 0.0
    for d in range(head_dim):
        element = get(x, row + d)
        level = minimum(maximum(np.floor(element / divisor) + half, ZERO), top)
        along += np.float64(element) * (np.float64(level) - middle)
        code = np.int32(level)
        if bits == 3:
            _put_code(codes, start, head_dim, d, t, 2, 0, code >> 1)
            _put_code(codes, start, head_dim, d, t, 1, 4, code & 1)
        else:
            _put_code(codes, start, head_dim, d, t, bits, 0, code)
    return along


@jit
def _put_code(codes: U8, start: int, head_dim: int, d: int, t: int, bits: int, first_row: int, code: int) -> None:
    tokens_apart = 8 * bits
    row = first_row + t % tokens_apart // 4
    byte = start + (row * head_dim + d) * 4 + t % 4
    put(codes, byte, np.uint8(get(codes, byte) | code << t // tokens_apart * bits))


@parallel_jit
def _encode_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _encode_blocks(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@jit
def _weigh(
    p: F32,
    column: int,
    i: int,
    j: int,
    scale: U16,
    token: int,
    middle: Scalar,
    weights: F32,
    w: int,
    whole: U8,
    byte: int,
) -> Scale:
    """whole = p * scale as 8-bit integers for tokens i..j of the block, 0 for the others; what they stand for.

    Returned: the size of 1, and what the sum of (code - middle) has beyond that of the codes.
    """
    for t in range(i):
        put(weights, w + t, ZERO)
    for t in range(j, BLOCK):
        put(weights, w + t, ZERO)
    top = ZERO
    for t in range(i, j):
        weight = get(p, column + t) * as_float(get(scale, token + t))
        put(weights, w + t, weight)
        top = maximum(top, weight)
    factor, total = TOP_WEIGHT / maximum(top, LEAST), np.int32(0)
    for t in range(BLOCK):
        rounded = np.int32(round_to_even(get(weights, w + t) * factor))
        put(whole, byte + t, np.uint8(rounded))
        total = np.int32(total + rounded)
    size = top / TOP_WEIGHT
    return size, -size * middle * np.float32(total)


@fast_jit
def _add_rows(
    n_rows: int,
    whole: U32,
    word: int,
    scale0: Scale,
    scale1: Scale,
    codes: U8,
    start: int,
    bits: int,
    out: F32,
    target: int,
    head_dim: int,
) -> None:
    """out[target:][:head_dim] += size * (weights from `word` on, times the block's codes from `start` on) + shift.

    scale0 is (size, shift) of the row, scale1 that of the next, which is done too, with the next QUADS words, if
    n_rows is 2.
    """
    tiled, vectored = head_dim // TILE * TILE, head_dim // LANES * LANES
    for d in range(0, tiled, TILE):
        if n_rows == 1:
            _add_tile(whole, word, scale0, codes, start + 4 * d, bits, out, target + d, head_dim)
        else:
            _add_two_tiles(whole, word, scale0, scale1, codes, start + 4 * d, bits, out, target + d, head_dim)
    for _ in range(n_rows):
        for d in range(tiled, vectored, LANES):
            _add_vector(whole, word, scale0, codes, start + 4 * d, bits, out, target + d, head_dim)
        for d in range(vectored, head_dim):
            _add_channel(whole, word, scale0, codes, start + 4 * d, bits, out, target + d, head_dim)
        word, target, scale0 = word + QUADS, target + head_dim, scale1


@fast_jit
def _add_tile(
    whole: U32, word: int, scale: Scale, codes: U8, start: int, bits: int, out: F32, target: int, head_dim: int
) -> None:
    a0 = a1 = a2 = a3 = dot.no_sums()
    for row in range(2 * bits):
        i, quad = start + row * 4 * head_dim, word + row
        x0, x1 = dot.load_bytes(codes, i), dot.load_bytes(codes, i + VECTOR)
        x2, x3 = dot.load_bytes(codes, i + 2 * VECTOR), dot.load_bytes(codes, i + 3 * VECTOR)
        for j in range(PREFETCHED):
            simd.prefetch(codes, i + BLOCKS_AHEAD * 8 * bits * head_dim + j * LINE)
        for shift in range(0, 8, bits):
            four = get(whole, quad)
            a0 = dot.add_products(four, dot.codes_of(x0, shift, bits), a0)
            a1 = dot.add_products(four, dot.codes_of(x1, shift, bits), a1)
            a2 = dot.add_products(four, dot.codes_of(x2, shift, bits), a2)
            a3 = dot.add_products(four, dot.codes_of(x3, shift, bits), a3)
            quad += 2 * bits
    _add(a0, scale, out, target)
    _add(a1, scale, out, target + LANES)
    _add(a2, scale, out, target + 2 * LANES)
    _add(a3, scale, out, target + 3 * LANES)


@fast_jit
def _add_two_tiles(
    whole: U32,
    word: int,
    scale0: Scale,
    scale1: Scale,
    codes: U8,
    start: int,
    bits: int,
    out: F32,
    target: int,
    head_dim: int,
) -> None:
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = dot.no_sums()
    for row in range(2 * bits):
        i, quad = start + row * 4 * head_dim, word + row
        x0, x1 = dot.load_bytes(codes, i), dot.load_bytes(codes, i + VECTOR)
        x2, x3 = dot.load_bytes(codes, i + 2 * VECTOR), dot.load_bytes(codes, i + 3 * VECTOR)
        for shift in range(0, 8, bits):
            four, other = get(whole, quad), get(whole, quad + QUADS)
            x = dot.codes_of(x0, shift, bits)
            a0, b0 = dot.add_products(four, x, a0), dot.add_products(other, x, b0)
            x = dot.codes_of(x1, shift, bits)
            a1, b1 = dot.add_products(four, x, a1), dot.add_products(other, x, b1)
            x = dot.codes_of(x2, shift, bits)
            a2, b2 = dot.add_products(four, x, a2), dot.add_products(other, x, b2)
            x = dot.codes_of(x3, shift, bits)
            a3, b3 = dot.add_products(four, x, a3), dot.add_products(other, x, b3)
            quad += 2 * bits
    _add(a0, scale0, out, target)
    _add(a1, scale0, out, target + LANES)
    _add(a2, scale0, out, target + 2 * LANES)
    _add(a3, scale0, out, target + 3 * LANES)
    target += head_dim
    _add(b0, scale1, out, target)
    _add(b1, scale1, out, target + LANES)
    _add(b2, scale1, out, target + 2 * LANES)
    _add(b3, scale1, out, target + 3 * LANES)


@fast_jit
def _add_vector(
    whole: U32, word: int, scale: Scale, codes: U8, start: int, bits: int, out: F32, target: int, head_dim: int
) -> None:
    total = dot.no_sums()
    for row in range(2 * bits):
        x, quad = dot.load_bytes(codes, start + row * 4 * head_dim), word + row
        for shift in range(0, 8, bits):
            total = dot.add_products(get(whole, quad), dot.codes_of(x, shift, bits), total)
            quad += 2 * bits
    _add(total, scale, out, target)


@fast_jit
def _add(total: dot.Ints, scale: Scale, out: F32, i: int) -> None:
    size, shift = scale
    sums = simd.multiply_add(simd.splat(size), dot.sums_as_vector(total), simd.splat(shift))
    simd.store(out, i, simd.add(simd.load(out, i), sums))


@fast_jit
def _add_channel(
    whole: U32, word: int, scale: Scale, codes: U8, start: int, bits: int, out: F32, target: int, head_dim: int
) -> None:
    total, mask = np.int32(0), (1 << bits) - 1
    for row in range(2 * bits):
        quad = word + row
        for shift in range(0, 8, bits):
            for i in range(4):
                weight = get(whole, quad) >> np.uint32(8 * i) & np.uint32(255)
                code = get(codes, start + row * 4 * head_dim + i) >> shift & mask
                total = np.int32(total + np.int32(weight) * np.int32(code))
            quad += 2 * bits
    put(out, target, get(out, target) + scale[0] * np.float32(total) + scale[1])
