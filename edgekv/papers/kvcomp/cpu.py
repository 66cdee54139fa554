"""Huffman-coded blocks of tokens on the CPU: packed, and decoded into a tile in the core's own cache.

A table looked up by the next TABLE_BITS bits gives up to seven symbols at once, written as one word whether they
all count or not: no branch depends on the data. Four runs of tokens are decoded side by side, since each lookup
must wait for the one before it.
"""

from typing import Any

import numpy as np
from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import Scalar, fast_jit, intrinsic, jit
from edgekv.kernels.cpu.launch import exact_kernel
from edgekv.kernels.cpu.loops import address_of, chars, halves, int64s, load_arguments, words, words32
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.tile import TILE, decode_channels, decode_loop, decode_tokens, load_halves, tiled
from edgekv.kernels.interface import BLOCK
from edgekv.papers.kvcomp.reference import TABLE_BITS
from edgekv.types import F32, U8, U16, U32, U64

PACK_WORK = 20  # cost of packing an element, in multiply-adds
WORD_BITS = np.uint64(64)
RUNS = 4
RUN_TOKENS = BLOCK // RUNS
LOOKUPS = 57 // TABLE_BITS  # per load: a word that is read at a byte border has at least 57 bits left
OVERRUN = 64  # bytes behind a run: decoding writes up to LOOKUPS * TABLE_SYMBOLS + 7 beyond its end
BYTE_BITS, BIT_IN_BYTE = np.uint64(3), np.uint64(7)
INDEX = np.uint64((1 << TABLE_BITS) - 1)
LENGTH_SHIFT, LENGTH_MASK, NUMBER_SHIFT = np.uint64(56), np.uint64(15), np.uint64(60)


def huffman_pack(
    codes: U8, words: U16, lengths: U8, plain: U8, offsets: U32, b0: int, block: int, pool: U64
) -> None:
    """Packs blocks of codes (n_kv_heads, n, head_dim) as `reference.huffman_pack` does."""
    arrays = (np.ascontiguousarray(array) for array in (codes, words, lengths, plain, offsets))
    sizes = plain.shape[1], block * codes.shape[2], words.shape[1], lengths.shape[1], offsets.shape[1], b0
    _pack_blocks(plain.size, PACK_WORK * codes.size, *sizes, *arrays, pool)


@exact_kernel
def _pack_blocks(first: int, last: int, thread: int, arguments: int) -> None:
    n_blocks, n_codes, n_words, n_lengths, n_offsets, b0 = load_arguments(arguments, 6)
    codes, all_words, lengths, plain, offsets, pool = load_arguments(arguments + 8 * 6, 6)
    for item in range(first, last):
        g, b = item // n_blocks, item % n_blocks
        form, word = np.int64(get(chars(plain), item)), np.int64(get(words32(offsets), g * n_offsets + b0 + b))
        code_words, code_lengths = halves(all_words + 2 * form * n_words), chars(lengths + form * n_lengths)
        _pack_block(chars(codes), item * n_codes, n_codes, code_words, code_lengths, words(pool), word)


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


@decode_loop
def _decode_keys(args: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    """Decodes keys: low and step are per channel of a block."""
    _read(True, args, g, t, n, tile, scratch)


@decode_loop
def _decode_values(args: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    """Decodes values: low and step are per token."""
    _read(False, args, g, t, n, tile, scratch)


@fast_jit
def _read(per_channel: bool, args: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    """Decodes n tokens, which may lie in several blocks, into tile (n, head_dim)."""
    x = int64s(args)
    head_dim, capacity, block, low_at, step_at = get(x, 0), get(x, 1), get(x, 2), get(x, 3), get(x, 4)
    n_ends = max(TILE, head_dim)
    low, step, codes = scratch, scratch + 4 * n_ends, scratch + 8 * n_ends
    done = 0
    while done < n:
        n_tokens = min(n - done, block - (t + done) % block)
        n_run = _decode_runs(args, g, t + done, n_tokens, chars(codes))
        first, n_read = g * capacity + t + done, n_tokens
        if per_channel:
            first, n_read = (g * (capacity // block) + (t + done) // block) * head_dim, head_dim
        load_halves(low_at + 2 * first, n_read, low)
        load_halves(step_at + 2 * first, n_read, step)
        for i in range(0, n_tokens, n_run):
            source, to = codes + i // n_run * run_stride(head_dim), tile + 4 * (done + i) * head_dim
            length = min(n_run, n_tokens - i)
            if per_channel:
                decode_channels(source, head_dim, 8, length, low, step, to)
            else:
                decode_tokens(source, head_dim, 8, length, low + 4 * i, step + 4 * i, head_dim, to)
        done += n_tokens


@jit
def run_stride(head_dim: int) -> int:
    """Returns the bytes from one run of decoded tokens to the next."""
    return RUN_TOKENS * head_dim + OVERRUN


@jit
def _decode_runs(args: int, g: int, t: int, n: int, codes: U8) -> Scalar:
    """Decodes n <= BLOCK tokens of one block of head g, from token t on, in RUNS runs of tokens.

    The codes of run r begin at codes[r * run_stride(head_dim)]. Returns how many tokens a run has.
    """
    x = int64s(args)
    head_dim, capacity, block = get(x, 0), get(x, 1), get(x, 2)
    stream, offsets, bits = chars(get(x, 5)), words32(get(x, 6)), halves(get(x, 7) + 2 * g * capacity)
    table, plain_bits = words(get(x, 8)), get(x, 10)
    start = t // block * block
    before = _total(bits, start, t - start)
    if before + _total(bits, t, start + block - t) == plain_bits:
        table = words(get(x, 9))  # of the fixed-length codes
    n_run = (n + RUNS - 1) // RUNS
    n1 = min(n, n_run)
    n2 = min(n, 2 * n_run)
    n3 = min(n, 3 * n_run)
    p0 = np.uint64(get(offsets, g * (capacity // block) + t // block)) * WORD_BITS + np.uint64(before)
    p1 = p0 + np.uint64(_total(bits, t, n1))
    p2 = p1 + np.uint64(_total(bits, t + n1, n2 - n1))
    p3 = p2 + np.uint64(_total(bits, t + n2, n3 - n2))
    w0 = np.uint64(0)
    w1 = np.uint64(run_stride(head_dim))
    w2, w3 = w1 + w1, w1 + w1 + w1
    e0, e1 = w0 + np.uint64(n1 * head_dim), w1 + np.uint64((n2 - n1) * head_dim)
    e2, e3 = w2 + np.uint64((n3 - n2) * head_dim), w3 + np.uint64((n - n3) * head_dim)
    while (w0 < e0) & (w1 < e1) & (w2 < e2) & (w3 < e3):
        a0, a1 = _peek(stream, p0), _peek(stream, p1)
        a2, a3 = _peek(stream, p2), _peek(stream, p3)
        for _ in range(LOOKUPS):
            a0, p0, w0 = _look_up(a0, p0, w0, table, codes)
            a1, p1, w1 = _look_up(a1, p1, w1, table, codes)
            a2, p2, w2 = _look_up(a2, p2, w2, table, codes)
            a3, p3, w3 = _look_up(a3, p3, w3, table, codes)
    _decode_rest(stream, p0, w0, e0, table, codes)
    _decode_rest(stream, p1, w1, e1, table, codes)
    _decode_rest(stream, p2, w2, e2, table, codes)
    _decode_rest(stream, p3, w3, e3, table, codes)
    return n_run


@jit
def _decode_rest(stream: U8, p: Scalar, w: Scalar, end: Scalar, table: U64, codes: U8) -> None:
    while w < end:
        a = _peek(stream, p)
        for _ in range(LOOKUPS):
            a, p, w = _look_up(a, p, w, table, codes)


@jit
def _peek(stream: U8, p: Scalar) -> Scalar:
    """Returns at least 57 bits of the stream, from bit p on."""
    return load_word(stream, p >> BYTE_BITS) >> (p & BIT_IN_BYTE)


@jit
def _look_up(a: Scalar, p: Scalar, w: Scalar, table: U64, codes: U8) -> tuple[Scalar, Scalar, Scalar]:
    """Decodes a, the bits from bit p on, to codes[w:] by one table entry; returns the next a, p and w."""
    entry = get(table, a & INDEX)
    store_word(codes, w, entry)
    length = entry >> LENGTH_SHIFT & LENGTH_MASK
    return a >> length, p + length, w + (entry >> NUMBER_SHIFT)


@jit
def _total(bits: U16, start: int, n: int) -> Scalar:
    total = np.int64(0)
    for i in range(n):
        total += np.int64(get(bits, start + i))
    return total


@intrinsic
def load_word(context: Any, array: Any, index: Any) -> Any:
    """Returns bytes index..index + 8 of a flat uint8 array as a uint64, the first byte lowest."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit.load(builder, emit.I64, emit.address(context, builder, array, args))

    return types.uint64(array, types.uint64), build


@intrinsic
def store_word(context: Any, array: Any, index: Any, word: Any) -> Any:
    """Writes a uint64 to bytes index..index + 8 of a flat uint8 array, the lowest byte first."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit.store(builder, args[2], emit.address(context, builder, array, args))
        return context.get_dummy_value()

    return types.none(array, types.uint64, types.uint64), build


def _args(codec: Any) -> tuple[int, ...]:
    pool, offsets, bits, table, plain, plain_bits, low, step = codec.store()
    coded = (address_of(array) for array in (pool, offsets, bits, table, plain))
    return codec.head_dim, codec.capacity, codec.block, address_of(low), address_of(step), *coded, plain_bits


def _scratch(codec: Any) -> int:
    """Returns the bytes of scratch: lows and steps of a tile, and its codes."""
    return 8 * max(TILE, int(codec.head_dim)) + RUNS * (RUN_TOKENS * int(codec.head_dim) + OVERRUN)


def _encode(codec: Any, x: F32, t0: int) -> None:
    codec.encode_by(huffman_pack, x, t0)


KERNELS = {
    "huffman_keys": tiled(_args, _decode_keys, _scratch, encode=_encode),
    "huffman_values": tiled(_args, _decode_values, _scratch, encode=_encode),
}
