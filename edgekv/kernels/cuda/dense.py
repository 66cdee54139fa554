"""Rows of numbers, softmax, rope: the kernels that every scheme uses."""

from __future__ import annotations

from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.codec import THREADS, Codec, Queries, Scores, per_head
from edgekv.kernels.cuda.program import Array, Program
from edgekv.kernels.memory import contiguous
from edgekv.linear.cuda_matvec import MATVEC_ROWS, matvec

ENCODE = Program(("scales", "encode"), exact=True)


class DenseKernels(Backend):
    def encode_f16(self, x: Array, store: Array, t0: int) -> None:
        groups, n, d = x.shape
        if n:  # Windowed may have nothing left over
            x, stride = per_head(x)
            self.driver.launch(
                *(ENCODE, "encode_f16", (n, groups), THREADS, x, stride, d),
                *(store, store.shape[1], t0, self.driver.shift),
            )

    def encode_f32(self, x: Array, store: Array, t0: int) -> None:
        groups, n, d = x.shape
        x, stride = per_head(x)
        self.driver.launch(
            *(ENCODE, "encode_f32", (n, groups), THREADS, x, stride, d),
            *(store, store.shape[1], t0, self.driver.shift),
        )

    def project(self, x: Array, matrix: Array) -> Array:
        groups, n = x.shape[:2]
        if n > MATVEC_ROWS:
            return x @ matrix.T
        return matvec(self.driver, contiguous(x), matrix, bits=32).reshape(groups, n, -1)

    def scores_f16(self, q: Array, keys: Array, t0: int, t1: int, s: Array | Scores, s0: int) -> None:
        self.score(_rows("RowKeys<u16>", keys), Queries(q), t0, t1, s, s0)

    def values_f16(self, p: Array | Scores, s0: int, values: Array, t0: int, t1: int, out: Array) -> None:
        self.accumulate(p, s0, _rows("RowValues<u16>", values), t0, t1, out)

    def scores_f32(self, q: Array, keys: Array, t0: int, t1: int, s: Array | Scores, s0: int) -> None:
        self.score(_rows("RowKeys<float>", keys), Queries(q), t0, t1, s, s0)

    def values_f32(self, p: Array | Scores, s0: int, values: Array, t0: int, t1: int, out: Array) -> None:
        self.accumulate(p, s0, _rows("RowValues<float>", values), t0, t1, out)

    def split_rope(
        self,
        qkv: Array,
        cos: Array,
        sin: Array,
        q: Array,
        k: Array,
        v: Array,
        scale: float,
        q_norm: Array,
        k_norm: Array,
        eps: float,
    ) -> None:
        n_heads, n, head_dim = q.shape
        groups = k.shape[0]
        strides = [x.strides[0] // x.itemsize for x in (q, k, v)]
        tables = (cos, sin) if cos.size else (self.driver.shift, self.driver.shift)
        norms = (q_norm, k_norm, 1) if q_norm.size else (self.driver.shift, self.driver.shift, 0)
        self.driver.launch(
            *(Program(("rope",)), "split_rope", (n, n_heads + 2 * groups), THREADS, qkv, *tables, cos.shape[1]),
            *(self.driver.shift, q, strides[0], k, strides[1], v, strides[2], n_heads, groups, head_dim),
            *(float(scale), *norms, float(eps)),
        )


def _rows(kind: str, store: Array) -> Codec:
    return Codec(kind, "rows", (store,), store.shape[1], store.shape[2])
