"""Huffman codes in NumPy: codebooks of bounded length, the packing of blocks of tokens, and their decoding."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from edgekv.types import I64, U8, U16, U32, U64

WORD_BITS = 64
TABLE_BITS = 11
"""Bits of a decode table's index: no code word is longer."""

TABLE_SYMBOLS = 7
"""Symbols that one entry of a decode table holds at most.

Entry i of a table (2 ** TABLE_BITS,) decodes the symbols whose code words lie whole in the bits of i: one per byte
from the lowest up, their joint length in bits 56..59, their number in bits 60..63.
"""


@dataclasses.dataclass(frozen=True)
class Codebook:
    """A prefix code: each symbol's length (uint8) and word (uint16, first bit lowest), and its decode table.

    Every symbol has a word of at most TABLE_BITS bits, so that any text can be coded.
    """

    lengths: U8
    words: U16
    table: U64

    @classmethod
    def huffman(cls, counts: I64) -> Codebook:
        """Returns the code of least total length for counts (levels,); a count of 0 is taken as 1."""
        lengths = code_lengths(np.maximum(counts, 1))
        words = _canonical_words(lengths)
        return cls(lengths, words, _decode_table(lengths, words))

    @classmethod
    def is_one(cls, lengths: U8, words: U16, table: U64) -> bool:
        """Returns whether words and table are those of a complete prefix code with these lengths (levels,)."""
        if not ((lengths > 0) & (lengths <= TABLE_BITS)).all() or (0.5 ** lengths.astype(float)).sum() != 1:
            return False
        expected = _canonical_words(lengths)
        return np.array_equal(words, expected) and np.array_equal(table, _decode_table(lengths, expected))

    @classmethod
    def fixed_length(cls, levels: int) -> Codebook:
        """Returns the code of symbols 0..levels - 1 in binary, all in as many bits as the largest takes."""
        lengths = np.full(levels, (levels - 1).bit_length(), np.uint8)
        words = np.arange(levels, dtype=np.uint16)
        return cls(lengths, words, _decode_table(lengths, words))


def gaussian_counts(relative_step: float, n: int) -> I64:
    """Returns how often in a million each level occurs where n Gaussian numbers share a low and a step."""
    half_range = np.sqrt(2 * np.log(n))  # in standard deviations
    position = np.arange(round(1 / relative_step) + 1) * relative_step - 0.5
    density = np.exp(-((2 * half_range * position) ** 2) / 2)
    counts: I64 = np.rint(1e6 * density / density.sum()).astype(np.int64)
    return counts


def code_lengths(counts: I64, longest: int = TABLE_BITS) -> U8:
    """Returns the word lengths (levels,) of an optimal prefix code without words longer than ``longest``.

    counts (levels,). Package-merge: Larmore and Hirschberg, "A fast algorithm for optimal length-limited Huffman
    codes" (1990).
    """
    leaves = [(int(count), (symbol,)) for symbol, count in enumerate(counts)]
    packages: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(longest):
        row = sorted(leaves + packages)
        pairs = zip(row[::2], row[1::2], strict=False)  # an odd last one is left out
        packages = [(a + b, symbols + others) for (a, symbols), (b, others) in pairs]
    chosen = [symbol for _, symbols in packages[: len(counts) - 1] for symbol in symbols]
    return np.bincount(chosen, minlength=len(counts)).astype(np.uint8)


def _canonical_words(lengths: U8) -> U16:
    """Returns words counted up by length and symbol, their bits reversed so that the first is the lowest."""
    words = np.zeros(len(lengths), np.uint16)
    word, length = 0, 0
    for symbol in np.argsort(lengths, kind="stable"):
        word <<= int(lengths[symbol]) - length
        length = int(lengths[symbol])
        words[symbol] = int(f"{word:0{length}b}"[::-1], 2)
        word += 1
    return words


def _decode_table(lengths: U8, words: U16) -> U64:
    first = np.zeros(1 << TABLE_BITS, np.int64)  # the symbol that an index begins with
    for symbol, (word, length) in enumerate(zip(words, lengths, strict=True)):
        first[int(word) :: 1 << int(length)] = symbol
    index = np.arange(1 << TABLE_BITS)
    used, number = np.zeros_like(index), np.zeros_like(index)
    entries = np.zeros(len(index), np.uint64)
    for i in range(TABLE_SYMBOLS):
        symbol = first[index >> used]
        fits = (number == i) & (used + lengths[symbol] <= TABLE_BITS)
        entries |= np.where(fits, symbol, 0).astype(np.uint64) << np.uint64(8 * i)
        used += np.where(fits, lengths[symbol], 0)
        number += fits
    table: U64 = entries | used.astype(np.uint64) << np.uint64(56) | number.astype(np.uint64) << np.uint64(60)
    return table


def huffman_pack(
    codes: U8, words: U16, lengths: U8, plain: U8, offsets: U32, b0: int, block: int, pool: U64
) -> None:
    """Writes the blocks of codes (G, n, D) as bit strings into pool, block b at word offsets[g, b0 + b].

    Tokens of a block follow each other without gaps, elements in order; bit i of a block is bit i % 64 of its
    word i // 64, the first bit of a code word being its lowest. words, lengths (2, levels): row 0 the Huffman
    code, row 1 the fixed-length one, and plain (G, n // block) says which. Bits beyond a block's end are 0.

    A token begins at its block's offset plus the bits of the tokens before it. A block with as many bits as in the
    fixed-length code is in that. One more word than the blocks take must be readable at the end of pool.
    """
    for g in range(len(codes)):
        for b in range(codes.shape[1] // block):
            symbols = codes[g, b * block : (b + 1) * block].ravel()
            form = plain[g, b]
            stream = _bit_string(words[form, symbols], lengths[form, symbols])
            start = offsets[g, b0 + b]
            pool[start : start + len(stream)] = stream


def _bit_string(words: U16, lengths: U8) -> U64:
    """Concatenates code words, the first bit of each lowest, into whole 64-bit words."""
    ends = np.cumsum(lengths, dtype=np.int64)
    bits = np.zeros(-(-ends[-1] // WORD_BITS) * WORD_BITS, np.uint8)
    for i in range(lengths.max()):
        longer = lengths > i
        bits[(ends - lengths)[longer] + i] = words[longer] >> i & 1
    return np.packbits(bits, bitorder="little").view("<u8")


def huffman_decode(codec: Any, t0: int, t1: int) -> U8:
    """Returns the codes (n_kv_heads, t1 - t0, head_dim) of tokens; all are decoded side by side."""
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
