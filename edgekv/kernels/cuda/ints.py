"""Encoders of integers of 8, 4 or 2 bits with linear scales."""

from __future__ import annotations

from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.codec import THREADS, per_head
from edgekv.kernels.cuda.counter import place
from edgekv.kernels.cuda.kinds import require_one_span
from edgekv.kernels.cuda.program import Array, Launch
from edgekv.kernels.cuda.rows import ENCODE


class IntKernels(Backend):
    def encode_int4(self, x: Array, codes: Array, delta: Array, zero: Array, t0: int) -> None:
        n_kv_heads, n, d = x.shape
        x, stride = per_head(x)
        launch = Launch(ENCODE, "encode_int4", (n, n_kv_heads), 32)
        self.driver.launch(launch, x, stride, d, codes, delta, zero, delta.shape[1], *place(self.driver, t0))

    def encode_sym(self, x: Array, codes: Array, scale: Array, t0: int) -> None:
        n_kv_heads, n, d = x.shape
        _, blocks, n_bytes, block = codes.shape
        x, stride = per_head(x)
        launch = Launch(ENCODE, "encode_sym", (n, n_kv_heads), 32)
        store = codes, blocks, block, scale, scale.shape[1]
        self.driver.launch(launch, x, stride, d, 8 * n_bytes // d, *store, *place(self.driver, t0))

    def encode_kivi_keys(self, x: Array, codes: Array, step: Array, low: Array, t0: int) -> None:
        n_kv_heads, n, d = x.shape
        _, blocks, n_bytes, block = codes.shape
        x, stride = per_head(x)
        launch = Launch(ENCODE, "encode_kivi_keys", (n // block, n_kv_heads), THREADS)
        store = codes, step, low, blocks, block
        self.driver.launch(launch, x, stride, d, 8 * n_bytes // d, *store, t0 // block)

    def encode_kivi_values(self, x: Array, codes: Array, step: Array, low: Array, t0: int) -> None:
        n_kv_heads, n, d = x.shape
        spans, capacity = step.shape[1:]
        require_one_span(spans)
        x, stride = per_head(x)
        launch = Launch(ENCODE, "encode_kivi_values", (n, n_kv_heads), 32)
        self.driver.launch(launch, x, stride, d, 8 * codes.shape[2] // d, codes, step, low, spans, capacity, t0)
