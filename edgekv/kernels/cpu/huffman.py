"""Blocks of tokens in variable-length codes: packed, and decoded where they are multiplied."""

import numpy as np
from numba import prange

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.codes import F32, U8, U16, U32, U64
from edgekv.kernels.cpu.byte_rows import ROWS, add_codes, add_constant, score_codes, weigh
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.huffman_decode import RUNS, decode, run_gap
from edgekv.kernels.cpu.jit import Args, fast_jit, jit, parallel_jit
from edgekv.kernels.cpu.launch import (
    add_partial_sums,
    flat,
    partial_sums,
    run,
    token_span,
    token_splits,
)
from edgekv.kernels.cpu.scalar import get, put

SIZE_WORK, PACK_WORK, DECODE_WORK = 4, 20, 3  # of an element, in multiply-adds
ZERO = np.float32(0)
WORD_BITS = np.uint64(64)


def huffman_sizes(codes: U8, lengths: U8, bits: U16, t0: int) -> None:
    args = codes, lengths, bits, t0
    run(_size_tokens, _sizes_parallel, codes.shape[0] * codes.shape[1], SIZE_WORK * codes.size, args)


def huffman_pack(
    codes: U8, words: U16, lengths: U8, plain: U8, offsets: U32, b0: int, block: int, pool: U64
) -> None:
    args = codes, words, lengths, plain, offsets, b0, block, pool
    run(_pack_blocks, _pack_parallel, plain.size, PACK_WORK * codes.size, args)


def scores_huffman(
    q: F32,
    pool: U64,
    offsets: U32,
    bits: U16,
    table: U64,
    plain: U64,
    plain_bits: int,
    low: U16,
    step: U16,
    t0: int,
    t1: int,
    s: F32,
    s0: int,
) -> None:
    n_heads, _, head_dim = q.shape
    work = (DECODE_WORK * n_heads * head_dim + q.size) * (t1 - t0)
    splits = token_splits(n_heads, work)
    store = pool.view(np.uint8), offsets, bits, table, plain, plain_bits, low, step
    scratch = _scratch(n_heads * splits, head_dim)
    args = splits, np.ascontiguousarray(q), *store, t0, t1, *flat(s), s0, *scratch
    run(_scores_items, _scores_parallel, n_heads * splits, work, args)


def values_huffman(
    p: F32,
    s0: int,
    pool: U64,
    offsets: U32,
    bits: U16,
    table: U64,
    plain: U64,
    plain_bits: int,
    low: U16,
    step: U16,
    t0: int,
    t1: int,
    out: F32,
) -> None:
    n_heads, _, head_dim = out.shape
    work = (DECODE_WORK * n_heads * head_dim + out.size) * (t1 - t0)
    splits = token_splits(n_heads, work)
    store = pool.view(np.uint8), offsets, bits, table, plain, plain_bits, low, step
    scratch = _scratch(n_heads * splits, head_dim)
    partial = partial_sums(out, splits)
    args = splits, *flat(p), s0, *store, t0, t1, partial, *scratch
    run(_values_items, _values_parallel, n_heads * splits, work, args)
    add_partial_sums(partial, out)


def _scratch(n_items: int, head_dim: int) -> tuple[U8, F32]:
    """A block's codes, and ROWS scaled queries or weights; a thread stays with the row of its first item."""
    codes = np.empty((n_items, RUNS * run_gap(head_dim)), np.uint8)
    return codes, np.empty((n_items, ROWS * max(head_dim, BLOCK)), np.float32)


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


@parallel_jit
def _sizes_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _size_tokens(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


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


@parallel_jit
def _pack_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _pack_blocks(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@fast_jit
def _scores_items(first: int, last: int, args: Args) -> None:
    splits, q, stream, offsets, bits, table, plain, plain_bits, low, step = args[:10]
    t0, t1, s, gap_g, gap_m, s0, codes, scaled = args[10:]
    (_, n_rows, head_dim), block = q.shape, bits.shape[1] // offsets.shape[1]
    q, codes, scaled = q.reshape(-1), codes[first], scaled[first]
    for item in range(first, last):
        g = item // splits
        t, end = token_span(t0, t1, splits, item % splits)
        while t < end:
            b = t // block
            n = min(end - t, (b + 1) * block - t, BLOCK)
            n_run = decode(stream, offsets[g, b], bits[g], t, n, block, table, plain, plain_bits, codes, head_dim)
            query, row = g * n_rows * head_dim, g * gap_g + s0 + t - t0
            for m in range(0, n_rows, ROWS):
                rows = min(ROWS, n_rows - m)
                _score_runs(
                    q, query, rows, codes, n, n_run, head_dim, low[g, b], step[g, b], scaled, s, row, gap_m
                )
                query, row = query + rows * head_dim, row + rows * gap_m
            t += n


@parallel_jit
def _scores_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _scores_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


@fast_jit
def _values_items(first: int, last: int, args: Args) -> None:
    splits, p, gap_g, gap_m, s0, stream, offsets, bits, table, plain, plain_bits = args[:11]
    low, step, t0, t1, out, codes, weights = args[11:]
    (n_heads, n_rows, head_dim), block = out.shape[1:], bits.shape[1] // offsets.shape[1]
    out, codes, weights = out.reshape(-1), codes[first], weights[first]
    for item in range(first, last):
        g, split = item // splits, item % splits
        t, end = token_span(t0, t1, splits, split)
        while t < end:
            b = t // block
            n = min(end - t, (b + 1) * block - t, BLOCK)
            n_run = decode(stream, offsets[g, b], bits[g], t, n, block, table, plain, plain_bits, codes, head_dim)
            column, target = g * gap_g + s0 + t - t0, (split * n_heads + g) * n_rows * head_dim
            for m in range(0, n_rows, ROWS):
                rows = min(ROWS, n_rows - m)
                for r in range(rows):
                    shift = weigh(p, column + r * gap_m, n, low[g], step[g], t, weights, r * BLOCK)
                    add_constant(out, target + r * head_dim, head_dim, shift)
                _add_runs(weights, rows, codes, n, n_run, head_dim, out, target)
                column, target = column + rows * gap_m, target + rows * head_dim
            t += n


@parallel_jit
def _values_parallel(n_parts: int, n_items: int, args: Args) -> None:
    for part in prange(n_parts):
        _values_items(n_items * part // n_parts, n_items * (part + 1) // n_parts, args)


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
