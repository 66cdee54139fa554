"""Signs as bits: of keys, and of queries."""

from __future__ import annotations

import numpy as np

from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.codec import THREADS, per_head
from edgekv.kernels.cuda.counter import place
from edgekv.kernels.cuda.program import Array, Launch, Program
from edgekv.kernels.memory import contiguous

PACK = Program(("papers/pack",))


class SignKernels(Backend):
    def pack_signs(self, x: Array, codes: Array, t0: int) -> None:
        n_kv_heads, n, bits = x.shape
        x, stride = per_head(x)
        launch = Launch(PACK, "pack_signs", (n, n_kv_heads), min(THREADS, bits))
        self.driver.launch(launch, x, stride, bits, codes, codes.shape[1], *place(self.driver, t0))

    def pack_sign_rows(self, x: Array) -> Array:
        *rows, bits = x.shape
        words = self.driver.empty((*rows, bits // 64), np.uint64)
        launch = Launch(PACK, "pack_sign_rows", (x.size // bits,), min(THREADS, bits))
        self.driver.launch(launch, contiguous(x), bits, words)
        return words
