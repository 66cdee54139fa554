"""Sign sketches: one bit per element, 64 to a word, compared by XOR and a count of bits."""

import numpy as np
from numba import prange

from edgekv.kernels.contract.attention import BLOCK, F32, U64
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.jit import Args, Scalar, jit, parallel_jit
from edgekv.kernels.cpu.launch import flat, run, token_span, token_splits
from edgekv.kernels.cpu.scalar import address, count_ones, get, put

WORD_BITS = 64
WORD_WORK = 6  # XOR, count and add of a word, in multiply-adds
LANES = simd.LANES
TILE = 4 * LANES
BLOCKS_AHEAD = 4
WORDS_PER_LINE = 8
MINUS_TWO = np.float32(-2)


def pack_signs(x: F32, codes: U64, t0: int) -> None:
    args = np.ascontiguousarray(x), codes, t0
    run(_pack_tokens, _pack_parallel, x.shape[0] * x.shape[1], x.size, args)


def pack_sign_rows(x: F32) -> U64:
    words = np.empty((*x.shape[:2], x.shape[2] // WORD_BITS), np.uint64)
    _pack_words(np.ascontiguousarray(x).reshape(-1), words.reshape(-1))
    return words


def scores_signs(q_codes: U64, codes: U64, t0: int, t1: int, scale: F32, s: F32, s0: int) -> None:
    work = WORD_WORK * q_codes.size * (t1 - t0)
    splits = token_splits(q_codes.shape[0], work)
    args = splits, q_codes, codes, t0, t1, np.ascontiguousarray(scale), *flat(s), s0
    run(_scores_items, _scores_parallel, q_codes.shape[0] * splits, work, args)


@jit
def _pack_tokens(first: int, last: int, args: Args) -> None:
    x, codes, t0 = args
    _, n_tokens, n_bits = x.shape
    x = x.reshape(-1)
    for item in range(first, last):
        g, t = item // n_tokens, t0 + item % n_tokens
        for w in range(n_bits // WORD_BITS):
            codes[g, t // BLOCK, w, t % BLOCK] = _pack_word(x, item * n_bits + w * WORD_BITS)


@parallel_jit
def _pack_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _pack_tokens(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


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


@jit
def _scores_items(first: int, last: int, args: Args) -> None:
    splits, q, codes, t0, t1, scale, s, gap_g, gap_m, s0 = args
    n_rows, n_words = q.shape[1:]
    block_words = n_words * BLOCK
    head_words = codes.shape[1] * block_words
    q, codes, scale, s = address(q), address(codes), address(scale), address(s)
    for item in range(first, last):
        g = item // splits
        start, end = token_span(t0, t1, splits, item % splits)
        for block in range(start // BLOCK, (end + BLOCK - 1) // BLOCK):
            i = max(start - block * BLOCK, 0)
            n = min(end - block * BLOCK, BLOCK) - i
            key = g * head_words + block * block_words + i
            for j in range(0, block_words, WORDS_PER_LINE):
                simd.prefetch(codes, key + BLOCKS_AHEAD * block_words + j)
            query = g * n_rows * n_words
            row = g * gap_g + s0 + block * BLOCK + i - t0
            for m in range(g * n_rows, (g + 1) * n_rows):
                _score_block(q, query, n_words, codes, key, get(scale, m), s, row, n)
                query, row = query + n_words, row + gap_m


@parallel_jit
def _scores_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _scores_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@jit
def _score_block(
    q: U64, query: int, n_words: int, codes: U64, key: int, scale: Scalar, s: F32, row: int, n: int
) -> None:
    """s[row:][:n] = scale * (b - 2 * popcount(q XOR k)) for the n tokens from codes[key] on."""
    n_bits = np.float32(WORD_BITS * n_words)
    whole = n // TILE * TILE
    for i in range(0, whole, TILE):
        a0 = a1 = a2 = a3 = simd.no_counts()
        for w in range(n_words):
            word, j = get(q, query + w), key + w * BLOCK + i
            a0 = simd.count_differing(word, codes, j, a0)
            a1 = simd.count_differing(word, codes, j + LANES, a1)
            a2 = simd.count_differing(word, codes, j + 2 * LANES, a2)
            a3 = simd.count_differing(word, codes, j + 3 * LANES, a3)
        simd.store(s, row + i, _as_scores(a0, n_bits, scale))
        simd.store(s, row + i + LANES, _as_scores(a1, n_bits, scale))
        simd.store(s, row + i + 2 * LANES, _as_scores(a2, n_bits, scale))
        simd.store(s, row + i + 3 * LANES, _as_scores(a3, n_bits, scale))
    for i in range(whole, n):
        differing = np.uint64(0)
        for w in range(n_words):
            differing += count_ones(get(q, query + w) ^ get(codes, key + w * BLOCK + i))
        put(s, row + i, scale * (n_bits + MINUS_TWO * np.float32(differing)))


@jit
def _as_scores(differing: simd.Vector, n_bits: Scalar, scale: Scalar) -> simd.Vector:
    agreeing = simd.multiply_add(simd.splat(MINUS_TWO), simd.as_vector(differing), simd.splat(n_bits))
    return simd.multiply(simd.splat(scale), agreeing)
