"""Blocks of tokens in variable-length codes: packed, and decoded where they are multiplied."""

from typing import Any

import numpy as np

from edgekv.kernels.cpu.compile import Args, fast_jit, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import address_of, chars, halves, numbers, words, words32
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.tile import TILE, decode_channels, decode_loop, decode_tokens, tiled, widen_ends
from edgekv.papers.kvcomp.cpu_decode import OVERRUN, RUN_TOKENS, RUNS, decode, run_gap
from edgekv.types import U8, U16, U32, U64

PACK_WORK = 20  # of an element, in multiply-adds
WORD_BITS = np.uint64(64)


def huffman_pack(
    codes: U8, words: U16, lengths: U8, plain: U8, offsets: U32, b0: int, block: int, pool: U64
) -> None:
    """As the reference's, codes (G, n, D)."""
    args = codes, words, lengths, plain, offsets, b0, block, pool
    run(_pack_blocks, plain.size, PACK_WORK * codes.size, args)


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


@decode_loop
def _decode_keys(store: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    """low and step per channel of a block."""
    _read(True, store, g, t, n, tile, scratch)


@decode_loop
def _decode_values(store: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    """low and step per token."""
    _read(False, store, g, t, n, tile, scratch)


@fast_jit
def _read(per_channel: bool, store: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    """tile (n, head_dim) = n tokens, which may lie in several blocks, each decoded in runs."""
    head_dim, capacity, block, low_at, step_at = _numbers(store)
    n_ends = max(TILE, head_dim)
    low, step, codes = scratch, scratch + 4 * n_ends, scratch + 8 * n_ends
    done = 0
    while done < n:
        few = min(n - done, block - (t + done) % block)
        n_run = _decode(store, g, t + done, few, chars(codes))
        first, n_read = g * capacity + t + done, few
        if per_channel:
            first, n_read = (g * (capacity // block) + (t + done) // block) * head_dim, head_dim
        widen_ends(low_at + 2 * first, n_read, low)
        widen_ends(step_at + 2 * first, n_read, step)
        for i in range(0, few, n_run):
            source, to = codes + i // n_run * run_gap(head_dim), tile + 4 * (done + i) * head_dim
            n_tokens = min(n_run, few - i)
            if per_channel:
                decode_channels(source, head_dim, 8, n_tokens, low, step, to)
            else:
                decode_tokens(source, head_dim, 8, n_tokens, low + 4 * i, step + 4 * i, head_dim, to)
        done += few


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


def _scratch(codec: Any) -> int:
    """The bytes of a tile's ends and codes."""
    return 8 * max(TILE, int(codec.head_dim)) + RUNS * (RUN_TOKENS * int(codec.head_dim) + OVERRUN)


KERNELS = {
    "huffman_keys": tiled(_store, _decode_keys, _scratch),
    "huffman_values": tiled(_store, _decode_values, _scratch),
}
