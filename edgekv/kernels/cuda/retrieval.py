"""Indexes, selection, and attention to a choice of tokens: the kernels of `fier` and `quest`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.codec import THREADS, Codec, Queries, Scores
from edgekv.kernels.cuda.program import Array, Program

I64 = npt.NDArray[np.int64]

SELECT_THREADS = 1024
SPLIT_TOKENS = 16  # at least, of the chosen ones that a block adds up
ENCODE = Program(("index",), exact=True)


class RetrievalKernels(Backend):
    def select_top(self, s: Array, lo: I64, hi: I64, k: int, chosen: Array) -> None:
        groups, rows, _ = s.shape
        n = len(lo)
        self.driver.launch(
            *(Program(("choose",)), "select_top", (n, groups), SELECT_THREADS),
            *(s, s.strides[0] // 4, s.strides[1] // 4, rows // n, *self._per_token(lo, hi), k),
            *(chosen, chosen.strides[1] // 4 if n > 1 else chosen.strides[0] // 4),
        )

    def scores_f16_at(self, q: Array, keys: Array, tokens: Array, counts: I64, s: Array) -> None:
        groups, n, most = tokens.shape
        rows, d = q.shape[1:]
        self.driver.launch(
            *(_program(rows // n, d), "scores_at", (-(-most // (THREADS // 32)), groups * n), THREADS),
            *(q, keys, keys.shape[1], tokens, most, n, *self._per_token(counts)),
            *(s, s.strides[0] // 4, s.strides[1] // 4),
        )

    def values_f16_at(self, p: Array, values: Array, tokens: Array, counts: I64, out: Array) -> None:
        groups, n, most = tokens.shape
        rows, d = out.shape[1:]
        splits = min(self._splits(-(-most // SPLIT_TOKENS), groups * n), most)
        partial = self.scratch("values_at", (groups, splits, rows, d))
        self.driver.launch(
            *(_program(rows // n, d), "values_at", (splits, groups * n), THREADS),
            *(p, p.strides[0] // 4, p.strides[1] // 4, values, values.shape[1], tokens, most, n),
            *(*self._per_token(counts), partial),
        )
        self.add_partial(partial, out)

    def encode_fier(
        self, keys: Array, group: int, minmax: bool, signs: Array, levels: Array, b0: int, b1: int
    ) -> None:
        groups, capacity, d = keys.shape
        self.driver.launch(
            *(ENCODE, "encode_fier", (b1 - b0, groups), THREADS, keys, capacity, d, group, int(minmax)),
            *(signs, levels, levels.shape[1], signs.shape[1], b0),
        )

    def scores_fier(
        self, q: Array, signs: Array, levels: Array, group: int, b0: int, b1: int, s: Array | Scores, s0: int
    ) -> None:
        capacity = levels.shape[1] * group
        keys = Codec(
            "FierKeys",
            "fier",
            (signs, levels),
            capacity,
            q.shape[2],
            (("GROUP", group),),
            joins=False,
            tiles=2,
            blocks=16,
        )
        self.score(keys, Queries(q), b0 * group, b1 * group, s, s0)

    def encode_pages(self, keys: Array, page: int, bounds: Array, b0: int, b1: int) -> None:
        groups, capacity, d = keys.shape
        self.driver.launch(
            *(ENCODE, "encode_pages", (b1 - b0, groups), THREADS, keys, capacity, d, page),
            *(bounds, bounds.shape[1], b0),
        )

    def _per_token(self, *numbers: I64) -> tuple[Any, ...]:
        """For a kernel: whether there are several tokens, their numbers, and the first token's."""
        many = len(numbers[0]) > 1
        array = self.constant(np.stack(numbers).astype(np.int32)) if many else self.driver.shift
        return int(many), array, *(int(x[0]) for x in numbers)


def _program(heads: int, d: int) -> Program:
    return Program(("chosen",), (("ROWS", heads), ("HEAD_DIM", d)))
