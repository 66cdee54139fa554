"""The part of `edgekv.kernels.contract` about small codes: error-bounded levels, their Huffman coding, bit planes.

Shapes and token ranges are those of `attention`, beside this.

A level's value is low + step * code, with low
and step in float16.
"""

from typing import Protocol

from edgekv.types import F32, U8, U16, U32, U64

TABLE_BITS = 11
"""Bits of a decode table's index: no code word is longer."""

TABLE_SYMBOLS = 7
"""Symbols that one entry of a decode table holds at most.

Entry i of a table (2 ** TABLE_BITS,) decodes the symbols whose code words lie whole in the bits of i: one per byte
from the lowest up, their joint length in bits 56..59, their number in bits 60..63.
"""


class CodeKernels(Protocol):
    """What a backend provides for entropy-coded and bit-plane stores."""

    def quantize_channels(
        self, x: F32, relative_step: float, levels: int, block: int, codes: U8, low: U16, step: U16, b0: int
    ) -> None:
        """Levels of x (G, n, D), n a multiple of `block`, per channel of `block` tokens: KVComp's keys.

        codes (G, n, D) = round((x - low) / step), halves to even, clipped to 0..levels - 1. low is the channel's
        least element in float16 (or the nearest of its finite numbers), step = relative_step * (largest - low)
        rounded up to float16; step 0 divides like 1. Both lie in arrays (G, blocks, D) from block b0 on. With
        levels = round(1 / relative_step) + 1 no element is further than step / 2 from its level. x must be finite.
        """

    def quantize_tokens(
        self, x: F32, relative_step: float, levels: int, codes: U8, low: U16, step: U16, t0: int
    ) -> None:
        """`quantize_channels` per token of x (G, n, D): KVComp's values. low, step (G, cap) from token t0 on."""

    def huffman_sizes(self, codes: U8, lengths: U8, bits: U16, t0: int) -> None:
        """bits[:, t0 : t0 + n] (G, cap) = sum of lengths[code] over each token of codes (G, n, D)."""

    def huffman_pack(
        self, codes: U8, words: U16, lengths: U8, plain: U8, offsets: U32, b0: int, block: int, pool: U64
    ) -> None:
        """Writes the blocks of codes (G, n, D) as bit strings into pool, block b at word offsets[g, b0 + b].

        Tokens of a block follow each other without gaps, elements in order; bit i of a block is bit i % 64 of its
        word i // 64, the first bit of a code word being its lowest. words, lengths (2, levels): row 0 the Huffman
        code, row 1 the fixed-length one, and plain (G, n // block) says which. Bits beyond a block's end are 0.

        Who reads a token finds it at its block's offset plus the bits before it, as in `huffman_sizes`; a block
        whose bits are those of the fixed-length code is of that one. One more word than the blocks take must be
        readable at the end of pool.
        """

    def encode_levels(self, x: F32, low: U16, step: U16, planes: U8, t0: int) -> None:
        """Stores x (G, n, D) at tokens t0.. of planes (G, cap, n_bits, W), W = ceil(D / 8), as bit planes.

        The code is round((x - low) / step), halves to even, clipped to 0..2 ** n_bits - 1. low, step (1 or G, 1 or
        cap): all heads and all tokens share one, or each has its own. Where step is 0 the code is 0. Bit e % 8 of
        byte e // 8 of plane j is bit j of element e's code; bits beyond D are 0.
        """
