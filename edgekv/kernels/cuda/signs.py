"""Sign sketches and 4-bit affine values: the kernels of `h1b` and `loki1`."""

from __future__ import annotations

import numpy as np

from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.codec import THREADS, Codec, Queries, Scores, per_head
from edgekv.kernels.cuda.dense import ENCODE
from edgekv.kernels.cuda.program import Array, Program

PACK = Program(("pack",))
INT4 = (("VALUE_SCALES", "FROM_ZERO"),)


class SignKernels(Backend):
    def pack_signs(self, x: Array, codes: Array, t0: int) -> None:
        groups, n, bits = x.shape
        x, stride = per_head(x)
        self.driver.launch(
            *(PACK, "pack_signs", (n, groups), min(THREADS, bits), x, stride, bits),
            *(codes, codes.shape[1], t0, self.driver.shift),
        )

    def pack_sign_rows(self, x: Array) -> Array:
        *rows, bits = x.shape
        x = x if x.flags.c_contiguous else x.copy()
        words = self.driver.empty((*rows, bits // 64), np.uint64)
        self.driver.launch(PACK, "pack_sign_rows", (x.size // bits,), min(THREADS, bits), x, bits, words)
        return words

    def scores_signs(
        self, q_codes: Array, codes: Array, t0: int, t1: int, scale: Array, s: Array | Scores, s0: int
    ) -> None:
        _, blocks, words, tile = codes.shape
        keys = Codec("SignKeys", "signs", (codes,), blocks * tile, 64 * words, tiles=4)
        self.score(keys, Queries(q_codes, q_codes, scale), t0, t1, s, s0)

    def encode_int4(self, x: Array, codes: Array, delta: Array, zero: Array, t0: int) -> None:
        groups, n, d = x.shape
        x, stride = per_head(x)
        self.driver.launch(
            *(ENCODE, "encode_int4", (n, groups), 32, x, stride, d),
            *(codes, delta, zero, delta.shape[1], t0, self.driver.shift),
        )

    def values_int4(
        self, p: Array | Scores, s0: int, codes: Array, delta: Array, zero: Array, t0: int, t1: int, out: Array
    ) -> None:
        values = Codec(
            "ByteValues<4>", "bytes", (codes, delta, zero), codes.shape[1], 2 * codes.shape[2], INT4, tiles=4
        )
        self.accumulate(p, s0, values, t0, t1, out)
