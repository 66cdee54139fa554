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

import numpy as np

from edgekv.errors import EdgeKVError
from edgekv.kernels import threads
from edgekv.kernels.cpu.loops import floats, int64s, load_numbers, signed_chars
from edgekv.kernels.cpu.scalar import get, put
from edgekv.types import F32, I8, I64, U8
from edgekv.weights.checkpoint_weights import CheckpointWeights
from edgekv.weights.formats import ROW_WORK, WeightFormat, pack, rows_kernel
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
    """Returns the columns (n,) in the order of H, its blocks (blocks,), and where each begins (blocks + 1,).

    Blocks stay whole; the heaviest comes last, and so do the heaviest columns within a block.
    """
    starts = np.arange(0, len(importance), block)
    order = np.argsort(np.add.reduceat(importance.astype(np.float64), starts), kind="stable")
    columns = [b * block + np.argsort(importance[b * block : (b + 1) * block], kind="stable") for b in order]
    ends = np.cumsum([0, *map(len, columns)])
    return np.concatenate(columns).astype(np.int64), order.astype(np.int64), ends.astype(np.int64)


def in_column_order(codes: I8, scales: F32, order: I64, blocks: I64, block: int) -> tuple[U8, F32]:
    """Puts codes (r, columns) and scales (r, blocks) in the order of H back in order, and packs the codes."""
    rows = len(codes)
    ordered, ordered_scales = np.zeros((rows, len(blocks) * block), np.int8), np.empty_like(scales)
    ordered[:, order], ordered_scales[:, blocks] = codes, scales
    return pack(ordered.reshape(rows, -1, block), 4), ordered_scales


class Rounder:
    """Rounds rows of one linear layer; hessian (columns, columns) float32: H, positive definite."""

    def __init__(self, hessian: F32, block: int) -> None:
        importance = np.ascontiguousarray(hessian.diagonal())
        self.block, (self._order, self._blocks, self._ends) = block, column_order(importance, block)
        self._hessian = hessian[np.ix_(self._order, self._order)]
        self._factor: F32 = np.linalg.cholesky(self._hessian)
        diagonal = self._factor.diagonal().copy()
        self._weights = diagonal * diagonal
        self._factor /= diagonal

    def round(self, weight: F32, output_correction: F32) -> tuple[U8, F32]:
        """Rounds weight (r, columns) to codes (r, blocks, block / 2) and scales (r, blocks), as `quantize` does.

        output_correction: b (r, columns); weight + b H^-1 is rounded.
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
            n_threads, block = threads.count(), int(np.diff(ends).max())
            scratch = np.empty((n_threads, 2 * (hi - lo) + (block + 4) * CANDIDATES), np.float32)
            sizes = hi - lo, len(ends) - 1, block, scratch.shape[1]
            arrays = targets, own, inner, self._weights[lo:hi], ends, SHRINK, *changed, scratch
            _round_panel(rows, ROW_WORK, *sizes, *arrays, n_threads=n_threads)
            codes[:, lo:hi], scales[:, blocks], errors[:, lo:hi] = changed
        self._round_again(w, errors @ self._hessian + b, codes, scales, errors)
        return in_column_order(codes, scales, self._order, self._blocks, self.block)

    def size(self, b: F32) -> float:
        """Returns the sum of b H^-1 b^T over the rows of b (r, columns): what a correction by b makes better."""
        return float((np.square(self._forward(b[:, self._order])) / self._weights).sum(dtype=np.float64))

    def _forward(self, b: F32) -> F32:
        """Solves x F^T = b with F = L / its diagonal; b and x (r, columns) are in the order of H."""
        x: F32 = b.copy()
        for lo, hi, _, _ in reversed(list(self._panels())):
            rest = x[:, lo:hi] - x[:, :lo] @ self._factor[lo:hi, :lo].T
            x[:, lo:hi] = np.linalg.solve(self._factor[lo:hi, lo:hi], rest.T).T
        return x

    def _panels(self) -> Iterator[tuple[int, int, slice, I64]]:
        """Yields columns lo to hi, their blocks, and where in them each block begins; the last ones first."""
        n, blocks = len(self._blocks), max(1, TOGETHER // self.block)
        for first in range((n - 1) // blocks * blocks, -1, -blocks):
            ends = self._ends[first : first + blocks + 1]
            yield int(ends[0]), int(ends[-1]), slice(first, first + blocks), ends - ends[0]

    def _round_again(self, w: F32, slopes: F32, codes: I8, scales: F32, errors: F32) -> None:
        """Rounds all columns again; changes all arguments but w, which are in the order of H."""
        for lo, hi, blocks, ends in self._panels():
            before = errors[:, lo:hi].copy()
            inner = np.ascontiguousarray(self._hessian[lo:hi, lo:hi])
            views = (w[:, lo:hi], slopes[:, lo:hi], codes[:, lo:hi], scales[:, blocks], errors[:, lo:hi])
            own, slope, *changed = map(np.ascontiguousarray, views)
            _round_panel_again(len(w), ROW_WORK, hi - lo, len(ends) - 1, own, slope, inner, ends, *changed)
            codes[:, lo:hi], scales[:, blocks], errors[:, lo:hi] = changed
            slopes[:, :lo] += (errors[:, lo:hi] - before) @ self._hessian[lo:hi, :lo]


def hessian(x: F32) -> F32:
    """Returns the mean of the outer products of x's rows (n, columns), and of as many more rows as x has columns.

    Those stand for inputs of the same size that do not depend on each other, so that a few rows of x tell little
    of how inputs do. Raises EdgeKVError where x is not finite.
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
    """Returns the mean of the outer products of the rows of lost and own (tokens, columns).

    And the same with the products of the second half negated; both (columns, columns).
    """
    n, half = len(own), len(own) // 2
    first, second = lost[:half].T @ own[:half], lost[half:].T @ own[half:]
    return (first + second) / np.float32(n), (first - second) / np.float32(n)


def output_correction(rounder: Rounder, rows: F32, mean: F32, half_difference: F32) -> F32:
    """Returns `Rounder.round`'s correction, with which rows (r, columns) make of own what they do of own + lost.

    mean, half_difference: the `cross_products` of lost and own; rounder has the hessian of own. It is a
    least-squares change times the share of it in which the text's halves agree, which is no chance.
    """
    both = rows @ mean
    whole, chance = rounder.size(both[::SAMPLE]), rounder.size(rows[::SAMPLE] @ half_difference)
    both *= np.float32(max(0.0, 1 - chance / whole) if whole > 0 else 0.0)
    return both


class CalibratingOps(NumpyOps):
    """`NumpyOps` whose linear layers are rounded when they are called, each once, in order.

    Rows of activations are the exact ones of all tokens, and behind them as many of the rounded model. The head's
    outputs are not read.
    """

    def __init__(self, weights: CheckpointWeights, form: WeightFormat, write: Write) -> None:
        super().__init__(weights)
        self._checkpoint, self._form, self._write = weights, form, write

    def linear(self, x: F32, name: str) -> F32:
        """Returns the linear layer's outputs (n, rows) of x (n, columns)."""
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
        """Hands the layer on and returns its rounded weights (rows, columns); None: they stay as they are."""
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


@rows_kernel
def _round_panel(first: int, last: int, part: int, arguments: int) -> None:
    """Rounds rows of a panel; factor[j, i]: by which the error of column i > j counts in the target of j."""
    columns, n_blocks, block, scratch_size = load_numbers(arguments, 4)
    targets_at, weight_at, factor_at, weights_at, ends_at, shrink_at = load_numbers(arguments + 8 * 4, 6)
    codes_at, scales_at, errors_at, scratch_at = load_numbers(arguments + 8 * 10, 4)
    factor, weights, ends, shrink = floats(factor_at), floats(weights_at), int64s(ends_at), floats(shrink_at)
    scratch = scratch_at + 4 * part * scratch_size
    t, e, kept = floats(scratch), floats(scratch + 4 * columns), scratch + 8 * columns  # kept: errors by the scale
    last_four = kept + 4 * block * CANDIDATES
    u, d = floats(last_four), floats(last_four + 4 * CANDIDATES)
    inverses, sums = floats(last_four + 8 * CANDIDATES), floats(last_four + 12 * CANDIDATES)
    for r in range(first, last):
        targets, weight = floats(targets_at + 4 * r * columns), floats(weight_at + 4 * r * columns)
        codes, errors = signed_chars(codes_at + r * columns), floats(errors_at + 4 * r * columns)
        for j in range(columns):
            put(e, j, np.float32(0))
        for b in range(n_blocks - 1, -1, -1):
            lo, hi = get(ends, b), get(ends, b + 1)
            peak = np.float32(0)
            for j in range(lo, hi):
                total = get(targets, j)
                for i in range(hi, columns):
                    total += get(e, i) * get(factor, j * columns + i)
                put(t, j, total)
                if abs(total) > abs(peak):
                    peak = total
            for s in range(CANDIDATES):
                put(d, s, peak * get(shrink, s) / np.float32(-8))
                put(inverses, s, np.float32(1) / get(d, s) if get(d, s) != 0 else np.float32(0))
                put(sums, s, np.float32(0))
            for j in range(hi - 1, lo - 1, -1):
                for s in range(CANDIDATES):
                    put(u, s, get(t, j))
                for i in range(j + 1, hi):
                    share, errors_of = get(factor, j * columns + i), floats(kept + 4 * (i - lo) * CANDIDATES)
                    for s in range(CANDIDATES):
                        put(u, s, get(u, s) + get(errors_of, s) * share)
                own, w, heavy = floats(kept + 4 * (j - lo) * CANDIDATES), get(weight, j), get(weights, j)
                for s in range(CANDIDATES):
                    q = np.rint(get(u, s) * get(inverses, s))
                    q = np.float32(-8) if q < np.float32(-8) else q
                    q = np.float32(7) if q > np.float32(7) else q
                    put(own, s, w - q * get(d, s))
                    left = get(u, s) - q * get(d, s)
                    put(sums, s, get(sums, s) + heavy * left * left)
            best = 0
            for s in range(1, CANDIDATES):
                best = s if get(sums, s) < get(sums, best) else best
            scale = get(d, best)
            put(floats(scales_at), r * n_blocks + b, scale)
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            for j in range(lo, hi):
                error = get(floats(kept), (j - lo) * CANDIDATES + best)
                put(e, j, error)
                put(codes, j, np.int8(np.rint((get(weight, j) - error) * inverse)))
                put(errors, j, error)


@rows_kernel
def _round_panel_again(first: int, last: int, part: int, arguments: int) -> None:
    """Rounds rows of a panel again; slopes: of half the sum to be small, by the errors of these columns."""
    columns, n_blocks, weight_at, slopes_at, hessian_at, ends_at = load_numbers(arguments, 6)
    codes_at, scales_at, errors_at = load_numbers(arguments + 8 * 6, 3)
    hessian, ends = floats(hessian_at), int64s(ends_at)
    for r in range(first, last):
        slope, weight = floats(slopes_at + 4 * r * columns), floats(weight_at + 4 * r * columns)
        codes, errors = signed_chars(codes_at + r * columns), floats(errors_at + 4 * r * columns)
        for b in range(n_blocks - 1, -1, -1):
            lo, hi = get(ends, b), get(ends, b + 1)
            gain, square = np.float32(0), np.float32(0)
            for j in range(lo, hi):
                product, code = np.float32(0), np.float32(get(codes, j))
                for i in range(lo, hi):
                    product += get(hessian, j * columns + i) * np.float32(get(codes, i))
                gain += get(slope, j) * code
                square += product * code
            if square <= 0:
                continue
            scale = get(floats(scales_at), r * n_blocks + b) + gain / square
            put(floats(scales_at), r * n_blocks + b, scale)
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            for is_coded in (False, True):  # first the codes that are there, times the new scale
                for j in range(lo, hi):
                    before = get(errors, j)
                    if is_coded:
                        best = get(weight, j) - before + get(slope, j) / get(hessian, j * columns + j)
                        level = min(max(np.rint(best * inverse), np.float32(-8)), np.float32(7))
                        put(codes, j, np.int8(level))
                    error = get(weight, j) - np.float32(get(codes, j)) * scale
                    change = error - before
                    put(errors, j, error)
                    if change != 0:
                        for i in range(hi):  # those behind have been rounded again
                            put(slope, i, get(slope, i) + change * get(hessian, j * columns + i))
