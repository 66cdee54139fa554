"""Rounding weights to 4 bits so that a layer's outputs on a text change least: GPTQ, without its inverse.

Of a row w and its rounded form q, (w - q) H (w - q)^T is to be small, where H sums x x^T over the inputs x. With
Cholesky's H = L L^T that is the sum over columns j of L_jj^2 (t_j - q_j)^2, where t_j adds to w_j what the columns
behind it were rounded by: t_j = w_j + sum over i > j of (w_i - q_i) L_ij / L_jj. So columns are rounded from the
last to the first, each to the level next to t_j, and the heaviest columns lie last: what they are rounded by, all
others can make up for. A block's scale is the candidate with which the block, rounded in that way, adds least.

Source: Frantar et al., GPTQ, 2022 (arXiv:2210.17323).
"""

from __future__ import annotations

import numba
import numpy as np

from edgekv.errors import EdgeKVError
from edgekv.kernels import threads
from edgekv.linear.quantize import n_blocks, pack, rows_jit
from edgekv.types import F32, I8, I64, U8

DAMPING = 0.02  # of the mean of H's diagonal, added to it: inputs that the text lacks
TOGETHER = 256  # columns between two matrix products
SHRINK = np.arange(1.04, 0.67, -0.04).astype(np.float32)  # as `quantize.SHRINK`
ZERO, TOP = 8, 15


def column_order(importance: F32, block: int) -> tuple[I64, I64]:
    """Columns in the order of H: blocks whole, the heaviest last, and within a block so too; and the blocks."""
    n = len(importance)
    blocks = n_blocks(n, block)
    sums = np.zeros(blocks)
    np.add.at(sums, np.arange(n) // block, importance)
    order = np.argsort(sums, kind="stable")
    columns = [b * block + np.argsort(importance[b * block : (b + 1) * block], kind="stable") for b in order]
    return np.concatenate(columns).astype(np.int64), order.astype(np.int64)


class Rounder:
    """Rounds rows of one linear layer. hessian (columns, columns) float32: the sum of x x^T over its inputs x.

    Raises EdgeKVError where it is not finite.
    """

    def __init__(self, hessian: F32, block: int) -> None:
        self.block, columns = block, len(hessian)
        self._order, self._blocks = column_order(np.ascontiguousarray(hessian.diagonal()), block)
        h = hessian[np.ix_(self._order, self._order)]
        mean = float(h.diagonal().mean(dtype=np.float64))
        if not np.isfinite(mean):
            raise EdgeKVError("the model's activations on this text are not finite; calibrate with another text")
        h[np.diag_indices(columns)] += np.float32(DAMPING * mean or 1.0)
        factor: F32 = np.linalg.cholesky(h)
        diagonal = factor.diagonal().copy()
        self._weights = diagonal * diagonal
        factor /= diagonal
        self._factor = factor
        sizes = np.minimum(block, columns - self._blocks * block)
        self._ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def round(self, weight: F32) -> tuple[U8, F32, F32]:
        """weight (r, columns) -> codes and scales as `quantize` gives them, and the errors weight - rounded."""
        rows, columns = weight.shape
        n = len(self._blocks)
        w = np.ascontiguousarray(weight[:, self._order])
        errors, codes, scales = (
            np.zeros_like(w),
            np.zeros((rows, columns), np.int8),
            np.empty((rows, n), np.float32),
        )
        per_panel = max(1, TOGETHER // self.block)
        for first in range((n - 1) // per_panel * per_panel, -1, -per_panel):
            ends = self._ends[first : first + per_panel + 1]
            lo, hi = int(ends[0]), int(ends[-1])
            targets = w[:, lo:hi] + errors[:, hi:] @ self._factor[hi:, lo:hi]
            inner = np.ascontiguousarray(self._factor[lo:hi, lo:hi].T)
            threads.run_parallel(
                _round_panel,
                targets,
                w[:, lo:hi],
                inner,
                self._weights[lo:hi],
                ends - lo,
                SHRINK,
                codes[:, lo:hi],
                scales[:, first : first + per_panel],
                errors[:, lo:hi],
            )
        return self._in_place(codes, rows, columns), *self._restored(scales, errors)

    def _in_place(self, codes: I8, rows: int, columns: int) -> U8:
        whole = np.zeros((rows, len(self._blocks) * self.block), np.int8)
        whole[:, self._order] = codes
        return pack(whole.reshape(rows, -1, self.block), 4)

    def _restored(self, scales: F32, errors: F32) -> tuple[F32, F32]:
        own_scales, own_errors = np.empty_like(scales), np.empty_like(errors)
        own_scales[:, self._blocks], own_errors[:, self._order] = scales, errors
        return own_scales, own_errors


@rows_jit
def _round_panel(targets, weight, factor, weights, ends, shrink, codes, scales, errors):  # type: ignore[no-untyped-def]
    """factor[j, i]: by which the error of column i > j counts in the target of j."""
    rows, columns = targets.shape
    for r in numba.prange(rows):
        t = np.empty(columns, np.float32)
        e = np.zeros(columns, np.float32)
        kept = np.zeros(columns, np.float32)
        for b in range(len(ends) - 2, -1, -1):
            lo, hi = ends[b], ends[b + 1]
            peak = np.float32(0)
            for j in range(lo, hi):
                total = targets[r, j]
                for i in range(hi, columns):
                    total += e[i] * factor[j, i]
                t[j] = total
                if abs(total) > abs(peak):
                    peak = total
            best, scale = np.float32(np.inf), np.float32(0)
            for s in shrink:
                d = peak * s / np.float32(-8)
                inverse = np.float32(1) / d if d != 0 else np.float32(0)
                error = np.float32(0)
                for j in range(hi - 1, lo - 1, -1):
                    u = t[j]
                    for i in range(j + 1, hi):
                        u += kept[i] * factor[j, i]
                    q = min(max(np.rint(u * inverse), np.float32(-8)), np.float32(7))
                    kept[j] = weight[r, j] - q * d
                    error += weights[j] * (u - q * d) * (u - q * d)
                    if error >= best:
                        break
                if error < best:
                    best, scale = error, d
                    e[lo:hi] = kept[lo:hi]
            scales[r, b] = scale
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            for j in range(lo, hi):
                codes[r, j] = np.int8(np.rint((weight[r, j] - e[j]) * inverse))
                errors[r, j] = e[j]
