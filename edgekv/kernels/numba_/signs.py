"""Sign sketches: one bit per element, 64 to a word, compared by XOR and a count of bits."""

import numpy as np
from numba import prange

from edgekv.kernels.numba_ import simd
from edgekv.kernels.numba_.jit import Scalar, jit, parallel_jit
from edgekv.kernels.numba_.launch import flat, run, token_span, token_splits
from edgekv.kernels.numba_.scalar import count_ones
from edgekv.kernels.spec import BLOCK, F32, U64

WORD_BITS = 64
WORD_WORK = 6  # XOR, count and add of one word, in multiply-adds
LANES = simd.LANES
BLOCKS_AHEAD = 4
MINUS_TWO = np.float32(-2)


def pack_signs(x: F32, codes: U64, t0: int) -> None:
    n_rows = x.shape[0] * x.shape[1]
    run(_pack_items, _pack_parallel, n_rows, x.size, np.ascontiguousarray(x), codes, t0)


def pack_sign_rows(x: F32) -> U64:
    words = np.empty((*x.shape[:2], x.shape[2] // WORD_BITS), np.uint64)
    _pack_words(np.ascontiguousarray(x).reshape(-1), words.reshape(-1))
    return words


def scores_signs(q_codes: U64, codes: U64, t0: int, t1: int, scale: float, s: F32, s0: int) -> None:
    work = WORD_WORK * q_codes.size * (t1 - t0)
    splits = token_splits(q_codes.shape[0], work)
    args = splits, q_codes, codes, t0, t1, np.float32(scale), *flat(s), s0
    run(_scores_items, _scores_parallel, q_codes.shape[0] * splits, work, *args)


@jit
def _pack_items(first: int, last: int, x: F32, codes: U64, t0: int) -> None:
    _, n_tokens, n_bits = x.shape
    flat_x = x.reshape(-1)
    for item in range(first, last):
        t = t0 + item % n_tokens
        for w in range(n_bits // WORD_BITS):
            word = _pack_word(flat_x, item * n_bits + w * WORD_BITS)
            codes[item // n_tokens, t // BLOCK, w, t % BLOCK] = word


@jit
def _pack_words(x: F32, words: U64) -> None:
    for w in range(len(words)):
        words[w] = _pack_word(x, w * WORD_BITS)


@jit
def _pack_word(x: F32, start: int) -> Scalar:
    word = np.uint64(0)
    for bit in range(0, WORD_BITS, LANES):
        word |= simd.load_signs(x, start + bit) << np.uint64(bit)
    return word


@parallel_jit
def _pack_parallel(n_parts: int, n_items: int, x: F32, codes: U64, t0: int) -> None:
    for part in prange(n_parts):
        _pack_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, x, codes, t0)


@jit
def _scores_items(
    first: int,
    last: int,
    splits: int,
    q: U64,
    codes: U64,
    t0: int,
    t1: int,
    scale: Scalar,
    s: F32,
    gap_g: int,
    gap_m: int,
    s0: int,
) -> None:
    n_heads, n_rows, n_words = q.shape
    q, codes = q.reshape(-1), codes.reshape(-1)
    block_words = n_words * BLOCK
    head_words = len(codes) // n_heads
    for item in range(first, last):
        g = item // splits
        start, end = token_span(t0, t1, splits, item % splits)
        for block in range(start // BLOCK, (end + BLOCK - 1) // BLOCK):
            i = max(start - block * BLOCK, 0)
            n = min(end - block * BLOCK, BLOCK) - i
            column = g * gap_g + s0 + block * BLOCK + i - t0
            key = g * head_words + block * block_words + i
            for m in range(n_rows):
                query, row = (g * n_rows + m) * n_words, column + m * gap_m
                _score_block(q[query : query + n_words], codes, key, scale, s[row : row + n])


@jit
def _score_block(q: U64, codes: U64, key: int, scale: Scalar, s: F32) -> None:
    """s = scale * (b - 2 * popcount(q XOR k)) for the tokens of one block from codes[key] on."""
    n_bits = np.float32(WORD_BITS * len(q))
    whole = len(s) // LANES * LANES
    for i in range(0, whole, LANES):
        differing = simd.no_counts()
        for w in range(len(q)):
            word = key + w * BLOCK + i
            simd.prefetch(codes, word + BLOCKS_AHEAD * BLOCK * len(q))
            differing = simd.count_differing(q[w], codes, word, differing)
        agreeing = simd.multiply_add(simd.splat(MINUS_TWO), simd.as_vector(differing), simd.splat(n_bits))
        simd.store(s, i, simd.multiply(simd.splat(scale), agreeing))
    for i in range(whole, len(s)):
        n_differing = np.uint64(0)
        for w in range(len(q)):
            n_differing += count_ones(q[w] ^ codes[key + w * BLOCK + i])
        s[i] = scale * (n_bits + MINUS_TWO * np.float32(n_differing))


@parallel_jit
def _scores_parallel(
    n_parts: int,
    n_items: int,
    splits: int,
    q: U64,
    codes: U64,
    t0: int,
    t1: int,
    scale: Scalar,
    s: F32,
    gap_g: int,
    gap_m: int,
    s0: int,
) -> None:
    for part in prange(n_parts):
        first, last = n_items * part // n_parts, n_items * (part + 1) // n_parts
        _scores_items(first, last, splits, q, codes, t0, t1, scale, s, gap_g, gap_m, s0)
