"""Error-bounded levels in Huffman codes: the kernels of `kvcomp`."""

from __future__ import annotations

from edgekv.kernels.contract.codes import TABLE_BITS
from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.codec import THREADS, Codec, Queries, Scores, per_head
from edgekv.kernels.cuda.program import Array, Macros, Program
from edgekv.kernels.memory import contiguous

ENCODE = Program(("scales", "encode_codes"), exact=True)
PACK_THREADS = 256


class CodeKernels(Backend):
    def quantise_channels(
        self,
        x: Array,
        relative_step: float,
        levels: int,
        block: int,
        codes: Array,
        low: Array,
        step: Array,
        b0: int,
    ) -> None:
        groups, n, d = x.shape
        x, stride = per_head(x)
        self.driver.launch(
            *(ENCODE, "quantise_channels", (n // block, groups), THREADS, x, stride, n, d),
            *(float(relative_step), levels, block, codes, low, step, low.shape[1], b0),
        )

    def quantise_tokens(
        self, x: Array, relative_step: float, levels: int, codes: Array, low: Array, step: Array, t0: int
    ) -> None:
        groups, n, d = x.shape
        x, stride = per_head(x)
        self.driver.launch(
            *(ENCODE, "quantise_tokens", (n, groups), 32, x, stride, d),
            *(float(relative_step), levels, codes, low, step, low.shape[1], t0),
        )

    def huffman_sizes(self, codes: Array, lengths: Array, bits: Array, t0: int) -> None:
        groups, n, d = codes.shape
        self.driver.launch(ENCODE, "huffman_sizes", (n, groups), 32, codes, d, lengths, bits, bits.shape[1], t0)

    def huffman_pack(
        self,
        codes: Array,
        words: Array,
        lengths: Array,
        plain: Array,
        offsets: Array,
        b0: int,
        block: int,
        pool: Array,
    ) -> None:
        groups, n, d = codes.shape
        self.driver.launch(
            *(
                ENCODE,
                "huffman_pack",
                (n // block, groups),
                PACK_THREADS,
                codes,
                d,
                words,
                lengths,
                words.shape[1],
            ),
            *(contiguous(plain), offsets, offsets.shape[1], b0, block, pool),
        )

    def scores_huffman(
        self,
        q: Array,
        pool: Array,
        offsets: Array,
        bits: Array,
        table: Array,
        plain: Array,
        plain_bits: int,
        low: Array,
        step: Array,
        t0: int,
        t1: int,
        s: Array | Scores,
        s0: int,
    ) -> None:
        arrays = pool, offsets, bits, table, low, step
        macros = _macros(offsets, bits, plain_bits)
        keys = Codec("HuffmanKeys", "huffman", arrays, bits.shape[1], q.shape[2], macros, joins=False)
        self.score(keys, Queries(q), t0, t1, s, s0)

    def values_huffman(
        self,
        p: Array | Scores,
        s0: int,
        pool: Array,
        offsets: Array,
        bits: Array,
        table: Array,
        plain: Array,
        plain_bits: int,
        low: Array,
        step: Array,
        t0: int,
        t1: int,
        out: Array,
    ) -> None:
        arrays = pool, offsets, bits, table, low, step
        macros = _macros(offsets, bits, plain_bits)
        values = Codec("HuffmanValues", "huffman", arrays, bits.shape[1], out.shape[2], macros, joins=False)
        self.accumulate(p, s0, values, t0, t1, out)


def _macros(offsets: Array, bits: Array, plain_bits: int) -> Macros:
    block = bits.shape[1] // offsets.shape[1]
    return ("CODE_BLOCK", block), ("PLAIN_BITS", plain_bits), ("TABLE_BITS", TABLE_BITS)
