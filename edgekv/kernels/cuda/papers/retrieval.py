"""Which tokens to attend to: those of the largest sums of scores."""

from __future__ import annotations

from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.program import Array, Launch, Program
from edgekv.kernels.cuda.tiles import strides
from edgekv.types import I64

SELECT_THREADS = 1024


def select_top(kernels: Backend, s: Array, lo: I64, hi: I64, k: int, chosen: Array) -> None:
    n_kv_heads, rows, _ = s.shape
    n = len(lo)
    launch = Launch(Program(("papers/top_k",)), "select_top", (n, n_kv_heads), SELECT_THREADS)
    stride = chosen.strides[1 if n > 1 else 0] // chosen.itemsize
    kernels.driver.launch(launch, s, *strides(s), rows // n, *kernels.per_token(lo, hi), k, chosen, stride)
