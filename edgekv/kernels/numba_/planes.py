"""Keys as a centre per 16 tokens and one sign per element, scored with queries in bit planes."""

from typing import Any

import numpy as np
from numba import prange

from edgekv.kernels.numba_ import simd
from edgekv.kernels.numba_.half import as_float, float_to_half
from edgekv.kernels.numba_.jit import Args, Scalar, fast_jit, intrinsic, jit, parallel_jit
from edgekv.kernels.numba_.launch import flat, run, token_span, token_splits
from edgekv.kernels.numba_.scalar import get, maximum, minimum, put
from edgekv.kernels.numba_.signs import pack_signs
from edgekv.kernels.spec import BLOCK, F32, U8, U16, U64
from edgekv.kernels.spec_planes import CENTRE, CENTRES

LANES = simd.LANES
TILE = 4 * LANES
WORD_BITS = 64
LINE = 64  # bytes
BLOCKS_AHEAD = 4
WORD_WORK = 4  # XOR, count and add of a word, in multiply-adds
ZERO, ONE, HALF, TWO, EIGHT = np.array([0, 1, 0.5, 2, 8], np.float32)
MIDDLE, HIGHEST, LARGEST_F16 = np.array([7.5, 15, 65504], np.float32)
LARGEST_F16_64 = np.float64(65504)


def encode_centres(x: F32, codes: U8, step: U16, t0: int) -> None:
    args = x, codes, step, t0
    run(_centre_items, _centre_parallel, x.shape[0] * x.shape[1] // BLOCK, 8 * x.size, args)


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
    scratch = np.empty((q.shape[0] * splits, CENTRES * (q.shape[2] + 1) + BLOCK), np.float32)
    q, keys = np.ascontiguousarray(q), (signs, scale, centres, centre_step)
    args = splits, q, planes, step, *keys, t0, t1, *flat(s), s0, scratch
    run(_scores_items, _scores_parallel, q.shape[0] * splits, work, args)


@fast_jit
def _centre_items(first: int, last: int, args: Args) -> None:
    x, codes, step, t0 = args
    (_, n, width), n_blocks = x.shape, step.shape[1]
    x, codes, step = x.reshape(-1), codes.reshape(-1), step.reshape(-1)
    groups = n // BLOCK
    for item in range(first, last):
        target = (item // groups * n_blocks + t0 // BLOCK + item % groups) * CENTRES
        row = item * BLOCK * width
        _encode_mean(x, row, BLOCK, width, step, codes, target)
        for i in range(1, CENTRES):
            _encode_mean(x, row + (i - 1) * CENTRE * width, CENTRE, width, step, codes, target + i)


@jit
def _encode_mean(x: F32, row: int, n: int, width: int, step: U16, codes: U8, target: int) -> None:
    """Stores the mean of n rows of x and subtracts it from them."""
    half, largest = width // 2, ZERO
    for d in range(row, row + width):
        largest = maximum(largest, abs(_mean(x, d, n, width)))
    bits = float_to_half(minimum(largest / EIGHT, LARGEST_F16))
    put(step, target, bits)
    size = as_float(bits)
    divisor = ONE if size == ZERO else size
    for d in range(half):
        low = minimum(maximum(np.floor(_mean(x, row + d, n, width) / divisor) + EIGHT, ZERO), HIGHEST)
        high = minimum(maximum(np.floor(_mean(x, row + half + d, n, width) / divisor) + EIGHT, ZERO), HIGHEST)
        put(codes, target * half + d, np.uint8(np.int32(low) | np.int32(high) << 4))
        _subtract(x, row + d, n, width, (low - MIDDLE) * size)
        _subtract(x, row + half + d, n, width, (high - MIDDLE) * size)


@jit
def _mean(x: F32, d: int, n: int, width: int) -> Scalar:
    total = get(x, d)
    for i in range(1, n):
        total += get(x, d + i * width)
    return total * (ONE / np.float32(n))


@jit
def _subtract(x: F32, d: int, n: int, width: int, centre: Scalar) -> None:
    for i in range(n):
        put(x, d + i * width, get(x, d + i * width) - centre)


@parallel_jit
def _centre_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _centre_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


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
    splits, q, planes, step, signs, scale, centres, centre_step, t0, t1, s, gap_g, gap_m, s0, scratch = args
    n_rows, width = q.shape[1:]
    n_planes, n_words = planes.shape[2:]
    n_blocks, block_words = signs.shape[1], n_words * BLOCK
    q, planes, step, scratch = q.reshape(-1), planes.reshape(-1), step.reshape(-1), scratch.reshape(-1)
    signs, scale = signs.reshape(-1), scale.reshape(-1)
    centres, centre_step = centres.reshape(-1), centre_step.reshape(-1)
    scratch_items = CENTRES * (width + 1) + BLOCK
    for item in range(first, last):
        g = item // splits
        start, end = token_span(t0, t1, splits, item % splits)
        near = item * scratch_items  # the block's centres, then their scores, then the block's scores
        bases = near + CENTRES * width
        for block in range(start // BLOCK, (end + BLOCK - 1) // BLOCK):
            stored = g * n_blocks + block
            ahead = stored + BLOCKS_AHEAD
            for j in range(0, block_words, LINE // 8):
                simd.prefetch(signs, ahead * block_words + j)
            for j in range(0, CENTRES * width // 2, LINE):
                simd.prefetch(centres, ahead * CENTRES * width // 2 + j)
            for j in range(0, BLOCK, LINE // 2):
                simd.prefetch(scale, ahead * BLOCK + j)
            _unpack_centres(centres, centre_step, stored * CENTRES, width, scratch, near)
            i = max(start - block * BLOCK, 0)
            n = min(end - block * BLOCK, BLOCK) - i
            column = g * gap_g + s0 + block * BLOCK + i - t0
            for m in range(n_rows):
                row = g * n_rows + m
                common = _dot(q, row * width, scratch, near, width)
                for c in range(1, CENTRES):
                    base = common + _dot(q, row * width, scratch, near + c * width, width)
                    put(scratch, bases + c - 1, base)
                words = row * n_planes * n_words
                factor = get(step, row) * HALF
                if n == BLOCK:
                    target, into = column, s
                    _score_block(
                        planes,
                        words,
                        n_planes,
                        n_words,
                        factor,
                        signs,
                        scale,
                        stored,
                        scratch,
                        bases,
                        into,
                        target,
                    )
                else:
                    target = bases + CENTRES
                    _score_block(
                        planes,
                        words,
                        n_planes,
                        n_words,
                        factor,
                        signs,
                        scale,
                        stored,
                        scratch,
                        bases,
                        scratch,
                        target,
                    )
                    for t in range(n):
                        put(s, column + t, get(scratch, target + i + t))
                column += gap_m


@parallel_jit
def _scores_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _scores_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@fast_jit
def _unpack_centres(codes: U8, step: U16, centre: int, width: int, out: F32, target: int) -> None:
    half = width // 2
    for c in range(CENTRES):
        size = simd.splat(as_float(get(step, centre + c)))
        middle = simd.multiply(simd.splat(-MIDDLE), size)
        for d in range(0, half, LANES):
            i, code = target + c * width + d, (centre + c) * half + d
            simd.store(out, i, simd.multiply_add(simd.load_low_nibbles(codes, code), size, middle))
            simd.store(out, i + half, simd.multiply_add(simd.load_high_nibbles(codes, code), size, middle))


@fast_jit
def _dot(a: F32, i: int, b: F32, j: int, width: int) -> Scalar:
    total = simd.splat(ZERO)
    for d in range(0, width, LANES):
        total = simd.multiply_add(simd.load(a, i + d), simd.load(b, j + d), total)
    return simd.total(total)


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
