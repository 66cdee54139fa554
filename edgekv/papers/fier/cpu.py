"""FIER's index: keys as one bit each, of two levels per channel and group of tokens."""

from typing import Any

import numpy as np

from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.compile import Scalar, fast_jit
from edgekv.kernels.cpu.loops import Loops, address_of, chars, floats, halves, numbers, score_loop
from edgekv.kernels.cpu.scalar import as_float, get, put
from edgekv.kernels.cpu.simd import add_where
from edgekv.kernels.interface import BLOCK
from edgekv.types import F32, U8, U16

LANES = simd.LANES
WORD_TOKENS, WORD_BYTES = 32, 4
HALVES_AHEAD = 2048  # of the levels: two groups of head_dim 128 and three to come
LINE_HALVES = 32  # to a cache line
ZERO, HALF, TWO = np.array([0, 0.5, 2], np.float32)


@score_loop
def _score(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    """Of whole groups: t and n are multiples of the group."""
    x = numbers(store)
    head_dim, n_groups, group = get(x, 0), get(x, 1), get(x, 2)
    signs, levels = chars(get(x, 3)), halves(get(x, 4))
    queries, to, weights = floats(q), floats(s), floats(scratch)
    per_group = group // WORD_TOKENS
    for b in range(t // group, (t + n) // group):
        level, word = (g * n_groups + b) * 2 * head_dim, (g * n_groups + b) * per_group * head_dim
        for d in range(0, 2 * head_dim, LINE_HALVES):
            simd.prefetch(levels, level + HALVES_AHEAD + d)
        for m in range(rows):
            base = _fold(queries, m * head_dim, levels, level, head_dim, weights, 0)
            for w in range(per_group):
                column = m * gap + b * group - t + w * WORD_TOKENS
                _score_word(signs, word + w * head_dim, weights, 0, head_dim, base, to, column)


@fast_jit
def _fold(q: F32, query: int, levels: U16, level: int, head_dim: int, weights: F32, weight: int) -> Scalar:
    """weights = what each channel's upper level adds to a score; returns the score of all lower levels."""
    whole = head_dim // LANES * LANES
    centres, ups, two = simd.splat(ZERO), simd.splat(ZERO), simd.splat(TWO)
    for d in range(0, whole, LANES):
        x = simd.load(q, query + d)
        up = simd.multiply(simd.multiply(x, two), simd.load(levels, level + head_dim + d))
        simd.store(weights, weight + d, up)
        centres = simd.multiply_add(x, simd.load(levels, level + d), centres)
        ups = simd.add(ups, up)
    base = simd.total(centres) - HALF * simd.total(ups)
    for d in range(whole, head_dim):
        x = get(q, query + d)
        up = TWO * x * as_float(get(levels, level + head_dim + d))
        put(weights, weight + d, up)
        base += x * as_float(get(levels, level + d)) - HALF * up
    return base


@fast_jit
def _score_word(
    signs: U8, word: int, weights: F32, weight: int, head_dim: int, base: Scalar, s: F32, column: int
) -> None:
    """s[column:][:32] = base + the sum of the weights of the channels whose bit is set, token by token."""
    whole = head_dim // 4 * 4
    for shift in range(0, WORD_TOKENS, 2 * LANES):
        a0 = a1 = simd.splat(base)
        b0 = b1 = c0 = c1 = d0 = d1 = simd.splat(ZERO)
        first, second = WORD_BYTES * word + shift // 8, WORD_BYTES * word + (shift + LANES) // 8
        for d in range(0, whole, 4):
            i, j = first + WORD_BYTES * d, second + WORD_BYTES * d
            w = simd.broadcast(weights, weight + d)
            a0, a1 = add_where(signs, i, w, a0), add_where(signs, j, w, a1)
            w = simd.broadcast(weights, weight + d + 1)
            b0, b1 = add_where(signs, i + WORD_BYTES, w, b0), add_where(signs, j + WORD_BYTES, w, b1)
            w = simd.broadcast(weights, weight + d + 2)
            c0, c1 = (
                add_where(signs, i + 2 * WORD_BYTES, w, c0),
                add_where(signs, j + 2 * WORD_BYTES, w, c1),
            )
            w = simd.broadcast(weights, weight + d + 3)
            d0, d1 = (
                add_where(signs, i + 3 * WORD_BYTES, w, d0),
                add_where(signs, j + 3 * WORD_BYTES, w, d1),
            )
        for d in range(whole, head_dim):
            i, j, w = first + WORD_BYTES * d, second + WORD_BYTES * d, simd.broadcast(weights, weight + d)
            a0, a1 = add_where(signs, i, w, a0), add_where(signs, j, w, a1)
        simd.store(s, column + shift, simd.add(simd.add(a0, b0), simd.add(c0, d0)))
        simd.store(s, column + shift + LANES, simd.add(simd.add(a1, b1), simd.add(c1, d1)))


def _store(index: Any) -> tuple[int, ...]:
    addresses = (address_of(index.arrays[name]) for name in ("signs", "levels"))
    return index.head_dim, index.n_blocks, index.block, *addresses


LOOPS = {
    "sign_index": Loops(
        _store,
        score=_score,
        block=lambda index: max(BLOCK, index.block),
        scratch=lambda index, rows: 4 * index.head_dim,
    )
}
