"""`attend_planes` for a batch of tokens that were found to matter: corrected, chosen, and their values added.

Each step does the whole batch: what decides a token's way is then long known when a branch asks for it.
"""

from typing import NamedTuple

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.planes import FULL_VALUES, KEY_STEP, LARGEST_CORRECTION, PAIR_STEP
from edgekv.kernels.cpu import dot, simd
from edgekv.kernels.cpu.centres import split
from edgekv.kernels.cpu.gauss_codes import place_of
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.jit import Scalar, fast_jit, inline_jit
from edgekv.kernels.cpu.masks import add_where
from edgekv.kernels.cpu.scalar import get, maximum, minimum, put
from edgekv.kernels.cpu.softmax import exp_of_negative
from edgekv.types import F32, I32, U8, U16

LANES = simd.LANES
TILE, VECTOR, STRIP = 4 * LANES, 4 * LANES, LANES // 8  # elements, bytes, bytes of LANES bits
LINE = 64  # bytes
PENDING = 256  # tokens found before they are read: their lines are on the way
ZERO, ONE, TWO, EIGHT = np.array([0, 1, 2, 8], np.float32)
MIDDLE, PAIR_MIDDLE, STEP_OF_KEY, STEP_OF_PAIR = np.array([7.5, 1.5, KEY_STEP, PAIR_STEP], np.float32)
LARGEST, LARGEST_FACTOR = np.array([LARGEST_CORRECTION, np.exp(LARGEST_CORRECTION)], np.float32)
LARGE = np.float32(FULL_VALUES)

# What the loops below get together. An index says where in the array before it the part begins.


class Heads(NamedTuple):
    """The query heads that read a KV head's tokens."""

    p: F32  # probabilities
    chances: int  # the column of token 0, of the first head
    gap: int  # columns between heads
    n_heads: int
    row: int  # of the first head
    n: int  # rows between heads
    width: int


class Memory(NamedTuple):
    """What a batch is worked out in."""

    chosen: I32  # (3, PENDING): tokens found, to be read in two planes, in four
    found: int
    weights: F32
    """(4 * heads + 1, PENDING): corrections, then corrected probabilities; old ones; weights of pairs; of fours;
    the largest corrected probability of a token's heads."""
    first: int
    near: F32  # per head the size of its products, then what all keys share; then 2 * width elements
    own: int


class Products(NamedTuple):
    """What keys are multiplied with, in two bytes (heads, 2, 2 * width); behind it room for a key's bytes."""

    halves: U8
    query: int


class Keys(NamedTuple):
    """The first plane of stored keys, their scales, their other three planes."""

    signs: U8
    scale: U16
    fine: U8


class Values(NamedTuple):
    """The upper and the lower two planes of stored values, and their scales."""

    top: U8
    low: U8
    scale: U16


class Tail(NamedTuple):
    """What blocks keep of each row's probability (rows, blocks), from ``first_block`` on."""

    tail: F32
    blocks: int
    first_block: int


@fast_jit
def prepare(q: F32, rounded: F32, key_scale: Scalar, heads: Heads, memory: Memory, products: Products) -> None:
    """Per head: what a key's sign and fine bits are multiplied with, in bytes; their size; what all keys share.

    KEY_STEP * q . (8 sign + fine - 7.5) - key_scale * rounded . (2 sign - 1)
    = (8 KEY_STEP q - 2 key_scale rounded) . sign + KEY_STEP q . fine - (7.5 KEY_STEP q - key_scale rounded) . 1
    """
    _, _, _, n_heads, row, n, width = heads
    _, _, _, _, near, own = memory
    halves, query = products
    factors = own + 2 * n_heads
    for r in range(n_heads):
        i, shared = (row + r * n) * width, ZERO
        for d in range(width):
            fine, coarse = STEP_OF_KEY * get(q, i + d), key_scale * get(rounded, i + d)
            put(near, factors + d, EIGHT * fine - TWO * coarse)
            put(near, factors + width + d, fine)
            shared += MIDDLE * fine - coarse
        size, _ = split(near, factors, 2 * width, halves, query + r * 4 * width)
        put(near, own + r, size)
        put(near, own + n_heads + r, shared)


@fast_jit
def correct_scores(n_found: int, base: int, heads: Heads, memory: Memory, products: Products, keys: Keys) -> None:
    """The corrections of the found tokens' scores, and their probabilities."""
    p, chances, gap, n_heads, _, _, width = heads
    chosen, found, weights, corrections, near, own = memory
    halves, query = products
    signs, scale, fine = keys
    codes, old = query + n_heads * 4 * width, corrections + n_heads * PENDING
    for k in range(n_found):
        token = np.int64(get(chosen, found + k))
        stored = base + token
        _unpack_key(signs, stored, fine, width, halves, codes)
        size = as_float(get(scale, stored))
        for r in range(n_heads):
            whole = np.float32(_dot_halves(halves, codes, query + r * 4 * width, 2 * width))
            left = size * (get(near, own + r) * whole - get(near, own + n_heads + r))
            put(weights, corrections + r * PENDING + k, left)
            put(weights, old + r * PENDING + k, get(p, chances + r * gap + token))


@inline_jit
def _unpack_key(signs: U8, stored: int, fine: U8, width: int, codes: U8, target: int) -> None:
    """A key's sign bits as bytes, then its three fine bits as bytes; what lies behind them is used, too."""
    line, first, own = width // 8, stored // BLOCK * 8 * width + place_of(stored, width), target + 2 * width
    for i in range(line):
        put(codes, own + i, get(signs, first + 16 * i))
    for d in range(0, width, VECTOR):
        plane = stored * 3 * line + d // 8
        bits = dot.load_bits(fine, plane)
        bits = dot.multiply_add(bits, 2, dot.load_bits(fine, plane + line))
        bits = dot.multiply_add(bits, 2, dot.load_bits(fine, plane + 2 * line))
        dot.store_bytes(codes, target + d, dot.load_bits(codes, own + d // 8))
        dot.store_bytes(codes, target + width + d, bits)


@inline_jit
def _dot_halves(halves: U8, codes: int, query: int, n: int) -> Scalar:
    """Sum of (256 * high + low) * code over n elements, int32."""
    high = low = dot.no_sums()
    for d in range(0, n, VECTOR):
        x = dot.load_bytes(halves, codes + d)
        high = dot.add_signed(x, dot.load_bytes(halves, query + d), high)
        low = dot.add_signed(x, dot.load_bytes(halves, query + n + d), low)
    return dot.total(dot.multiply_add(high, 256, low))


@fast_jit
def weigh(n_found: int, heads: Heads, memory: Memory, change: F32) -> None:
    """The corrected probabilities, in place of the corrections; and the largest of each token's heads."""
    _, _, _, n_heads, row, n, _ = heads
    _, _, weights, corrections, _, _ = memory
    largest = corrections + 4 * n_heads * PENDING
    for r in range(n_heads):
        new, old, total = corrections + r * PENDING, corrections + (n_heads + r) * PENDING, ZERO
        for k in range(n_found):
            correction = maximum(minimum(get(weights, new + k), LARGEST), -LARGEST)
            corrected = get(weights, old + k) * LARGEST_FACTOR * exp_of_negative(correction - LARGEST)
            total += corrected - get(weights, old + k)
            put(weights, new + k, corrected)
        m = row + r * n
        put(change, m, get(change, m) + total)
        for k in range(n_found):
            before = ZERO if r == 0 else get(weights, largest + k)
            put(weights, largest + k, maximum(before, get(weights, new + k)))


@fast_jit
def split_by_weight(
    n_found: int, base: int, threshold: Scalar, heads: Heads, memory: Memory, values: Values, tail_of: Tail
) -> tuple[int, int]:
    """Lists the tokens to read in two planes and in four, with their weights; tail: what is not read after all."""
    _, _, _, n_heads, row, n, width = heads
    chosen, found, weights, new, _, _ = memory
    _, low, value_scale = values
    tail, blocks, first_block = tail_of
    old, pairs, fours = new + n_heads * PENDING, new + 2 * n_heads * PENDING, new + 3 * n_heads * PENDING
    largest, line = new + 4 * n_heads * PENDING, 2 * width // 8
    n_pairs = n_whole = 0
    for k in range(n_found):
        token, top = np.int64(get(chosen, found + k)), get(weights, largest + k)
        size = as_float(get(value_scale, base + token))
        put(chosen, found + PENDING + n_pairs, np.int32(token))
        put(chosen, found + 2 * PENDING + n_whole, np.int32(token))
        for r in range(n_heads):
            corrected, i = (
                get(weights, new + r * PENDING + k),
                (row + r * n) * blocks + token // BLOCK - first_block,
            )
            left = corrected if top < threshold else ZERO
            put(tail, i, get(tail, i) - get(weights, old + r * PENDING + k) + left)
            put(weights, pairs + r * PENDING + n_pairs, corrected * size * STEP_OF_PAIR)
            put(weights, fours + r * PENDING + n_whole, corrected * size)
        if top >= LARGE * threshold:
            n_whole += 1
            for i in range(0, line, LINE):
                simd.prefetch(low, (base + token) * line + i)
        elif top >= threshold:
            n_pairs += 1
    return n_pairs, n_whole


@fast_jit
def add_planes(
    n_pairs: int, n_whole: int, base: int, heads: Heads, memory: Memory, values: Values, out: F32
) -> None:
    """out += the weights times the values of the listed tokens: two planes, or all four."""
    _, _, _, n_heads, row, n, width = heads
    chosen, found, weights, first, _, _ = memory
    top, low, _ = values
    pairs, fours, line = found + PENDING, found + 2 * PENDING, width // 8
    for r in range(n_heads):
        light = first + (2 * n_heads + r) * PENDING
        heavy = light + n_heads * PENDING
        shift = PAIR_MIDDLE * add_up(weights, light, n_pairs) + MIDDLE * add_up(weights, heavy, n_whole)
        for d in range(0, width, TILE):
            a0 = a1 = a2 = a3 = simd.splat(-shift)
            for k in range(n_pairs):
                i = (base + np.int64(get(chosen, pairs + k))) * 2 * line + d // 8
                w1 = simd.broadcast(weights, light + k)
                w2 = simd.add(w1, w1)
                a0 = add_where(top, i + line, w1, add_where(top, i, w2, a0))
                a1 = add_where(top, i + line + STRIP, w1, add_where(top, i + STRIP, w2, a1))
                a2 = add_where(top, i + line + 2 * STRIP, w1, add_where(top, i + 2 * STRIP, w2, a2))
                a3 = add_where(top, i + line + 3 * STRIP, w1, add_where(top, i + 3 * STRIP, w2, a3))
            for k in range(n_whole):
                i = (base + np.int64(get(chosen, fours + k))) * 2 * line + d // 8
                w1 = simd.broadcast(weights, heavy + k)
                w2 = simd.add(w1, w1)
                w4 = simd.add(w2, w2)
                w8 = simd.add(w4, w4)
                a0 = _add_four(top, low, i, line, w8, w4, w2, w1, a0)
                a1 = _add_four(top, low, i + STRIP, line, w8, w4, w2, w1, a1)
                a2 = _add_four(top, low, i + 2 * STRIP, line, w8, w4, w2, w1, a2)
                a3 = _add_four(top, low, i + 3 * STRIP, line, w8, w4, w2, w1, a3)
            target = (row + r * n) * width + d
            simd.store(out, target, simd.add(simd.load(out, target), a0))
            simd.store(out, target + LANES, simd.add(simd.load(out, target + LANES), a1))
            simd.store(out, target + 2 * LANES, simd.add(simd.load(out, target + 2 * LANES), a2))
            simd.store(out, target + 3 * LANES, simd.add(simd.load(out, target + 3 * LANES), a3))


@fast_jit
def add_up(x: F32, start: int, n: int) -> Scalar:
    """The sum of x[start:][:n]."""
    total = ZERO
    for i in range(start, start + n):
        total += get(x, i)
    return total


@inline_jit
def _add_four(
    top: U8,
    low: U8,
    i: int,
    line: int,
    w8: simd.Vector,
    w4: simd.Vector,
    w2: simd.Vector,
    w1: simd.Vector,
    so_far: simd.Vector,
) -> simd.Vector:
    upper = add_where(top, i + line, w4, add_where(top, i, w8, so_far))
    return add_where(low, i + line, w1, add_where(low, i, w2, upper))
