"""Blocks of tokens in variable-length codes: packed, and decoded where they are multiplied."""

from typing import Any

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.jit import Args, fast_jit, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import (
    Loops,
    add_loop,
    address_of,
    chars,
    floats,
    halves,
    numbers,
    score_loop,
    words,
    words32,
)
from edgekv.kernels.cpu.papers.byte_rows import ROWS, add_codes, add_constant, score_codes, weigh
from edgekv.kernels.cpu.papers.huffman_decode import OVERRUN, RUN_TOKENS, RUNS, decode, run_gap
from edgekv.kernels.cpu.scalar import get, put
from edgekv.types import F32, U8, U16, U32, U64

SIZE_WORK, PACK_WORK = 4, 20  # of an element, in multiply-adds
ZERO = np.float32(0)
WORD_BITS = np.uint64(64)


def huffman_sizes(codes: U8, lengths: U8, bits: U16, t0: int) -> None:
    args = codes, lengths, bits, t0
    run(_size_tokens, codes.shape[0] * codes.shape[1], SIZE_WORK * codes.size, args)


def huffman_pack(
    codes: U8, words: U16, lengths: U8, plain: U8, offsets: U32, b0: int, block: int, pool: U64
) -> None:
    args = codes, words, lengths, plain, offsets, b0, block, pool
    run(_pack_blocks, plain.size, PACK_WORK * codes.size, args)


@jit
def _size_tokens(first: int, last: int, args: Args) -> None:
    codes, lengths, bits, t0 = args
    _, n_tokens, head_dim = codes.shape
    codes = codes.reshape(-1)
    for item in range(first, last):
        total = np.int32(0)
        for d in range(head_dim):
            total += np.int32(get(lengths, get(codes, item * head_dim + d)))
        bits[item // n_tokens, t0 + item % n_tokens] = np.uint16(total)


@jit
def _pack_blocks(first: int, last: int, args: Args) -> None:
    codes, words, lengths, plain, offsets, b0, block, pool = args
    n_blocks, n_codes = plain.shape[1], block * codes.shape[2]
    codes = codes.reshape(-1)
    for item in range(first, last):
        g, b = item // n_blocks, item % n_blocks
        form, start = plain[g, b], item * n_codes
        _pack_block(codes, start, n_codes, words[form], lengths[form], pool, np.int64(offsets[g, b0 + b]))


@jit
def _pack_block(codes: U8, start: int, n: int, words: U16, lengths: U8, pool: U64, word: int) -> None:
    pending, n_pending = np.uint64(0), np.uint64(0)
    for i in range(start, start + n):
        code = get(codes, i)
        bits, length = np.uint64(get(words, code)), np.uint64(get(lengths, code))
        pending |= bits << n_pending
        n_pending += length
        if n_pending >= WORD_BITS:
            put(pool, word, pending)
            word += 1
            n_pending -= WORD_BITS
            pending = bits >> (length - n_pending)
    if n_pending:
        put(pool, word, pending)


@fast_jit
def _score_runs(
    q: F32,
    query: int,
    n_rows: int,
    codes: U8,
    n: int,
    n_run: int,
    head_dim: int,
    low: U16,
    step: U16,
    scaled: F32,
    s: F32,
    row: int,
    gap_m: int,
) -> None:
    """s = q times low + q * step times codes, for at most ROWS rows."""
    for r in range(n_rows):
        for d in range(head_dim):
            put(scaled, r * head_dim + d, get(q, query + r * head_dim + d) * as_float(get(step, d)))
    for start in range(0, n, n_run):
        code, n_tokens = start // n_run * run_gap(head_dim), min(n_run, n - start)
        score_codes(scaled, 0, n_rows, codes, code, n_tokens, head_dim, s, row + start, gap_m)
    for r in range(n_rows):
        shift = ZERO
        for d in range(head_dim):
            shift += get(q, query + r * head_dim + d) * as_float(get(low, d))
        add_constant(s, row + r * gap_m, n, shift)


@fast_jit
def _add_runs(w: F32, n_rows: int, codes: U8, n: int, n_run: int, head_dim: int, out: F32, target: int) -> None:
    for start in range(0, n, n_run):
        code, n_tokens = start // n_run * run_gap(head_dim), min(n_run, n - start)
        add_codes(w, start, n_rows, codes, code, n_tokens, head_dim, out, target)


@score_loop
def _score(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    head_dim, capacity, block, low_at, step_at = _numbers(store)
    queries, to = floats(q), floats(s)
    codes, scaled = chars(scratch), floats(scratch + RUNS * run_gap(head_dim))
    end, column = t + n, 0
    while t < end:
        few = min(end - t, block - t % block, BLOCK)
        n_run = _decode(store, g, t, few, codes)
        channels = 2 * (g * (capacity // block) + t // block) * head_dim
        low, step = halves(low_at + channels), halves(step_at + channels)
        for m in range(0, rows, ROWS):
            n_rows, row = min(ROWS, rows - m), m * gap + column
            _score_runs(
                queries, m * head_dim, n_rows, codes, few, n_run, head_dim, low, step, scaled, to, row, gap
            )
        t, column = t + few, column + few


@add_loop
def _add(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    head_dim, capacity, block, low_at, step_at = _numbers(store)
    low, step = halves(low_at + 2 * g * capacity), halves(step_at + 2 * g * capacity)
    chances, to = floats(p), floats(out)
    codes, weights = chars(scratch), floats(scratch + RUNS * run_gap(head_dim))
    end, column = t + n, 0
    while t < end:
        few = min(end - t, block - t % block, BLOCK)
        n_run = _decode(store, g, t, few, codes)
        for m in range(0, rows, ROWS):
            n_rows, target = min(ROWS, rows - m), m * head_dim
            for r in range(n_rows):
                shift = weigh(chances, (m + r) * gap + column, few, low, step, t, weights, r * BLOCK)
                add_constant(to, target + r * head_dim, head_dim, shift)
            _add_runs(weights, n_rows, codes, few, n_run, head_dim, to, target)
        t, column = t + few, column + few


@jit
def _decode(store: int, g: int, t: int, n: int, codes: U8) -> int:
    """`decode` n tokens of head g from t on."""
    head_dim, capacity, block, _, _ = _numbers(store)
    x = numbers(store)
    stream, offsets, bits = chars(get(x, 5)), words32(get(x, 6)), halves(get(x, 7) + 2 * g * capacity)
    table, plain = words(get(x, 8)), words(get(x, 9))
    offset = get(offsets, g * (capacity // block) + t // block)
    n_run: int = decode(stream, offset, bits, t, n, block, table, plain, get(x, 10), codes, head_dim)
    return n_run


@jit
def _numbers(store: int) -> tuple[int, int, int, int, int]:
    x = numbers(store)
    return get(x, 0), get(x, 1), get(x, 2), get(x, 3), get(x, 4)


def _store(codec: Any) -> tuple[int, ...]:
    pool, offsets, bits, table, plain, plain_bits, low, step = codec.store()
    coded = (address_of(array) for array in (pool, offsets, bits, table, plain))
    return codec.head_dim, codec.capacity, codec.block, address_of(low), address_of(step), *coded, plain_bits


def _scratch(codec: Any, rows: int) -> int:
    """A block's codes, and ROWS scaled queries or weights."""
    size: int = RUNS * (RUN_TOKENS * codec.head_dim + OVERRUN) + 4 * ROWS * max(codec.head_dim, BLOCK)
    return size


LOOPS = {
    "huffman_keys": Loops(_store, score=_score, scratch=_scratch),
    "huffman_values": Loops(_store, add=_add, scratch=_scratch),
}
