"""Keys and values as bit planes per token, of which only those that matter are read."""

import numpy as np
from numba import prange

from edgekv.kernels.numba_ import simd
from edgekv.kernels.numba_.half import as_float
from edgekv.kernels.numba_.jit import Args, Scalar, fast_jit, jit, parallel_jit
from edgekv.kernels.numba_.launch import flat, run
from edgekv.kernels.numba_.masks import add_where, at_least, lowest_one
from edgekv.kernels.numba_.scalar import get, maximum, minimum, put
from edgekv.kernels.numba_.softmax import exp_of_negative
from edgekv.kernels.spec import BLOCK, F32, I64, U16, U64
from edgekv.kernels.spec_codes import U32
from edgekv.kernels.spec_planes import FULL_VALUES, KEY_STEP, LARGEST_CORRECTION, PAIR_STEP

LANES = simd.LANES
WORD_BITS, HALF_WORD = 64, 32
LINE_WORDS = 16  # uint32 to a cache line
PENDING = 256  # tokens found before they are read: their lines are on the way
SCAN_WORK, READ_WORK = 1, 8  # of one probability and of one element of a token, in multiply-adds
TYPICAL_SHARE = 32  # one token of so many is read
ONE_BIT = np.uint64(1)
ZERO, HALF, TWO, FOUR, EIGHT = np.array([0, 0.5, 2, 4, 8], np.float32)
MIDDLE, PAIR_MIDDLE, STEP_OF_KEY, STEP_OF_PAIR = np.array([7.5, 1.5, KEY_STEP, PAIR_STEP], np.float32)
LARGEST, LARGEST_FACTOR = np.array([LARGEST_CORRECTION, np.exp(LARGEST_CORRECTION)], np.float32)


def encode_planes(x: F32, step: F32, planes: U64, t0: int) -> None:
    run(_encode_tokens, _encode_parallel, x.shape[0] * x.shape[1], 2 * x.size, (x, step, planes, t0))


def attend_planes(
    p: F32,
    s0: int,
    t0: int,
    t1: int,
    q: F32,
    rounded: F32,
    lam: F32,
    signs: U64,
    scale: U16,
    fine: U64,
    top: U64,
    low: U64,
    value_scale: U16,
    threshold: float,
    n: int,
    out: F32,
    tail: F32,
    change: F32,
    counts: I64,
) -> None:
    n_items, n_heads, n_tokens = q.shape[0] * n, q.shape[1] // n, t1 - t0
    pending = np.empty((n_items, PENDING), np.int32)
    rows = np.empty((n_items, 2, n_heads), np.float32)
    planes = signs.view(np.uint32), fine.view(np.uint32), top.view(np.uint32), low.view(np.uint32)
    work = q.shape[0] * q.shape[1] * n_tokens * (SCAN_WORK + READ_WORK * q.shape[2] // TYPICAL_SHARE)
    args = (
        *(*flat(p), s0, t0, t1, q, rounded, lam, scale, *planes, value_scale),
        *(np.float32(threshold), np.float32(FULL_VALUES * threshold), n, pending, rows, out, tail, change, counts),
    )
    run(_attend_items, _attend_parallel, n_items, work, args)


@jit
def _encode_tokens(first: int, last: int, args: Args) -> None:
    x, step, planes, t0 = args
    (_, n, width), (capacity, n_planes, n_words) = x.shape, planes.shape[1:]
    x, step, planes = x.reshape(-1), step.reshape(-1), planes.reshape(-1)
    for item in range(first, last):
        target = (item // n * capacity + t0 + item % n) * n_planes * n_words
        size = get(step, item)
        for _ in range(n_planes):
            for w in range(n_words):
                word = np.uint64(0)
                start = item * width + w * WORD_BITS
                for bit in range(0, WORD_BITS, LANES):
                    word |= simd.load_signs(x, start + bit) << np.uint64(bit)
                put(planes, target, word)
                target += 1
                for d in range(start, start + WORD_BITS):
                    element = get(x, d)
                    put(x, d, element - size if element >= ZERO else element + size)
            size *= HALF


@parallel_jit
def _encode_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _encode_tokens(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@fast_jit
def _attend_items(first: int, last: int, args: Args) -> None:
    p, gap_g, gap_m, s0, t0, t1, q, rounded, lam, scale, signs, fine, top, low, value_scale = args[:15]
    threshold, full, n, pending, rows, out, tail, change, counts = args[15:]
    (_, n_rows, width), n_words = q.shape, q.shape[2] // WORD_BITS
    n_heads, capacity, blocks = n_rows // n, scale.shape[1], tail.shape[2]
    pending, rows, out, tail = pending.reshape(-1), rows.reshape(-1), out.reshape(-1), tail.reshape(-1)
    q, rounded, change = q.reshape(-1), rounded.reshape(-1), change.reshape(-1)
    keys = signs.reshape(-1), scale.reshape(-1), fine.reshape(-1)
    values = top.reshape(-1), low.reshape(-1), value_scale.reshape(-1)
    for item in range(first, last):
        g, j = item // n, item % n
        row = g * n_rows + j
        chances = g * gap_g + j * gap_m + s0 - t0  # column of token 0, of the first head
        queries = q, rounded, row, n, n_words, get(lam, g)
        sums = out, tail, change, blocks, t0 // BLOCK
        limits = threshold, full
        where = p, chances, n * gap_m, rows, item * 2 * n_heads, n_heads
        for r in range(n_heads):
            i = (row + r * n) * width
            middle = MIDDLE * STEP_OF_KEY * _total(q, i, width) - get(lam, g) * _total(rounded, i, width)
            put(rows, item * 2 * n_heads + r, middle)
            put(change, row + r * n, ZERO)
        n_found = n_read = n_full = 0
        for block in range(t0 // BLOCK, (t1 + BLOCK - 1) // BLOCK):
            start, end = max(t0, block * BLOCK), min(t1, (block + 1) * BLOCK)
            for r in range(n_heads):
                mass = _total(p, chances + r * n * gap_m + start, end - start)
                put(tail, (row + r * n) * blocks + block - t0 // BLOCK, mass)
            for t in range(start, end, LANES):
                bits = np.uint64(0)
                for r in range(n_heads):
                    bits |= _at_least(p, chances + r * n * gap_m + t, end - t, threshold)
                while bits:
                    token = t + lowest_one(bits)
                    bits &= bits - ONE_BIT
                    _prefetch(keys, values, g * capacity + token, n_words, where, token, full)
                    put(pending, item * PENDING + n_found, np.int32(token))
                    n_found += 1
            if n_found > PENDING - BLOCK or block == (t1 - 1) // BLOCK:
                found = pending, item * PENDING, n_found
                n_full += _read_tokens(found, g * capacity, where, queries, keys, values, limits, sums)
                n_read += n_found
                n_found = 0
        counts[g, j, 0], counts[g, j, 1] = n_read, n_full


@parallel_jit
def _attend_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _attend_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@fast_jit
def _total(x: F32, start: int, n: int) -> Scalar:
    total = ZERO
    for i in range(start, start + n):
        total += get(x, i)
    return total


@jit
def _at_least(p: F32, start: int, length: int, threshold: Scalar) -> Scalar:
    """`at_least` for the first LANES of `length` elements."""
    if length >= LANES:
        return at_least(p, start, threshold)
    bits = np.uint64(0)
    for i in range(length):
        if get(p, start + i) >= threshold:
            bits |= ONE_BIT << np.uint64(i)
    return bits


@jit
def _prefetch(keys: Args, values: Args, stored: int, n_words: int, where: Args, token: int, full: Scalar) -> None:
    """Asks for what `_read_token` will probably read."""
    (_, _, fine), (top, low, _), (p, chances, gap, _, _, n_heads) = keys, values, where
    for i in range(0, 6 * n_words, LINE_WORDS):
        simd.prefetch(fine, stored * 6 * n_words + i)
    for i in range(0, 4 * n_words, LINE_WORDS):
        simd.prefetch(top, stored * 4 * n_words + i)
    for r in range(n_heads):
        if get(p, chances + r * gap + token) >= full:
            for i in range(0, 4 * n_words, LINE_WORDS):
                simd.prefetch(low, stored * 4 * n_words + i)


@fast_jit
def _read_tokens(
    found: Args, base: int, where: Args, queries: Args, keys: Args, values: Args, limits: Args, sums: Args
) -> int:
    """Corrects the tokens' probabilities and adds their values; returns how many had all planes.

    One call for many tokens: each call counts the references of every array, which takes longer than a token.
    """
    pending, first, n_found = found
    p, chances, gap, rows, near, n_heads = where
    q, rounded, row, n, n_words, lam = queries
    signs, scale, fine = keys
    top, low, value_scale = values
    threshold, full = limits
    out, tail, change, blocks, first_block = sums
    width, n_full = n_words * WORD_BITS, 0
    for k in range(first, first + n_found):
        token = np.int64(get(pending, k))
        stored = base + token
        sign = (stored // BLOCK * n_words) * BLOCK + token % BLOCK
        size = as_float(get(scale, stored))
        largest = ZERO
        for r in range(n_heads):
            m = row + r * n
            left = _left_out(q, rounded, m * width, signs, sign, fine, stored * 6 * n_words, n_words, lam)
            correction = maximum(minimum(size * (left - get(rows, near + r)), LARGEST), -LARGEST)
            old = get(p, chances + r * gap + token)
            new = old * LARGEST_FACTOR * exp_of_negative(correction - LARGEST)
            put(rows, near + n_heads + r, new)
            put(change, m, get(change, m) + (new - old))
            largest = maximum(largest, new)
        is_read, is_full = largest >= threshold, largest >= full
        size = as_float(get(value_scale, stored))
        n_full += is_full
        for r in range(n_heads):
            m = row + r * n
            new, old = get(rows, near + n_heads + r), get(p, chances + r * gap + token)
            i = m * blocks + token // BLOCK - first_block
            put(tail, i, get(tail, i) - old if is_read else get(tail, i) - old + new)
            if is_full:
                _add_full(top, low, stored * 4 * n_words, n_words, new * size, out, m * width)
            elif is_read:
                _add_pair(top, stored * 4 * n_words, n_words, new * size * STEP_OF_PAIR, out, m * width)
    return n_full


@fast_jit
def _left_out(
    q: F32, rounded: F32, i: int, signs: U32, sign: int, fine: U32, plane: int, n_words: int, lam: Scalar
) -> Scalar:
    """KEY_STEP * q . code - 2 * lam * rounded . sign bit; the sign words lie BLOCK apart."""
    a = b = c = d = coarse = simd.splat(ZERO)
    for w in range(2 * n_words):
        first = get(signs, 2 * (sign + w // 2 * BLOCK) + w % 2)
        second, third = get(fine, plane + w), get(fine, plane + 2 * n_words + w)
        fourth = get(fine, plane + 4 * n_words + w)
        for shift in range(0, HALF_WORD, LANES):
            x = simd.load(q, i)
            a, b = add_where(first, shift, x, a), add_where(second, shift, x, b)
            c, d = add_where(third, shift, x, c), add_where(fourth, shift, x, d)
            coarse = add_where(first, shift, simd.load(rounded, i), coarse)
            i += LANES
    two = simd.splat(TWO)
    code = simd.multiply_add(two, simd.multiply_add(two, simd.multiply_add(two, a, b), c), d)
    scaled = simd.multiply(simd.splat(STEP_OF_KEY), code)
    return simd.total(simd.multiply_add(simd.splat(-TWO * lam), coarse, scaled))


@fast_jit
def _add_full(top: U32, low: U32, plane: int, n_words: int, weight: Scalar, out: F32, target: int) -> None:
    """out[target:] += weight * (code - 7.5) of four planes."""
    w8, w4 = simd.splat(EIGHT * weight), simd.splat(FOUR * weight)
    w2, w1 = simd.splat(TWO * weight), simd.splat(weight)
    start = simd.splat(-MIDDLE * weight)
    for w in range(2 * n_words):
        first, second = get(top, plane + w), get(top, plane + 2 * n_words + w)
        third, fourth = get(low, plane + w), get(low, plane + 2 * n_words + w)
        for shift in range(0, HALF_WORD, LANES):
            x = simd.add(simd.load(out, target), start)
            y = add_where(second, shift, w4, add_where(first, shift, w8, x))
            simd.store(out, target, add_where(fourth, shift, w1, add_where(third, shift, w2, y)))
            target += LANES


@fast_jit
def _add_pair(top: U32, plane: int, n_words: int, weight: Scalar, out: F32, target: int) -> None:
    """out[target:] += weight * (code - 1.5) of two planes."""
    w2, w1, start = simd.splat(TWO * weight), simd.splat(weight), simd.splat(-PAIR_MIDDLE * weight)
    for w in range(2 * n_words):
        first, second = get(top, plane + w), get(top, plane + 2 * n_words + w)
        for shift in range(0, HALF_WORD, LANES):
            x = simd.add(simd.load(out, target), start)
            simd.store(out, target, add_where(second, shift, w1, add_where(first, shift, w2, x)))
            target += LANES
