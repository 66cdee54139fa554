"""Numbers as they are: encoders in half and single precision, products with small matrices."""

from __future__ import annotations

from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.codec import THREADS, per_head
from edgekv.kernels.cuda.counter import place
from edgekv.kernels.cuda.matvec import MATVEC_ROWS, matvec
from edgekv.kernels.cuda.program import Array, Launch, Program
from edgekv.kernels.memory import contiguous

ENCODE = Program(("scales", "encode"), exact=True)


class DenseKernels(Backend):
    def encode_f16(self, x: Array, store: Array, t0: int) -> None:
        self._encode_numbers("encode_f16", x, store, t0)

    def encode_f32(self, x: Array, store: Array, t0: int) -> None:
        self._encode_numbers("encode_f32", x, store, t0)

    def _encode_numbers(self, kernel: str, x: Array, store: Array, t0: int) -> None:
        n_kv_heads, n, d = x.shape
        if n:  # Windowed may have nothing left over
            x, stride = per_head(x)
            launch = Launch(ENCODE, kernel, (n, n_kv_heads), THREADS)
            self.driver.launch(launch, x, stride, d, store, store.shape[1], *place(self.driver, t0))

    def project(self, x: Array, matrix: Array) -> Array:
        n_kv_heads, n = x.shape[:2]
        if n > MATVEC_ROWS:
            return x @ matrix.T
        return matvec(self.driver, contiguous(x), matrix, bits=32).reshape(n_kv_heads, n, -1)
