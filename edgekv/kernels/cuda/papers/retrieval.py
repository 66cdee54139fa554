"""Indexes, selection, and attention to a choice of tokens."""

from __future__ import annotations

from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.codec import THREADS, strides
from edgekv.kernels.cuda.program import Array, Launch, Program
from edgekv.types import I64

SELECT_THREADS = 1024
SPLIT_TOKENS = 16  # at least, of the chosen ones that a block adds up
ENCODE = Program(("papers/index",), exact=True)


class RetrievalKernels(Backend):
    def select_top(self, s: Array, lo: I64, hi: I64, k: int, chosen: Array) -> None:
        n_kv_heads, rows, _ = s.shape
        n = len(lo)
        launch = Launch(Program(("papers/top_k",)), "select_top", (n, n_kv_heads), SELECT_THREADS)
        stride = chosen.strides[1 if n > 1 else 0] // chosen.itemsize
        self.driver.launch(launch, s, *strides(s), rows // n, *self.per_token(lo, hi), k, chosen, stride)

    def scores_at(self, q: Array, keys: Array, tokens: Array, counts: I64, s: Array) -> None:
        """s (G, M, K) = scores with chosen tokens (G, n, K), -inf for those from counts[j] (n,) on."""
        n_kv_heads, n, most = tokens.shape
        rows, d = q.shape[1:]
        grid = -(-most // (THREADS // 32)), n_kv_heads * n
        launch = Launch(_program(rows // n, d), "scores_at", grid, THREADS)
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

    def encode_fier(
        self, keys: Array, group: int, minmax: bool, signs: Array, levels: Array, b0: int, b1: int
    ) -> None:
        n_kv_heads, capacity, d = keys.shape
        launch = Launch(ENCODE, "encode_fier", (b1 - b0, n_kv_heads), THREADS)
        store = signs, levels, levels.shape[1], signs.shape[1]
        self.driver.launch(launch, keys, capacity, d, group, int(minmax), *store, b0)

    def encode_pages(self, keys: Array, page: int, bounds: Array, b0: int, b1: int) -> None:
        n_kv_heads, capacity, d = keys.shape
        launch = Launch(ENCODE, "encode_pages", (b1 - b0, n_kv_heads), THREADS)
        self.driver.launch(launch, keys, capacity, d, page, bounds, bounds.shape[1], b0)


def _program(rows: int, d: int) -> Program:
    return Program(("papers/sparse_attention",), (("ROWS", rows), ("HEAD_DIM", d)))
