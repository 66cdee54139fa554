"""Attention to chosen tokens only: exact scores, and sums of their values."""

from __future__ import annotations

from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.program import Array, Launch, Macros, Program
from edgekv.kernels.cuda.tiles import THREADS, strides
from edgekv.types import I64

SPLIT_TOKENS = 16  # at least, of the chosen ones that a block adds up


class SparseKernels(Backend):
    """Launches of sparse_attention.cu."""

    def scores_at(self, q: Array, keys: Array, tokens: Array, counts: I64, s: Array, macros: Macros) -> None:
        """s (G, M, K) = scores with chosen tokens (G, n, K), -inf for those from counts[j] (n,) on."""
        n_kv_heads, n, most = tokens.shape
        rows, d = q.shape[1:]
        grid = -(-most // (THREADS // 32)), n_kv_heads * n
        launch = Launch(_program(rows // n, d, macros), "scores_at", grid, THREADS)
        choice = tokens, most, n, *self.per_token(counts)
        self.driver.launch(launch, q, keys, keys.shape[1], *choice, s, *strides(s))

    def values_at(self, p: Array, values: Array, tokens: Array, counts: I64, out: Array) -> None:
        """out (G, M, D) += p (G, M, K) times the chosen tokens."""
        n_kv_heads, n, most = tokens.shape
        rows, d = out.shape[1:]
        splits = min(self.splits(-(-most // SPLIT_TOKENS), n_kv_heads * n), most)
        partial = self.scratch("values_at", (n_kv_heads, splits, rows, d))
        launch = Launch(_program(rows // n, d), "values_at", (splits, n_kv_heads * n), THREADS)
        choice = tokens, most, n, *self.per_token(counts)
        self.driver.launch(launch, p, *strides(p), values, values.shape[1], *choice, partial)
        self.add_partial(partial, out)


def _program(rows: int, d: int, macros: Macros = ()) -> Program:
    return Program(("sparse_attention",), (("ROWS", rows), ("HEAD_DIM", d), *macros))
