"""Keys and values as bit planes per token, of which only those that matter are read."""

import numpy as np
from numba import prange

from edgekv.kernels.contract.attention import BLOCK, F32, I64, U16, U64
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, jit, parallel_jit
from edgekv.kernels.cpu.launch import flat, run
from edgekv.kernels.cpu.masks import at_least, lowest_one
from edgekv.kernels.cpu.refine import LINE, PENDING, add_planes, add_up, choose, estimate, prepare, weigh
from edgekv.kernels.cpu.scalar import address, get, put

LANES = simd.LANES
WORD_BITS = 64
SCAN_WORK, READ_WORK = 1, 8  # of one probability and of one element of a token, in multiply-adds
TYPICAL_SHARE = 32  # one token of so many is read
ONE_BIT = np.uint64(1)
ZERO, HALF = np.array([0, 0.5], np.float32)


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
    n_items, n_heads, n_tokens, width = q.shape[0] * n, q.shape[1] // n, t1 - t0, q.shape[2]
    chosen = np.empty((n_items, 3, PENDING), np.int32)
    weights = np.empty((n_items, 4 * n_heads + 1, PENDING), np.float32)
    near = np.empty((n_items, 2 * n_heads + 2 * width), np.float32)
    halves = np.empty((n_items, n_heads + 1, 4 * width), np.uint8)
    planes = signs.view(np.uint8), fine.view(np.uint8), top.view(np.uint8), low.view(np.uint8)
    work = q.shape[0] * q.shape[1] * n_tokens * (SCAN_WORK + READ_WORK * width // TYPICAL_SHARE)
    args = (
        *(*flat(p), s0, t0, t1, q, rounded, lam, scale, *planes, value_scale),
        *(np.float32(threshold), n, chosen, weights, near, halves, out, tail, change, counts),
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
    threshold, n, chosen, weights, near, halves, out, tail, change, counts = args[15:]
    (_, n_rows, width), capacity, blocks = q.shape, scale.shape[1], tail.shape[2]
    n_heads = n_rows // n
    p, out, tail, change, counts = address(p), address(out), address(tail), address(change), address(counts)
    q, rounded, lam = address(q), address(rounded), address(lam)
    keys = address(signs), address(scale), address(fine)
    values = address(top), address(low), address(value_scale)
    chosen, weights, near, halves = address(chosen), address(weights), address(near), address(halves)
    for item in range(first, last):
        g, j = item // n, item % n
        row = g * n_rows + j
        chances = g * gap_g + j * gap_m + s0 - t0  # column of token 0, of the first head
        memory = (
            *(chosen, item * 3 * PENDING, weights, item * (4 * n_heads + 1) * PENDING),
            *(near, item * (2 * n_heads + 2 * width)),
        )
        products = halves, item * (n_heads + 1) * 4 * width
        tail_of = tail, blocks, t0 // BLOCK
        where = p, chances, n * gap_m, n_heads, row, n, width
        prepare(q, rounded, get(lam, g), where, memory, products, change)
        n_found = n_read = n_full = 0
        for block in range(t0 // BLOCK, (t1 + BLOCK - 1) // BLOCK):
            start, end = max(t0, block * BLOCK), min(t1, (block + 1) * BLOCK)
            for r in range(n_heads):
                mass = add_up(p, chances + r * n * gap_m + start, end - start)
                put(tail, (row + r * n) * blocks + block - t0 // BLOCK, mass)
            for t in range(start, end, LANES):
                bits = np.uint64(0)
                for r in range(n_heads):
                    bits |= _at_least(p, chances + r * n * gap_m + t, end - t, threshold)
                while bits:
                    token = t + lowest_one(bits)
                    bits &= bits - ONE_BIT
                    _prefetch(keys, values, g * capacity + token, width)
                    put(chosen, item * 3 * PENDING + n_found, np.int32(token))
                    n_found += 1
            if n_found > PENDING - BLOCK or block == (t1 - 1) // BLOCK:
                base = g * capacity
                estimate(n_found, base, where, memory, products, keys)
                weigh(n_found, where, memory, change)
                n_pairs, n_whole = choose(n_found, base, threshold, where, memory, values, tail_of)
                add_planes(n_pairs, n_whole, base, where, memory, values, out)
                n_full += n_whole
                n_read += n_found
                n_found = 0
        put(counts, 2 * item, n_read)
        put(counts, 2 * item + 1, n_full)


@parallel_jit
def _attend_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _attend_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


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


@fast_jit
def _prefetch(keys: Args, values: Args, stored: int, width: int) -> None:
    """Asks for what `_correct` and `_add_planes` will read, but for the lower value planes."""
    (_, _, fine), (top, _, _) = keys, values
    for i in range(0, 3 * width // 8, LINE):
        simd.prefetch(fine, stored * 3 * width // 8 + i)
    for i in range(0, 2 * width // 8, LINE):
        simd.prefetch(top, stored * 2 * width // 8 + i)
