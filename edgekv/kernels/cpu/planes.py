"""Keys as a centre per 16 tokens and one sign per element, scored with queries in bit planes."""

from typing import Any

import numpy as np
from numba import prange

from edgekv.kernels.contract.attention import BLOCK, F32, U8, U16, U64
from edgekv.kernels.contract.planes import CENTRE, CENTRES
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.centres import centre_scores, split
from edgekv.kernels.cpu.half import float_to_half
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, intrinsic, jit, parallel_jit
from edgekv.kernels.cpu.launch import flat, run, token_span, token_splits
from edgekv.kernels.cpu.scalar import address, get, maximum, minimum, put
from edgekv.kernels.cpu.signs import pack_signs

LANES = simd.LANES
TILE = 4 * LANES
WORD_BITS = 64
LINE = 64  # bytes
BLOCKS_AHEAD = 4
WORD_WORK = 4  # XOR, count and add of a word, in multiply-adds
ZERO, ONE, HALF, TWO = np.array([0, 1, 0.5, 2], np.float32)
LARGEST_F16_64 = np.float64(65504)


def encode_signs(x: F32, signs: U64, scale: U16, t0: int) -> None:
    args = x.reshape(-1, x.shape[2]), scale, x.shape[1], t0
    run(_scale_items, _scale_parallel, x.shape[0] * x.shape[1], 2 * x.size, args)
    pack_signs(x, signs, t0)


def pack_queries(q: F32, planes: U64, step: F32, rounded: F32) -> None:
    codes = np.empty((len(q) * q.shape[1], q.shape[2]), np.uint32)
    args = np.ascontiguousarray(q), planes, step, rounded, codes
    run(_query_items, _query_parallel, len(codes), 8 * q.size, args)


def scores_centred(
    q: F32,
    planes: U64,
    step: F32,
    signs: U64,
    scale: U16,
    centres: U8,
    centre_step: U16,
    t0: int,
    t1: int,
    s: F32,
    s0: int,
) -> None:
    work = WORD_WORK * planes.size * (t1 - t0)
    splits = token_splits(q.shape[0], work)
    n_items, n_rows, width = q.shape[0] * splits, *q.shape[1:]
    halves = np.empty((n_items, n_rows, 2, width), np.uint8)
    near = np.empty((n_items, 2 * n_rows + CENTRES + BLOCK), np.float32)
    q, keys = np.ascontiguousarray(q), (signs, scale, centres, centre_step)
    args = splits, q, planes, step, *keys, t0, t1, *flat(s), s0, halves, near
    run(_scores_items, _scores_parallel, n_items, work, args)


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
def _query_items(first: int, last: int, args: Args) -> None:
    q, planes, step, rounded, codes = args
    width, (n_planes, n_words) = q.shape[2], planes.shape[2:]
    q, planes, step, codes = q.reshape(-1), planes.reshape(-1), step.reshape(-1), codes.reshape(-1)
    rounded = rounded.reshape(-1)
    half = np.float32(1 << (n_planes - 1))
    top = half + half - ONE
    for item in range(first, last):
        row = item * width
        largest = ZERO
        for d in range(row, row + width):
            largest = maximum(largest, abs(get(q, d)))
        size = largest / half
        put(step, item, size)
        divisor = ONE if size == ZERO else size
        for d in range(row, row + width):
            code = minimum(maximum(np.floor(get(q, d) / divisor) + half, ZERO), top)
            put(codes, d, np.uint32(np.int32(code)))
            put(rounded, d, (code - half + HALF) * size)
        for plane in range(n_planes):
            target = (item * n_planes + plane) * n_words
            for w in range(n_words):
                word = _gather_bits(codes, row + w * WORD_BITS, n_planes - 1 - plane)
                put(planes, target + w, word)


@jit
def _gather_bits(codes: Any, start: int, bit: int) -> Scalar:
    word = np.uint64(0)
    for i in range(WORD_BITS):
        word |= np.uint64(get(codes, start + i) >> np.uint32(bit) & np.uint32(1)) << np.uint64(i)
    return word


@parallel_jit
def _query_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _query_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@fast_jit
def _scores_items(first: int, last: int, args: Args) -> None:
    splits, q, planes, step, signs, scale, centres, centre_step, t0, t1, s, gap_g, gap_m, s0, halves, near = args
    n_rows, width = q.shape[1:]
    n_planes, n_words = planes.shape[2:]
    n_blocks, block_words, block_bytes = signs.shape[1], n_words * BLOCK, CENTRES * width // 2
    signs, scale, centres, centre_step = address(signs), address(scale), address(centres), address(centre_step)
    q, planes, step, s = address(q), address(planes), address(step), address(s)
    halves, near = address(halves), address(near)
    near_items = 2 * n_rows + CENTRES + BLOCK
    for item in range(first, last):
        g = item // splits
        start, end = token_span(t0, t1, splits, item % splits)
        queries = item * 2 * n_rows * width  # the rows of q in bytes
        sizes = item * near_items  # of these rows, then the block's centres' scores, then the block's scores
        bases = sizes + 2 * n_rows
        for m in range(n_rows):
            row = g * n_rows + m
            size, total = split(q, row * width, width, halves, queries + 2 * m * width)
            put(near, sizes + 2 * m, size)
            put(near, sizes + 2 * m + 1, np.float32(total))
        for block in range(start // BLOCK, (end + BLOCK - 1) // BLOCK):
            stored = g * n_blocks + block
            ahead = stored + BLOCKS_AHEAD
            for j in range(0, block_words, LINE // 8):
                simd.prefetch(signs, ahead * block_words + j)
            for j in range(0, block_bytes, LINE):
                simd.prefetch(centres, ahead * block_bytes + j)
            for j in range(0, BLOCK, LINE // 2):
                simd.prefetch(scale, ahead * BLOCK + j)
            i = max(start - block * BLOCK, 0)
            n = min(end - block * BLOCK, BLOCK) - i
            column = g * gap_g + s0 + block * BLOCK + i - t0
            for m in range(n_rows):
                row, query = g * n_rows + m, queries + 2 * m * width
                size, total = get(near, sizes + 2 * m), get(near, sizes + 2 * m + 1)
                centre_scores(halves, query, width, size, total, centres, centre_step, stored, near, bases)
                words = row * n_planes * n_words
                factor = get(step, row) * HALF
                target, into = (column, s) if n == BLOCK else (bases + CENTRES, near)
                _score_block(
                    planes, words, n_planes, n_words, factor, signs, scale, stored, near, bases, into, target
                )
                if n != BLOCK:
                    for t in range(n):
                        put(s, column + t, get(near, target + i + t))
                column += gap_m


@parallel_jit
def _scores_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _scores_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


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
