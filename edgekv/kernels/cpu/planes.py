"""Keys as a centre per 16 tokens and one sign per element, scored with queries in bit planes."""

from typing import Any

import numpy as np
from numba import prange

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.planes import CENTRE, CENTRES
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.centres import centre_scores, split
from edgekv.kernels.cpu.half import float_to_half
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, intrinsic, jit, parallel_jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import (
    Loops,
    address_of,
    chars,
    floats,
    halves,
    numbers,
    prepare_loop,
    score_loop,
    words,
    words32,
)
from edgekv.kernels.cpu.rotate import rotate_row, rotation_numbers
from edgekv.kernels.cpu.scalar import get, maximum, minimum, put
from edgekv.kernels.cpu.signs import pack_signs
from edgekv.types import F32, U16, U32, U64

LANES = simd.LANES
TILE = 4 * LANES
WORD_BITS = 64
LINE = 64  # bytes
BLOCKS_AHEAD = 4
ZERO, ONE, HALF, TWO = np.array([0, 1, 0.5, 2], np.float32)
LARGEST_F16_64 = np.float64(65504)


def encode_signs(x: F32, signs: U64, scale: U16, t0: int) -> None:
    args = x.reshape(-1, x.shape[2]), scale, x.shape[1], t0
    run(_scale_items, _scale_parallel, x.shape[0] * x.shape[1], 2 * x.size, args)
    pack_signs(x, signs, t0)


# What a head's queries become, in this order:
# P q (rows, width) float32; what its codes stand for, likewise; P q in two bytes (rows, 2, width); the planes
# (rows, n_planes, width / 64) uint64; step * lam (rows,), then size and sum of the two bytes (rows, 2), float32;
# room for the codes of a row (width,) uint32.


@jit
def parts_of(prepared: int, rows: int, width: int, n_planes: int) -> tuple[int, int, int, int, int, int]:
    """Addresses of the parts of prepared queries."""
    rounded = prepared + 4 * rows * width
    split_at = rounded + 4 * rows * width
    planes = split_at + 2 * rows * width
    steps = planes + rows * n_planes * width // 8
    return prepared, rounded, split_at, planes, steps, steps + 12 * rows


@prepare_loop
def _prepare(store: int, q: int, rows: int, g: int, prepared: int) -> None:
    x = numbers(store)
    width, n_planes, head_dim = get(x, 5), get(x, 6), get(x, 8)
    lam = get(floats(get(x, 7)), g)
    rotated, rounded, split_at, planes, steps, codes = parts_of(prepared, rows, width, n_planes)
    for m in range(rows):
        row = m * width
        rotate_row(
            *(floats(q), m * head_dim, head_dim, floats(get(x, 10)), floats(get(x, 10)), get(x, 9)),
            *(width, floats(rotated), row),
        )
        plane = m * n_planes * (width // WORD_BITS)
        step = _round_query(
            floats(rotated), row, width, n_planes, words(planes), plane, floats(rounded), words32(codes)
        )
        put(floats(steps), m, step * lam)
        size, total = split(floats(rotated), row, width, chars(split_at), 2 * row)
        put(floats(steps), rows + 2 * m, size)
        put(floats(steps), rows + 2 * m + 1, np.float32(total))


@score_loop
def _score(store: int, prepared: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    x = numbers(store)
    signs, scale, centres, centre_step = words(get(x, 0)), halves(get(x, 1)), chars(get(x, 2)), halves(get(x, 3))
    width, n_planes = get(x, 5), get(x, 6)
    n_words = width // WORD_BITS
    _, _, split_at, planes, steps, _ = parts_of(prepared, rows, width, n_planes)
    stored, i = g * get(x, 4) + t // BLOCK, t % BLOCK
    ahead, block_words, block_bytes = stored + BLOCKS_AHEAD, n_words * BLOCK, CENTRES * width // 2
    for j in range(0, block_words, LINE // 8):
        simd.prefetch(signs, ahead * block_words + j)
    for j in range(0, block_bytes, LINE):
        simd.prefetch(centres, ahead * block_bytes + j)
    for j in range(0, BLOCK, LINE // 2):
        simd.prefetch(scale, ahead * BLOCK + j)
    simd.prefetch(centre_step, ahead * CENTRES)
    near, target = floats(scratch), floats(s)
    for m in range(rows):
        size, total = get(floats(steps), rows + 2 * m), get(floats(steps), rows + 2 * m + 1)
        centre_scores(chars(split_at), 2 * m * width, width, size, total, centres, centre_step, stored, near, 0)
        factor, word = get(floats(steps), m) * HALF, m * n_planes * n_words
        into, column = (target, m * gap) if n == BLOCK else (near, CENTRES)
        _score_block(words(planes), word, n_planes, n_words, factor, signs, scale, stored, near, 0, into, column)
        if n != BLOCK:
            for k in range(n):
                put(target, m * gap + k, get(near, CENTRES + i + k))


def _store_numbers(codec: Any) -> tuple[int, ...]:
    a = codec.arrays
    return (
        *(address_of(a[name]) for name in ("signs", "scale", "centres", "centre_step")),
        *(a["signs"].shape[1], codec.width, codec.planes, address_of(codec.lam), codec.head_dim),
        *rotation_numbers(codec.rotation),
    )


def _prepared_bytes(codec: Any, rows: int) -> int:
    size: int = rows * (10 * codec.width + codec.planes * codec.width // 8 + 12) + 4 * codec.width
    return size


CENTRED = Loops(
    _store_numbers,
    prepare=_prepare,
    score=_score,
    prepared=_prepared_bytes,
    scratch=lambda codec, rows: 4 * (CENTRES + BLOCK),
)


@fast_jit
def _scale_items(first: int, last: int, args: Args) -> None:
    x, scale, n, t0 = args
    for item in range(first, last):
        square = magnitude = 0.0
        for element in x[item]:
            wide = np.float64(element)
            square += wide * wide
            magnitude += abs(wide)
        ratio = square / magnitude if magnitude > 0 else 0.0
        scale[item // n, t0 + item % n] = float_to_half(np.float32(min(ratio, LARGEST_F16_64)))


@parallel_jit
def _scale_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _scale_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@jit
def _round_query(
    q: F32, row: int, width: int, n_planes: int, planes: U64, target: int, rounded: F32, codes: U32
) -> Scalar:
    """q[row:][:width] in codes of n_planes bits: their planes, the sign first, and what they stand for.

    Returns the step of the codes.
    """
    half = np.float32(1 << (n_planes - 1))
    top = half + half - ONE
    largest = ZERO
    for d in range(row, row + width):
        largest = maximum(largest, abs(get(q, d)))
    size = largest / half
    divisor = ONE if size == ZERO else size
    for d in range(width):
        code = minimum(maximum(np.floor(get(q, row + d) / divisor) + half, ZERO), top)
        put(codes, d, np.uint32(np.int32(code)))
        put(rounded, row + d, (code - half + HALF) * size)
    n_words = width // WORD_BITS
    for plane in range(n_planes):
        for w in range(n_words):
            word = _gather_bits(codes, w * WORD_BITS, n_planes - 1 - plane)
            put(planes, target + plane * n_words + w, word)
    return size


@jit
def _gather_bits(codes: Any, start: int, bit: int) -> Scalar:
    word = np.uint64(0)
    for i in range(WORD_BITS):
        word |= np.uint64(get(codes, start + i) >> np.uint32(bit) & np.uint32(1)) << np.uint64(i)
    return word


@fast_jit
def _score_block(
    planes: U64,
    query: int,
    n_planes: int,
    n_words: int,
    factor: Scalar,
    signs: U64,
    scale: U16,
    block: int,
    bases: F32,
    base: int,
    s: F32,
    row: int,
) -> None:
    """s[row:][:64] = bases[base + t // 16] + factor * scale * ((2 ** B - 1) D - 2 * weighted popcount of XOR)."""
    key, token = block * n_words * BLOCK, block * BLOCK
    agreeing = np.float32(((1 << n_planes) - 1) * n_words * WORD_BITS)
    for i in range(0, BLOCK, TILE):
        a0 = a1 = a2 = a3 = simd.no_counts()
        word = query
        for _ in range(n_planes):
            a0, a1, a2, a3 = _twice(a0), _twice(a1), _twice(a2), _twice(a3)
            for w in range(n_words):
                bits, j = get(planes, word), key + w * BLOCK + i
                a0 = simd.count_differing(bits, signs, j, a0)
                a1 = simd.count_differing(bits, signs, j + LANES, a1)
                a2 = simd.count_differing(bits, signs, j + 2 * LANES, a2)
                a3 = simd.count_differing(bits, signs, j + 3 * LANES, a3)
                word += 1
        _store(a0, agreeing, factor, scale, token + i, bases, base, s, row, i)
        _store(a1, agreeing, factor, scale, token + i + LANES, bases, base, s, row, i + LANES)
        _store(a2, agreeing, factor, scale, token + i + 2 * LANES, bases, base, s, row, i + 2 * LANES)
        _store(a3, agreeing, factor, scale, token + i + 3 * LANES, bases, base, s, row, i + 3 * LANES)


@fast_jit
def _store(
    differing: simd.Vector,
    agreeing: Scalar,
    factor: Scalar,
    scale: U16,
    token: int,
    bases: F32,
    base: int,
    s: F32,
    row: int,
    i: int,
) -> None:
    product = simd.multiply_add(simd.splat(-TWO), simd.as_vector(differing), simd.splat(agreeing))
    width = simd.multiply(simd.splat(factor), simd.load(scale, token))
    simd.store(s, row + i, simd.multiply_add(width, product, simd.broadcast(bases, base + i // CENTRE)))


@intrinsic
def _twice(context: Any, a: Any) -> Any:
    """Counts doubled."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.add(args[0], args[0])

    return simd.counts(simd.counts), build
