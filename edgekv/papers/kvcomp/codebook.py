"""Canonical Huffman codes of bounded length, and the tables that decode several symbols per look-up."""

from __future__ import annotations

import dataclasses

import numpy as np

from edgekv.types import I64, U8, U16, U64

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

    Every symbol has a word of at most TABLE_BITS bits, so that whatever comes can be coded. The table is as
    TABLE_SYMBOLS says.
    """

    lengths: U8
    words: U16
    table: U64

    @classmethod
    def huffman(cls, counts: I64) -> Codebook:
        """The code of least total length for these counts; what was never seen counts as seen once."""
        lengths = code_lengths(np.maximum(counts, 1))
        words = _canonical_words(lengths)
        return cls(lengths, words, _decode_table(lengths, words))

    @classmethod
    def is_one(cls, lengths: U8, words: U16, table: U64) -> bool:
        """Whether words and table are those of a complete prefix code with these lengths.

        lengths and words are (levels,).
        """
        if not ((lengths > 0) & (lengths <= TABLE_BITS)).all() or (0.5 ** lengths.astype(float)).sum() != 1:
            return False
        expected = _canonical_words(lengths)
        return np.array_equal(words, expected) and np.array_equal(table, _decode_table(lengths, expected))

    @classmethod
    def fixed_length(cls, levels: int) -> Codebook:
        """Each of the symbols 0..levels - 1 in binary, all in as many bits as the largest needs."""
        lengths = np.full(levels, (levels - 1).bit_length(), np.uint8)
        words = np.arange(levels, dtype=np.uint16)
        return cls(lengths, words, _decode_table(lengths, words))


def gaussian_counts(relative_step: float, n: int) -> I64:
    """How often each level occurs, in a million, where n Gaussian numbers make up a quantisation unit."""
    half_range = np.sqrt(2 * np.log(n))  # in standard deviations
    position = np.arange(round(1 / relative_step) + 1) * relative_step - 0.5
    density = np.exp(-((2 * half_range * position) ** 2) / 2)
    counts: I64 = np.rint(1e6 * density / density.sum()).astype(np.int64)
    return counts


def code_lengths(counts: I64, longest: int = TABLE_BITS) -> U8:
    """Lengths of an optimal prefix code with no word longer than ``longest``, by package-merge.

    Larmore and Hirschberg, "A fast algorithm for optimal length-limited Huffman codes" (1990).
    counts (levels,).
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
    """Words counted up from shorter to longer and then by symbol, their bits reversed: the first is the lowest."""
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
