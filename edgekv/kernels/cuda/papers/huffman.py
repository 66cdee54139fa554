"""Encoders of error-bounded levels in Huffman codes."""

from __future__ import annotations

from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.codec import THREADS, per_head
from edgekv.kernels.cuda.program import Array, Launch, Program
from edgekv.kernels.memory import contiguous

ENCODE = Program(("scales", "papers/encode_huffman"), exact=True)
PACK_THREADS = 256


class HuffmanKernels(Backend):
    def quantize_channels(
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
        n_kv_heads, n, d = x.shape
        x, stride = per_head(x)
        launch = Launch(ENCODE, "quantize_channels", (n // block, n_kv_heads), THREADS)
        form = float(relative_step), levels, block
        self.driver.launch(launch, x, stride, n, d, *form, codes, low, step, low.shape[1], b0)

    def quantize_tokens(
        self, x: Array, relative_step: float, levels: int, codes: Array, low: Array, step: Array, t0: int
    ) -> None:
        n_kv_heads, n, d = x.shape
        x, stride = per_head(x)
        launch = Launch(ENCODE, "quantize_tokens", (n, n_kv_heads), 32)
        form = float(relative_step), levels
        self.driver.launch(launch, x, stride, d, *form, codes, low, step, low.shape[1], t0)

    def huffman_sizes(self, codes: Array, lengths: Array, bits: Array, t0: int) -> None:
        n_kv_heads, n, d = codes.shape
        launch = Launch(ENCODE, "huffman_sizes", (n, n_kv_heads), 32)
        self.driver.launch(launch, codes, d, lengths, bits, bits.shape[1], t0)

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
        n_kv_heads, n, d = codes.shape
        launch = Launch(ENCODE, "huffman_pack", (n // block, n_kv_heads), PACK_THREADS)
        book = words, lengths, words.shape[1]
        self.driver.launch(launch, codes, d, *book, contiguous(plain), offsets, offsets.shape[1], b0, block, pool)
