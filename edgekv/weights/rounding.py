"""Weights rounded to 4 bits so that each layer's outputs on a text change least: GPTQ, without its inverse.

A text goes through the model twice: through its own weights, and through the rounded ones. On its second way it
comes to each layer as the rounded layers before have made it, and the layer is rounded so that it makes of these
inputs what its own weights make of the exact ones, as far as the text can tell.

Of a row w and its rounded form q, (w - q) H (w - q)^T is to be small, where H sums x x^T over the inputs x. With
Cholesky's H = L L^T that is the sum over columns j of L_jj^2 (t_j - q_j)^2, where t_j adds to w_j what the columns
behind it were rounded by: t_j = w_j + sum over i > j of (w_i - q_i) L_ij / L_jj. So columns are rounded from the
last to the first, each to the level next to t_j, and the heaviest columns lie last: what they are rounded by, all
others can make up for. A block's scale is the candidate with which the block, rounded in that way, adds least.

Then once more, from the last block to the first, its scale and each of its codes become what is best beside all
others: with the slopes s = (w - q) H a column's error is best less by s_j / H_jj. To have w + b H^-1 rounded in
place of w, the linear term b is added to the slopes, and b L^-T to what the targets add, before they are divided.

Sources: Frantar et al., GPTQ, 2022 (arXiv:2210.17323); Behdin et al., QuantEase, 2023 (arXiv:2309.01885);
Li et al., GPTAQ, 2025 (arXiv:2504.02692): the exact outputs as the aim.
"""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np

from edgekv.errors import EdgeKVError
from edgekv.kernels import threads
from edgekv.types import F32, I8, I64, U8
from edgekv.weights.checkpoint_weights import CheckpointWeights
from edgekv.weights.formats import WeightFormat, pack, rows_jit
from edgekv.weights.ops import NumpyOps
from edgekv.weights.store import Write

TOGETHER = 256  # columns between two matrix products
SHRINK = np.arange(1.04, 0.67, -0.04).astype(np.float32)
"""Scales to try: parts of that which puts the largest target at -8."""
CANDIDATES = len(SHRINK)
HESSIAN_ROWS = 1 << 12  # inputs added to a hessian at a time
ROUND_ELEMENTS = 1 << 24  # of a matrix rounded at a time
DAMPING = 0.02  # of the mean of a hessian's diagonal, added to it: inputs that the text lacks
SAMPLE = 8  # of so many rows one tells what is chance


def column_order(importance: F32, block: int) -> tuple[I64, I64, I64]:
    """Return columns (n,) in the order of H, and blocks: whole, the heaviest last, and so within a block too.

    And where in that order each block begins, and the end of the last (blocks + 1,).
    """
    starts = np.arange(0, len(importance), block)
    order = np.argsort(np.add.reduceat(importance.astype(np.float64), starts), kind="stable")
    columns = [b * block + np.argsort(importance[b * block : (b + 1) * block], kind="stable") for b in order]
    ends = np.cumsum([0, *map(len, columns)])
    return np.concatenate(columns).astype(np.int64), order.astype(np.int64), ends.astype(np.int64)


def in_column_order(codes: I8, scales: F32, order: I64, blocks: I64, block: int) -> tuple[U8, F32]:
    """Codes (r, columns) and scales (r, blocks) in the order of H, put back and packed."""
    rows = len(codes)
    whole, own_scales = np.zeros((rows, len(blocks) * block), np.int8), np.empty_like(scales)
    whole[:, order], own_scales[:, blocks] = codes, scales
    return pack(whole.reshape(rows, -1, block), 4), own_scales


class Rounder:
    """Rounds rows of one linear layer. hessian (columns, columns) float32: H, positive definite."""

    def __init__(self, hessian: F32, block: int) -> None:
        importance = np.ascontiguousarray(hessian.diagonal())
        self.block, (self._order, self._blocks, self._ends) = block, column_order(importance, block)
        self._hessian = hessian[np.ix_(self._order, self._order)]
        self._factor: F32 = np.linalg.cholesky(self._hessian)
        diagonal = self._factor.diagonal().copy()
        self._weights = diagonal * diagonal
        self._factor /= diagonal

    def round(self, weight: F32, output_correction: F32) -> tuple[U8, F32]:
        """weight (r, columns) -> codes (r, blocks, block / 2), scales (r, blocks), as `quantize` gives them.

        output_correction b (r, columns): as if weight + b H^-1 were rounded.
        """
        rows, columns = weight.shape
        w, b = np.ascontiguousarray(weight[:, self._order]), output_correction[:, self._order]
        wanted = w + self._forward(b) / self._weights
        errors, codes = np.zeros_like(w), np.zeros((rows, columns), np.int8)
        scales = np.empty((rows, len(self._blocks)), np.float32)
        for lo, hi, blocks, ends in self._panels():
            targets = wanted[:, lo:hi] + errors[:, hi:] @ self._factor[hi:, lo:hi]
            inner = np.ascontiguousarray(self._factor[lo:hi, lo:hi].T)
            views = w[:, lo:hi], codes[:, lo:hi], scales[:, blocks], errors[:, lo:hi]
            own, *changed = map(np.ascontiguousarray, views)
            threads.run_parallel(_round_panel, targets, own, inner, self._weights[lo:hi], ends, SHRINK, *changed)
            codes[:, lo:hi], scales[:, blocks], errors[:, lo:hi] = changed
        self._round_again(w, errors @ self._hessian + b, codes, scales, errors)
        return in_column_order(codes, scales, self._order, self._blocks, self.block)

    def size(self, b: F32) -> float:
        """Return the sum of b H^-1 b^T over the rows b of b (r, columns): what a correction by it makes better."""
        return float((np.square(self._forward(b[:, self._order])) / self._weights).sum(dtype=np.float64))

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
            views = (w[:, lo:hi], slopes[:, lo:hi], codes[:, lo:hi], scales[:, blocks], errors[:, lo:hi])
            own, slope, *changed = map(np.ascontiguousarray, views)
            threads.run_parallel(_round_panel_again, own, slope, inner, ends, *changed)
            codes[:, lo:hi], scales[:, blocks], errors[:, lo:hi] = changed
            slopes[:, :lo] += (errors[:, lo:hi] - before) @ self._hessian[lo:hi, :lo]


def hessian(x: F32) -> F32:
    """(columns, columns): the mean of the outer products of x's rows, and of as many more as x has columns.

    Those are of inputs as large that do not depend on each other, so that few rows say little of how they do.
    Raises EdgeKVError where x is not finite.
    """
    n, columns = x.shape
    total = np.zeros((columns, columns), np.float32)
    for a in range(0, n, HESSIAN_ROWS):
        part = x[a : a + HESSIAN_ROWS]
        total += part.T @ part
    diagonal = total.diagonal() / np.float32(max(1, n))
    mean = float(diagonal.mean(dtype=np.float64))
    if not np.isfinite(mean):
        raise EdgeKVError("the model's activations on this text are not finite; calibrate with another text")
    total /= np.float32(n + columns)
    total[np.diag_indices(columns)] = diagonal + np.float32(DAMPING * mean or 1.0)
    return total


def cross_products(lost: F32, own: F32) -> tuple[F32, F32]:
    """(columns, columns) each: the mean of the outer products of the rows of lost and own (tokens, columns).

    And the same with those of the second half negated.
    """
    n, half = len(own), len(own) // 2
    first, second = lost[:half].T @ own[:half], lost[half:].T @ own[half:]
    return (first + second) / np.float32(n), (first - second) / np.float32(n)


def output_correction(rounder: Rounder, rows: F32, mean: F32, half_difference: F32) -> F32:
    """For `Rounder.round`: rows (r, columns) are to make of inputs ``own`` what they make of own + lost.

    mean, half_difference: the `cross_products` of lost and own; rounder has the hessian of own. A least-squares
    change, times the share of it that is no chance: in which the text's halves agree.
    """
    both = rows @ mean
    whole, chance = rounder.size(both[::SAMPLE]), rounder.size(rows[::SAMPLE] @ half_difference)
    both *= np.float32(max(0.0, 1 - chance / whole) if whole > 0 else 0.0)
    return both


class CalibratingOps(NumpyOps):
    """`NumpyOps` whose linear layers are rounded when they are called, which each is to be once, in order.

    Rows of activations are the exact ones of all tokens, and behind them as many of the rounded model. What the
    head says nobody reads.
    """

    def __init__(self, weights: CheckpointWeights, form: WeightFormat, write: Write) -> None:
        super().__init__(weights)
        self._checkpoint, self._form, self._write = weights, form, write

    def linear(self, x: F32, name: str) -> F32:
        """Return the linear layer's outputs (n, rows) of x (n, columns)."""
        if name == "head":
            self.rounded(x, name)
            return np.empty((0, self.arch.config.vocab_size), np.float32)
        exact, rounded = self._checkpoint.matrix(name), self.rounded(x, name)
        outputs = []
        for part, matrix in zip(np.split(x, 2), (exact, exact if rounded is None else rounded), strict=True):
            self._matrices[name] = matrix
            outputs.append(super().linear(part, name))
        del self._matrices[name]
        return np.concatenate(outputs)

    def rounded(self, x: F32, name: str) -> F32 | None:
        """Hands the layer on and gives its weights (rows, columns) as they will be; None: as they are."""
        form = self._form.of(name)
        is_other = form.bits != 4 or form.zeros or form.offsets or form.e2m1  # than what a `Rounder` gives
        if is_other or self._checkpoint.exact_codes(name, form) is not None:
            self._write(name, None)
            return None
        exact, own = np.split(x, 2)
        rounder, products = Rounder(hessian(own), form.block), cross_products(exact - own, own)
        parts = [
            rounder.round(rows, output_correction(rounder, rows, *products))
            for rows in self._checkpoint.blocks(name, ROUND_ELEMENTS)
        ]
        codes, scales = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        self._write(name, (codes, scales))
        return form.decode({"codes": codes, "scales": scales}, x.shape[1])


@rows_jit
def _round_panel(targets, weight, factor, weights, ends, shrink, codes, scales, errors):  # type: ignore[no-untyped-def]
    """factor[j, i]: by which the error of column i > j counts in the target of j."""
    rows, columns = targets.shape
    block = np.max(ends[1:] - ends[:-1])
    for r in numba.prange(rows):
        t = np.empty(columns, np.float32)
        e = np.zeros(columns, np.float32)
        kept = np.empty((block, CANDIDATES), np.float32)  # errors by the scale, which are tried together
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
