"""Sign sketches: one bit per element, 64 to a word, compared by XOR and a count of bits."""

from typing import Any

import numpy as np

from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.compile import Args, Scalar, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import Loops, address_of, floats, numbers, prepare_loop, put_loop, score_loop, words
from edgekv.kernels.cpu.rope import multiply_row
from edgekv.kernels.cpu.scalar import count_ones, get, put
from edgekv.kernels.interface import BLOCK
from edgekv.types import F32, U64

WORD_BITS = 64
LANES = simd.LANES
TILE = 4 * LANES
BLOCKS_AHEAD = 4
ENCODE_TOKENS = 512  # projected at a time: bounds the projected keys, bits / head_dim times x
WORDS_PER_LINE = 8
ONE, MINUS_TWO = np.array([1, -2], np.float32)


def pack_signs(x: F32, codes: U64, t0: int) -> None:
    """Stores the signs of x (G, n, bits) as tokens t0.. of codes."""
    args = np.ascontiguousarray(x), codes, t0
    run(_pack_tokens, x.shape[0] * x.shape[1], x.size, args)


@prepare_loop
def _prepare(store: int, q: int, rows: int, g: int, prepared: int) -> None:
    """The signs of R q, then a scale for each row, then room for one row of R q."""
    x = numbers(store)
    n_words, n_bits, head_dim, n_tau = get(x, 2), get(x, 4), get(x, 5), get(x, 7)
    codes, scale = words(prepared), floats(prepared + 8 * rows * n_words)
    for m in range(rows):
        multiply_row(floats(q), m * head_dim, head_dim, floats(get(x, 3)), n_bits, scale, rows)
        for w in range(n_words):
            put(codes, m * n_words + w, _pack_word(scale, rows + w * WORD_BITS))
        tau = get(floats(get(x, 6)), g * n_tau + m * n_tau // rows)  # of the row's head
        put(scale, m, ONE / (np.float32(n_bits) * tau))


@score_loop
def _score(store: int, prepared: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    x = numbers(store)
    codes, n_blocks, n_words = words(get(x, 0)), get(x, 1), get(x, 2)
    queries, scale = words(prepared), floats(prepared + 8 * rows * n_words)
    key = (g * n_blocks + t // BLOCK) * n_words * BLOCK + t % BLOCK
    for j in range(0, n_words * BLOCK, WORDS_PER_LINE):
        simd.prefetch(codes, key + BLOCKS_AHEAD * n_words * BLOCK + j)
    for m in range(rows):
        _score_block(queries, m * n_words, n_words, codes, key, get(scale, m), floats(s), m * gap, n)


@put_loop
def _put(store: int, key: int, n: int, g: int, t0: int, scratch: int) -> None:
    x = numbers(store)
    codes, n_blocks, n_words = words(get(x, 0)), get(x, 1), get(x, 2)
    n_bits, head_dim, projected = get(x, 4), get(x, 5), floats(scratch)
    centre, centred = floats(get(x, 8)), floats(scratch + 4 * n_bits)
    for t in range(t0, t0 + n):
        for i in range(head_dim):
            put(centred, i, get(floats(key), (t - t0) * head_dim + i) - get(centre, g * head_dim + i))
        multiply_row(centred, 0, head_dim, floats(get(x, 3)), n_bits, projected, 0)
        for w in range(n_words):
            place = ((g * n_blocks + t // BLOCK) * n_words + w) * BLOCK + t % BLOCK
            put(codes, place, _pack_word(projected, w * WORD_BITS))


def _store_numbers(codec: Any) -> tuple[int, ...]:
    signs, projection = codec.arrays["signs"], codec.projection
    sizes = codec.bits, codec.head_dim
    return (
        address_of(signs),
        *signs.shape[1:3],
        address_of(projection),
        *sizes,
        address_of(codec.tau),
        codec.tau.shape[1],
        address_of(codec.centre),
    )


def _prepared_bytes(codec: Any, rows: int) -> int:
    size: int = rows * (codec.bits // 8 + 4) + 4 * codec.bits
    return size


def _encode(codec: Any, x: F32, t0: int) -> None:
    for a in range(0, x.shape[1], ENCODE_TOKENS):
        keys = codec.centred(x[:, a : a + ENCODE_TOKENS])
        pack_signs(keys @ codec.projection.T, codec.arrays["signs"], t0 + a)


LOOPS = {
    "signs": Loops(
        _store_numbers,
        prepare=_prepare,
        score=_score,
        put=_put,
        prepared=_prepared_bytes,
        put_scratch=lambda codec: 4 * (codec.bits + codec.head_dim),
        encode=_encode,
    )
}


@jit
def _pack_tokens(first: int, last: int, args: Args) -> None:
    x, codes, t0 = args
    _, n_tokens, n_bits = x.shape
    x = x.reshape(-1)
    for item in range(first, last):
        g, t = item // n_tokens, t0 + item % n_tokens
        for w in range(n_bits // WORD_BITS):
            codes[g, t // BLOCK, w, t % BLOCK] = _pack_word(x, item * n_bits + w * WORD_BITS)


@jit
def _pack_word(x: F32, start: int) -> Scalar:
    word = np.uint64(0)
    for bit in range(0, WORD_BITS, LANES):
        word |= simd.load_signs(x, start + bit) << np.uint64(bit)
    return word


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
