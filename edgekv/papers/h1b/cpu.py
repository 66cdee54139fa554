"""Sign sketches on the CPU: 64 signs to a word, compared by XOR and a count of 1 bits."""

import functools
from typing import Any

import numpy as np
from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import Scalar, intrinsic, jit
from edgekv.kernels.cpu.launch import exact_kernel
from edgekv.kernels.cpu.loops import (
    CpuCodec,
    address_of,
    floats,
    int64s,
    load_arguments,
    prepare_loop,
    put_loop,
    score_loop,
    words,
)
from edgekv.kernels.cpu.rope import multiply_row
from edgekv.kernels.cpu.scalar import count_ones, get, put, sign_bits
from edgekv.kernels.interface import BLOCK
from edgekv.types import F32, U64

WORD_BITS = 64
LANES = emit.LANES
TILE = 4 * LANES
PREFETCH_BLOCKS = 4
ENCODE_TOKENS = 512  # projected at a time: bounds the projected keys, bits / head_dim times x
WORDS_PER_LINE = 8
ONE, MINUS_TWO = np.array([1, -2], np.float32)


def pack_signs(x: F32, codes: U64, t0: int) -> None:
    """Stores the signs of x (n_kv_heads, n, bits) as tokens t0.. of codes, as `codec.pack_signs` does."""
    n_groups, n, n_bits = x.shape
    _pack_tokens(n_groups * n, x.size, np.ascontiguousarray(x), n, n_bits, codes, codes.shape[1], t0)


@prepare_loop
def _prepare(args: int, q: int, rows: int, g: int, prepared: int) -> None:
    """Writes the signs of R q, then a scale for each row, then scratch for one row of R q."""
    x = int64s(args)
    n_words, n_bits, head_dim, n_tau = get(x, 2), get(x, 4), get(x, 5), get(x, 7)
    codes, scale = words(prepared), floats(prepared + 8 * rows * n_words)
    for m in range(rows):
        multiply_row(floats(q), m * head_dim, head_dim, floats(get(x, 3)), n_bits, scale, rows)
        for w in range(n_words):
            put(codes, m * n_words + w, _pack_word(scale, rows + w * WORD_BITS))
        tau = get(floats(get(x, 6)), g * n_tau + m * n_tau // rows)  # of the row's head
        put(scale, m, ONE / (np.float32(n_bits) * tau))


@score_loop
def _score(args: int, prepared: int, rows: int, g: int, t: int, n: int, s: int, stride: int, scratch: int) -> None:
    x = int64s(args)
    codes, n_blocks, n_words = words(get(x, 0)), get(x, 1), get(x, 2)
    queries, scale = words(prepared), floats(prepared + 8 * rows * n_words)
    key = (g * n_blocks + t // BLOCK) * n_words * BLOCK + t % BLOCK
    for j in range(0, n_words * BLOCK, WORDS_PER_LINE):
        emit.prefetch_element(codes, key + PREFETCH_BLOCKS * n_words * BLOCK + j)
    for m in range(rows):
        _score_block(queries, m * n_words, n_words, codes, key, get(scale, m), floats(s), m * stride, n)


@put_loop
def _put(args: int, key: int, n: int, g: int, t0: int, scratch: int) -> None:
    x = int64s(args)
    codes, n_blocks, n_words = words(get(x, 0)), get(x, 1), get(x, 2)
    n_bits, head_dim, projected = get(x, 4), get(x, 5), floats(scratch)
    centre, centred = floats(get(x, 8)), floats(scratch + 4 * n_bits)
    for t in range(t0, t0 + n):
        for i in range(head_dim):
            put(centred, i, get(floats(key), (t - t0) * head_dim + i) - get(centre, g * head_dim + i))
        multiply_row(centred, 0, head_dim, floats(get(x, 3)), n_bits, projected, 0)
        for w in range(n_words):
            index = ((g * n_blocks + t // BLOCK) * n_words + w) * BLOCK + t % BLOCK
            put(codes, index, _pack_word(projected, w * WORD_BITS))


def _args(codec: Any) -> tuple[int, ...]:
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
    bits = int(codec.bits)
    return rows * (bits // 8 + 4) + 4 * bits


def _encode(codec: Any, x: F32, t0: int) -> None:
    for a in range(0, x.shape[1], ENCODE_TOKENS):
        keys = codec.centred(x[:, a : a + ENCODE_TOKENS])
        pack_signs(keys @ codec.projection.T, codec.arrays["signs"], t0 + a)


KERNELS = {
    "signs": CpuCodec(
        _args,
        prepare=_prepare,
        score=_score,
        put=_put,
        prepared=_prepared_bytes,
        put_scratch=lambda codec: 4 * (codec.bits + codec.head_dim),
        encode=_encode,
    )
}


@exact_kernel
def _pack_tokens(first: int, last: int, thread: int, arguments: int) -> None:
    x, n, n_bits, codes, n_blocks, t0 = load_arguments(arguments, 6)
    n_words = n_bits // WORD_BITS
    for item in range(first, last):
        g, t = item // n, t0 + item % n
        for w in range(n_words):
            index = ((g * n_blocks + t // BLOCK) * n_words + w) * BLOCK + t % BLOCK
            put(words(codes), index, _pack_word(floats(x), item * n_bits + w * WORD_BITS))


@jit
def _pack_word(x: F32, start: int) -> Scalar:
    word = np.uint64(0)
    for bit in range(0, WORD_BITS, 8):
        word |= np.uint64(sign_bits(x, start + bit)) << np.uint64(bit)
    return word


@jit
def _score_block(
    q: U64, query: int, n_words: int, codes: U64, key: int, scale: Scalar, s: F32, row: int, n: int
) -> None:
    """Sets s[row:][:n] = scale * (b - 2 * popcount(q XOR k)) for the n tokens from codes[key] on."""
    n_tiled = n // TILE * TILE
    for i in range(0, n_tiled, TILE):
        _score_tile(q, query, codes, key + i, n_words, scale, s, row + i)
    for i in range(n_tiled, n):
        differing = np.uint64(0)
        for w in range(n_words):
            differing += count_ones(get(q, query + w) ^ get(codes, key + w * BLOCK + i))
        put(s, row + i, scale * (np.float32(WORD_BITS * n_words) + MINUS_TWO * np.float32(differing)))


@intrinsic
def _score_tile(
    context: Any, q: Any, query: Any, codes: Any, key: Any, n_words: Any, scale: Any, s: Any, i: Any
) -> Any:
    """Does `_score_block` for TILE tokens."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        query, key, to = (emit.address(context, b, *x) for x in ((q, args), (codes, args[2:]), (s, args[6:])))
        zeros = [emit.constant(COUNTS, 0)] * (TILE // LANES)
        with emit.loop(b, emit.I64(0), args[4], 1, zeros) as word:
            one = emit.splat(b, emit.load(b, emit.I64, b.add(query, b.mul(word.i, emit.I64(8)))), LANES)
            keys = b.add(key, b.mul(word.i, emit.I64(8 * BLOCK)))
            words = (emit.load(b, WORDS, keys, 8 * LANES * k) for k in range(TILE // LANES))
            word.next = [_count(b, b.xor(x, one), count) for x, count in zip(words, word.values, strict=True)]
        bits = emit.splat(b, b.sitofp(b.mul(args[4], emit.I64(WORD_BITS)), emit.F32), LANES)
        for k, counts in enumerate(word.values):
            agreeing = b.fsub(bits, b.fmul(emit.constant(FLOATS, 2), _as_floats(b, counts)))
            emit.store(b, b.fmul(emit.splat(b, args[5], LANES), agreeing), to, 4 * LANES * k)
        return context.get_dummy_value()

    integer = types.intp
    return types.none(q, integer, codes, integer, integer, types.float32, s, integer), build


# Bit counts of LANES words: one number per word; on Arm two numbers, or four, which are added up at the end.
WORDS, FLOATS, INTS = (emit.vector(kind, LANES) for kind in (emit.I64, emit.F32, emit.I32))
COUNTS = WORDS
if emit.IS_ARM:
    COUNTS = emit.vector(emit.I32, 2 * LANES) if emit.has_dot() else emit.vector(emit.I16, 4 * LANES)
BYTES16, EIGHT, FOUR = emit.vector(emit.I8, 16), emit.vector(emit.I16, 8), emit.vector(emit.I32, 4)


def _count(b: Any, words: Any, counts: Any) -> Any:
    """Returns counts + the 1 bits of words."""
    if emit.IS_ARM:
        return emit.by_register(b, functools.partial(_count_on_arm, b), words, counts)
    return b.add(emit.call(b, f"llvm.ctpop.v{LANES}i64", WORDS, words), counts)


def _count_on_arm(b: Any, words: Any, counts: Any) -> Any:
    ones = emit.call(b, "llvm.ctpop.v16i8", BYTES16, b.bitcast(words, BYTES16))
    if emit.has_dot():
        return emit.add_products(b, ones, emit.constant(BYTES16, 1), counts, "u")
    return b.add(counts, emit.call(b, "llvm.aarch64.neon.uaddlp.v8i16.v16i8", EIGHT, ones))


def _as_floats(b: Any, counts: Any) -> Any:
    if not emit.IS_ARM:
        return b.sitofp(b.trunc(counts, INTS), FLOATS)
    if not emit.has_dot():
        add_pairs = functools.partial(emit.call, b, "llvm.aarch64.neon.uaddlp.v4i32.v8i16", FOUR)
        counts = emit.by_register(b, add_pairs, counts)
    even, odd = (emit.shuffle(b, counts, range(first, 2 * LANES, 2)) for first in (0, 1))
    return b.sitofp(b.add(even, odd), FLOATS)
