"""Rounding weights to 4 bits so that a layer's outputs on a text change least: GPTQ, without its inverse.

Of a row w and its rounded form q, (w - q) H (w - q)^T is to be small, where H sums x x^T over the inputs x. With
Cholesky's H = L L^T that is the sum over columns j of L_jj^2 (t_j - q_j)^2, where t_j adds to w_j what the columns
behind it were rounded by: t_j = w_j + sum over i > j of (w_i - q_i) L_ij / L_jj. So columns are rounded from the
last to the first, each to the level next to t_j, and the heaviest columns lie last: what they are rounded by, all
others can make up for. A block's scale is the candidate with which the block, rounded in that way, adds least.

Then once more, from the last block to the first, its scale and each of its codes become what is best beside all
others: with the slopes s = (w - q) H a column's error is best less by s_j / H_jj. To have w + b H^-1 rounded in
place of w, the linear term b is added to the slopes, and b L^-T to what the targets add, before they are divided.

Sources: Frantar et al., GPTQ, 2022 (arXiv:2210.17323); Behdin et al., QuantEase, 2023 (arXiv:2309.01885).
"""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np

from edgekv.kernels import threads
from edgekv.types import F32, F64, I8, I64, U8
from edgekv.weights.quantize import n_blocks, pack, rows_jit

TOGETHER = 256  # columns between two matrix products
SHRINK = np.arange(1.04, 0.67, -0.04).astype(np.float32)
"""Scales to try: parts of that which puts the largest target at -8."""
CANDIDATES = len(SHRINK)


def column_order(importance: F32, block: int) -> tuple[I64, I64]:
    """Columns in the order of H: blocks whole, the heaviest last, and within a block so too; and the blocks."""
    n = len(importance)
    blocks = n_blocks(n, block)
    sums = np.zeros(blocks)
    np.add.at(sums, np.arange(n) // block, importance)
    order = np.argsort(sums, kind="stable")
    columns = [b * block + np.argsort(importance[b * block : (b + 1) * block], kind="stable") for b in order]
    return np.concatenate(columns).astype(np.int64), order.astype(np.int64)


def block_ends(blocks: I64, block: int, columns: int) -> I64:
    """Where each of ``blocks`` begins, one behind the other, and the end of the last."""
    sizes = np.minimum(block, columns - blocks * block)
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def round_numpy(weight: F32, linear_term: F32, hessian: F32, block: int) -> tuple[U8, F32]:
    """weight, linear_term (r, columns), hessian (columns, columns) -> codes and scales as of `Rounder.round`.

    The specification of that, in float64: a row, and of it a column, after the other.
    """
    order, blocks = column_order(hessian.diagonal(), block)
    ends = block_ends(blocks, block, len(order))
    h = hessian.astype(np.float64)[np.ix_(order, order)]
    factor = np.asarray(np.linalg.cholesky(h), np.float64)
    w, b = weight[:, order].astype(np.float64), linear_term[:, order].astype(np.float64)
    added = np.linalg.solve(factor, b.T).T
    codes, scales, errors = np.zeros(w.shape, np.int8), np.zeros((len(w), len(blocks))), np.zeros_like(w)
    last_first = [(i, slice(ends[i], ends[i + 1])) for i in reversed(range(len(blocks)))]
    for i, own in last_first:
        inner = factor[own, own]
        for r in range(len(w)):
            targets = w[r, own] + (errors[r] @ factor + added[r])[own] / inner.diagonal()
            steps = targets[np.abs(targets).argmax()] * SHRINK.astype(np.float64) / -8
            tried = [_tried(w[r, own], targets, inner, step) for step in steps]
            best = int(np.argmin([loss for _, loss in tried]))
            codes[r, own], scales[r, i] = tried[best][0], steps[best]
            errors[r, own] = w[r, own] - codes[r, own] * steps[best]
    for i, own in last_first:
        for r in range(len(w)):
            q, slopes = codes[r, own].astype(np.float64), errors[r] @ h + b[r]
            if not q.any():
                continue
            scales[r, i] += slopes[own] @ q / (q @ h[own, own] @ q)
            errors[r, own] = w[r, own] - q * scales[r, i]
            for j in range(own.start, own.stop):
                best_value = w[r, j] - errors[r, j] + (errors[r] @ h[:, j] + b[r, j]) / h[j, j]
                codes[r, j] = _level(best_value, scales[r, i])
                errors[r, j] = w[r, j] - codes[r, j] * scales[r, i]
    return _in_place(codes, scales.astype(np.float32), order, blocks, block)


def _tried(w: F64, targets: F64, factor: F64, step: float) -> tuple[F64, float]:
    """A block's codes with a scale, and what it adds."""
    codes, errors, added = np.zeros_like(w), np.zeros_like(w), 0.0
    for j in reversed(range(len(w))):
        target = targets[j] + errors @ factor[:, j] / factor[j, j]
        codes[j] = _level(target, step)
        errors[j] = w[j] - step * codes[j]
        added += (factor[j, j] * (target - step * codes[j])) ** 2
    return codes, added


def _level(value: float, step: float) -> float:
    return min(max(np.rint(value / step), -8.0), 7.0) if step else 0.0


def _in_place(codes: I8, scales: F32, order: I64, blocks: I64, block: int) -> tuple[U8, F32]:
    """Codes (r, columns) and scales (r, blocks) in the order of H, put back and packed."""
    rows = len(codes)
    whole, own_scales = np.zeros((rows, len(blocks) * block), np.int8), np.empty_like(scales)
    whole[:, order], own_scales[:, blocks] = codes, scales
    return pack(whole.reshape(rows, -1, block), 4), own_scales


class Rounder:
    """Rounds rows of one linear layer. hessian (columns, columns) float32: H, positive definite."""

    def __init__(self, hessian: F32, block: int) -> None:
        self.block, columns = block, len(hessian)
        self._order, self._blocks = column_order(np.ascontiguousarray(hessian.diagonal()), block)
        self._hessian = hessian[np.ix_(self._order, self._order)]
        factor: F32 = np.linalg.cholesky(self._hessian)
        diagonal = factor.diagonal().copy()
        self._weights = diagonal * diagonal
        factor /= diagonal
        self._factor = factor
        self._ends = block_ends(self._blocks, block, columns)

    def round(self, weight: F32, linear_term: F32) -> tuple[U8, F32]:
        """weight (r, columns) -> codes (r, blocks, block / 2), scales (r, blocks), as `quantize_numpy` gives them.

        linear_term b (r, columns): as if weight + b H^-1 were rounded.
        """
        rows, columns = weight.shape
        w, b = np.ascontiguousarray(weight[:, self._order]), linear_term[:, self._order]
        wanted = w + self._forward(b) / self._weights
        errors, codes = np.zeros_like(w), np.zeros((rows, columns), np.int8)
        scales = np.empty((rows, len(self._blocks)), np.float32)
        for lo, hi, blocks, ends in self._panels():
            targets = wanted[:, lo:hi] + errors[:, hi:] @ self._factor[hi:, lo:hi]
            inner = np.ascontiguousarray(self._factor[lo:hi, lo:hi].T)
            threads.run_parallel(
                _round_panel,
                targets,
                w[:, lo:hi],
                inner,
                self._weights[lo:hi],
                ends,
                SHRINK,
                codes[:, lo:hi],
                scales[:, blocks],
                errors[:, lo:hi],
            )
        self._round_again(w, errors @ self._hessian + b, codes, scales, errors)
        return _in_place(codes, scales, self._order, self._blocks, self.block)

    def size(self, linear_term: F32) -> float:
        """The sum of b H^-1 b^T over the rows b of linear_term (r, columns): what a change by it makes better."""
        return float((np.square(self._forward(linear_term[:, self._order])) / self._weights).sum(dtype=np.float64))

    def _forward(self, b: F32) -> F32:
        """x with x F^T = b, where F = L / its diagonal; b / x (r, columns) in the order of H."""
        x: F32 = b.copy()
        for lo, hi, _, _ in reversed(list(self._panels())):
            rest = x[:, lo:hi] - x[:, :lo] @ self._factor[lo:hi, :lo].T
            x[:, lo:hi] = np.linalg.solve(self._factor[lo:hi, lo:hi], rest.T).T
        return x

    def _panels(self) -> Iterator[tuple[int, int, slice, I64]]:
        """Columns lo to hi, their blocks, and where within the columns each block begins; the last ones first."""
        n, blocks = len(self._blocks), max(1, TOGETHER // self.block)
        for first in range((n - 1) // blocks * blocks, -1, -blocks):
            ends = self._ends[first : first + blocks + 1]
            yield int(ends[0]), int(ends[-1]), slice(first, first + blocks), ends - ends[0]

    def _round_again(self, w: F32, slopes: F32, codes: I8, scales: F32, errors: F32) -> None:
        """Changes all but w, in the order of H."""
        for lo, hi, blocks, ends in self._panels():
            before = errors[:, lo:hi].copy()
            inner = np.ascontiguousarray(self._hessian[lo:hi, lo:hi])
            threads.run_parallel(
                _round_panel_again,
                w[:, lo:hi],
                slopes[:, lo:hi],
                inner,
                ends,
                codes[:, lo:hi],
                scales[:, blocks],
                errors[:, lo:hi],
            )
            slopes[:, :lo] += (errors[:, lo:hi] - before) @ self._hessian[lo:hi, :lo]


@rows_jit
def _round_panel(targets, weight, factor, weights, ends, shrink, codes, scales, errors):  # type: ignore[no-untyped-def]
    """factor[j, i]: by which the error of column i > j counts in the target of j."""
    rows, columns = targets.shape
    block = 1
    for b in range(len(ends) - 1):
        block = max(block, ends[b + 1] - ends[b])
    for r in numba.prange(rows):
        t = np.empty(columns, np.float32)
        e = np.zeros(columns, np.float32)
        kept = np.empty(
            (block, CANDIDATES), np.float32
        )  # errors by the scale: side by side, they are tried together
        u, d, inverses, sums = np.empty((4, CANDIDATES), np.float32)
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
            for s in range(CANDIDATES):
                d[s] = peak * shrink[s] / np.float32(-8)
                inverses[s] = np.float32(1) / d[s] if d[s] != 0 else np.float32(0)
                sums[s] = 0
            for j in range(hi - 1, lo - 1, -1):
                u[:] = t[j]
                for i in range(j + 1, hi):
                    share, errors_of = factor[j, i], kept[i - lo]
                    for s in range(CANDIDATES):
                        u[s] += errors_of[s] * share
                own, w, heavy = kept[j - lo], weight[r, j], weights[j]
                for s in range(CANDIDATES):
                    q = np.rint(u[s] * inverses[s])
                    q = np.float32(-8) if q < np.float32(-8) else q
                    q = np.float32(7) if q > np.float32(7) else q
                    own[s] = w - q * d[s]
                    left = u[s] - q * d[s]
                    sums[s] += heavy * left * left
            best = np.argmin(sums)
            scale = d[best]
            e[lo:hi] = kept[: hi - lo, best]
            scales[r, b] = scale
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            for j in range(lo, hi):
                codes[r, j] = np.int8(np.rint((weight[r, j] - e[j]) * inverse))
                errors[r, j] = e[j]


@rows_jit
def _round_panel_again(weight, slopes, hessian, ends, codes, scales, errors):  # type: ignore[no-untyped-def]
    """slopes: of half the sum to be small, by the errors of these columns; hessian: that among them."""
    for r in numba.prange(len(weight)):
        slope = slopes[r].copy()
        for b in range(len(ends) - 2, -1, -1):
            lo, hi = ends[b], ends[b + 1]
            gain, square = np.float32(0), np.float32(0)
            for j in range(lo, hi):
                product = np.float32(0)
                for i in range(lo, hi):
                    product += hessian[j, i] * codes[r, i]
                gain += slope[j] * codes[r, j]
                square += product * codes[r, j]
            if square <= 0:
                continue
            scale = scales[r, b] + gain / square
            scales[r, b] = scale
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            for is_coded in (False, True):  # first the codes that are there, times the new scale
                for j in range(lo, hi):
                    if is_coded:
                        best = weight[r, j] - errors[r, j] + slope[j] / hessian[j, j]
                        codes[r, j] = np.int8(min(max(np.rint(best * inverse), np.float32(-8)), np.float32(7)))
                    error = weight[r, j] - np.float32(codes[r, j]) * scale
                    change = error - errors[r, j]
                    errors[r, j] = error
                    if change != 0:
                        for i in range(hi):  # those behind have been rounded again
                            slope[i] += change * hessian[j, i]
