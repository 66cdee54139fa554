"""Queries, keys and values out of the fused projection, rotated by their position."""

from __future__ import annotations

from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.codec import THREADS
from edgekv.kernels.cuda.program import Array, Launch, Program


class RopeKernels(Backend):
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
        n_kv_heads, shift = k.shape[0], self.driver.shift
        tables = (cos, sin) if cos.size else (shift, shift)
        norms = (q_norm, k_norm, 1) if q_norm.size else (shift, shift, 0)
        outs = [y for x in (q, k, v) for y in (x, x.strides[0] // x.itemsize)]
        sizes = n_heads, n_kv_heads, head_dim
        launch = Launch(Program(("rope",)), "split_rope", (n, n_heads + 2 * n_kv_heads), THREADS)
        self.driver.launch(
            launch, qkv, *tables, cos.shape[1], shift, *outs, *sizes, float(scale), *norms, float(eps)
        )
