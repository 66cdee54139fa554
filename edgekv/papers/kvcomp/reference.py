"""Blocks of tokens in variable-length codes."""

from typing import Any

import numpy as np

from edgekv.papers.kvcomp.codebook import TABLE_BITS, TABLE_SYMBOLS
from edgekv.types import U8, U16, U32, U64

WORD_BITS = 64


def huffman_pack(
    codes: U8, words: U16, lengths: U8, plain: U8, offsets: U32, b0: int, block: int, pool: U64
) -> None:
    """Writes the blocks of codes (G, n, D) as bit strings into pool, block b at word offsets[g, b0 + b].

    Tokens of a block follow each other without gaps, elements in order; bit i of a block is bit i % 64 of its
    word i // 64, the first bit of a code word being its lowest. words, lengths (2, levels): row 0 the Huffman
    code, row 1 the fixed-length one, and plain (G, n // block) says which. Bits beyond a block's end are 0.

    Who reads a token finds it at its block's offset plus the bits before it, as in `huffman_sizes`; a block
    whose bits are those of the fixed-length code is of that one. One more word than the blocks take must be
    readable at the end of pool.
    """
    for g in range(len(codes)):
        for b in range(codes.shape[1] // block):
            symbols = codes[g, b * block : (b + 1) * block].ravel()
            form = plain[g, b]
            stream = _bit_string(words[form, symbols], lengths[form, symbols])
            start = offsets[g, b0 + b]
            pool[start : start + len(stream)] = stream


def _bit_string(words: U16, lengths: U8) -> U64:
    """Code words one after another, the first bit of each lowest, in whole 64-bit words."""
    ends = np.cumsum(lengths, dtype=np.int64)
    bits = np.zeros(-(-ends[-1] // WORD_BITS) * WORD_BITS, np.uint8)
    for i in range(lengths.max()):
        longer = lengths > i
        bits[(ends - lengths)[longer] + i] = words[longer] >> i & 1
    return np.packbits(bits, bitorder="little").view("<u8")


def huffman_decode(codec: Any, t0: int, t1: int) -> U8:
    """Codes (G, t1 - t0, D): all tokens at once, each from its own bit on."""
    pool, offsets, bits, table, plain, plain_bits, _, _ = codec.store()
    block, head_dim = codec.block, codec.head_dim
    tokens = np.arange(t0, t1)
    ends = bits.reshape(len(bits), -1, block).cumsum(axis=2, dtype=np.int64)  # (G, B, block)
    starts = (ends.reshape(bits.shape) - bits)[:, t0:t1]
    position = starts + WORD_BITS * offsets[:, tokens // block].astype(np.int64)
    is_plain = ends[:, tokens // block, -1] == plain_bits
    stream = pool.view(np.uint8)
    codes = np.empty((len(bits), t1 - t0, head_dim + TABLE_SYMBOLS), np.uint8)
    filled = np.zeros(position.shape, np.int64)
    while (live := np.nonzero(filled < head_dim))[0].size:
        first = position[live] // 8
        three_bytes = sum(stream[first + i].astype(np.int64) << 8 * i for i in range(3))
        index = (three_bytes >> position[live] % 8) % (1 << TABLE_BITS)
        entry = np.where(is_plain[live], plain[index], table[index])
        for i in range(TABLE_SYMBOLS):  # what lies beyond the entry's own symbols is overwritten
            codes[live[0], live[1], filled[live] + i] = entry >> np.uint64(8 * i) & np.uint64(255)
        position[live] += (entry >> np.uint64(56) & np.uint64(15)).astype(np.int64)
        filled[live] += (entry >> np.uint64(60)).astype(np.int64)
    return codes[:, :, :head_dim]
