"""Rounds weights to 2 to 5 bits so that each layer's outputs on a text change least: GPTQ, without its inverse.

The text goes through the exact model and, beside it, through the rounded one. The second pass feeds each layer
with the outputs of the layers that are already rounded. A layer is rounded so that its outputs for these inputs
approximate the exact layer's for the exact inputs. For that its weights are corrected first, by a least-squares
change. The change is computed on each half of the text. Where the two differ it is mostly noise, and is scaled
towards 0.

Inputs and weights are rotated, as in `edgekv.weights.gaussian`. A row w of weights is rounded to a row q with a
small error (w - q) H (w - q)^T, where H is the mean of x x^T over the inputs x (`hessian`). With Cholesky's H = L
L^T the error is the sum over columns j of L_jj^2 (t_j - q_j)^2. The target t_j is w_j plus what makes up for the
errors of later columns: t_j = w_j + sum over i > j of (w_i - q_i) L_ij / L_jj. So columns are rounded from the
last to the first, and blocks of 128 are ordered so that the one with the largest inputs comes last: all others
make up for it.

Partners are columns j and j + 1. For each of the four parities of their codes, j + 1 is rounded first, then j; the
cheapest of the four is kept. A block is rounded in this way with several scales, and the cheapest is kept.

A second pass is coordinate descent, last block first: refit the scale, then round each pair again with the other
columns fixed. For slopes s = (w - q) H of a pair and its 2 x 2 block P of H, the errors should change by -s P^-1.
With an output correction b, w + b H^-1 is rounded in place of w: slopes grow by b, targets by (b L^-T)_j / L_jj.

Sources: Frantar et al., GPTQ, 2022 (arXiv:2210.17323); Behdin et al., QuantEase, 2023 (arXiv:2309.01885);
Li et al., GPTAQ, 2025 (arXiv:2504.02692): the exact outputs as the aim.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from edgekv.checkpoint.tensors import BFLOAT16
from edgekv.errors import EdgeKVError
from edgekv.kernels import threads
from edgekv.kernels.cpu.compile import inline_jit
from edgekv.kernels.cpu.launch import MIN_PARALLEL_WORK, exact_division_kernel
from edgekv.kernels.cpu.loops import chars, floats, load_arguments, load_tuple
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.weight_codes import ROTATED_INPUTS
from edgekv.types import F32, I64, U8, Array
from edgekv.weights import gaussian
from edgekv.weights.checkpoint_weights import CheckpointWeights
from edgekv.weights.formats import ROUTER, ModelFormat
from edgekv.weights.gaussian import BEST_SCALES, nearest, rotate, round_pair
from edgekv.weights.ops import NumpyOps
from edgekv.weights.store import Write

BLOCK = ROTATED_INPUTS  # columns with a scale
TOGETHER = 256  # columns of a Cholesky factor that are computed at a time
CANDIDATES = len(gaussian.SCALE_FACTORS)
# A thread's scratch, in float32: a row's errors (CANDIDATES, 128) with each scale that is tried, behind them
PAIRS_AT = BLOCK * CANDIDATES  # (CANDIDATES, 64): codes, x's + 256 times y's
SUMS_AT = PAIRS_AT + BLOCK // 2 * CANDIDATES  # (CANDIDATES,): sums of the squared errors times their costs
TARGETS_AT = SUMS_AT + CANDIDATES  # (2, CANDIDATES): targets of a pair
SCRATCH = TARGETS_AT + 2 * CANDIDATES
ROUND_ELEMENTS = 1 << 24  # of a matrix rounded at a time
STREAMED = 1 << 21  # elements of a matrix converted at a time, in the processor's caches
DAMPING = 0.02  # times the mean of a hessian's diagonal is added to it, for inputs that the text lacks
SAMPLE = 8  # one row of so many is enough to estimate a correction's noise


def pairs_order(diagonal: F32) -> tuple[I64, I64]:
    """Returns the order of inputs (n,), partners side by side, and of blocks (n / 128,), largest inputs last."""
    within = np.arange(BLOCK).reshape(2, -1).T.reshape(-1)
    blocks = np.argsort(diagonal.reshape(-1, BLOCK).sum(axis=1), kind="stable").astype(np.int64)
    return (blocks[:, None] * BLOCK + within).reshape(-1), blocks


class BlockArrays(NamedTuple):
    """r rows of a block of 128 columns and what both kernels need of them, contiguous; addresses in kernels."""

    weight: F32  # (r, 128)
    codes: U8  # (r, 128), set
    errors: F32  # (r, 128): w - q, set
    scales: F32  # (r,), set
    near: U8  # `nearest`: codes
    levels: F32


class Rounder:
    """Rounds rows of one linear layer; hessian (n, n) float32: H of the rotated inputs, positive definite."""

    def __init__(self, hessian: F32, bits: int) -> None:
        self.bits = bits
        self._order, self._blocks = pairs_order(hessian.diagonal())
        self._hessian = hessian[np.ix_(self._order, self._order)]
        self._cholesky = cholesky(self._hessian)
        diagonal = self._cholesky.diagonal().copy()
        self._costs = diagonal * diagonal
        self._cholesky /= diagonal
        self._spans = [(lo, lo + BLOCK) for lo in range(0, len(hessian), BLOCK)]
        self._inverses = [np.linalg.inv(self._cholesky[lo:hi, lo:hi]) for lo, hi in self._spans]
        self._candidates = gaussian.SCALE_FACTORS * np.float32(BEST_SCALES[bits])

    def round(self, rotated: F32, output_correction: F32) -> tuple[U8, Array]:
        """Rounds rotated weights (r, n) to codes and scales, as `gaussian.quantize` does.

        output_correction: b (r, n); rotated + b H^-1 is rounded.
        """
        w, b = rotated.take(self._order, 1), output_correction.take(self._order, 1)
        wanted = w + self._forward(b) / self._costs
        last_first = list(enumerate(self._spans))[::-1]
        errors, codes = np.empty_like(w), np.empty(w.shape, np.uint8)
        scales = np.empty((len(self._spans), len(w)), np.float32)
        near, levels = nearest(self.bits)
        scratch = np.empty((threads.count(), SCRATCH), np.float32)
        for again, (i, (lo, hi)) in itertools.product((False, True), last_first):
            rows = w[:, lo:hi].copy(), codes[:, lo:hi].copy(), errors[:, lo:hi].copy()
            block = BlockArrays(*rows, scales[i], near, levels)
            if again:
                slopes, h = errors @ self._hessian[:, lo:hi] + b[:, lo:hi], self._hessian[lo:hi, lo:hi].copy()
                _round_block_again(len(w), MIN_PARALLEL_WORK, slopes, h, *block)
            else:
                targets = wanted[:, lo:hi] + errors[:, hi:] @ self._cholesky[hi:, lo:hi]
                inner = self._cholesky[lo:hi, lo:hi].T.copy()
                arrays = targets, inner, self._costs[lo:hi], self._candidates, scratch
                _round_block(len(w), MIN_PARALLEL_WORK, *arrays, *block, n_threads=len(scratch))
            codes[:, lo:hi], errors[:, lo:hi] = block.codes, block.errors
        codes, scales = codes.take(np.argsort(self._order), 1), scales[np.argsort(self._blocks)].T
        return gaussian.pack_planes(codes.reshape(*scales.shape, BLOCK), self.bits), scales.astype(BFLOAT16)

    def error_reduction(self, b: F32) -> float:
        """Returns the sum of b H^-1 b^T over the rows of b (r, columns): by how much b can lower the error."""
        return float((np.square(self._forward(b.take(self._order, 1))) / self._costs).sum(dtype=np.float64))

    def _forward(self, b: F32) -> F32:
        """Solves x F^T = b with F = L / its diagonal; b and x (r, columns) are in the order of H."""
        x: F32 = b.copy()
        for (lo, hi), inverse in zip(self._spans, self._inverses, strict=True):
            x[:, lo:hi] = (x[:, lo:hi] - x[:, :lo] @ self._cholesky[lo:hi, :lo].T) @ inverse.T
        return x


def cholesky(h: F32) -> F32:
    """Returns L (n, n), lower triangular, of h = L L^T, in products of many columns, faster than LAPACK's."""
    factor = np.zeros_like(h)
    for lo in range(0, len(h), TOGETHER):
        hi = lo + TOGETHER
        rest = h[lo:, lo:hi] - factor[lo:, :lo] @ factor[lo:hi, :lo].T
        factor[lo:hi, lo:hi] = np.linalg.cholesky(rest[:TOGETHER])
        factor[hi:, lo:hi] = rest[TOGETHER:] @ np.linalg.inv(factor[lo:hi, lo:hi]).T
    return factor


def hessian(x: F32) -> F32:
    """Returns H (columns, columns): the mean outer product of x's rows (n, columns). The diagonal is damped.

    Other entries shrink by n / (n + columns): short texts correlate by chance. Raises EdgeKVError for NaN or inf.
    """
    n, columns = x.shape
    total: F32 = x.T @ x
    diagonal = total.diagonal() / np.float32(max(1, n))
    mean = float(diagonal.mean(dtype=np.float64))
    if not np.isfinite(mean):
        raise EdgeKVError("the model's activations on this text are not finite; calibrate with another text")
    total /= np.float32(n + columns)
    total[np.diag_indices(columns)] = diagonal + np.float32(DAMPING * mean or 1.0)
    return total


def output_correction(rounder: Rounder, rows: F32, lost: F32, inputs: F32) -> F32:
    """Returns `Rounder.round`'s correction b, with which rows approximate the exact model's outputs.

    rows: exact weights (r, columns). inputs: the rounded model's (tokens, columns), whose hessian rounder has;
    lost: the exact model's inputs minus these. b H^-1 is the least-squares change, shrunk by its noise.
    """
    half, some = len(inputs) // 2, rows[::SAMPLE]
    total: F32 = np.linalg.multi_dot([rows, lost.T, inputs])
    difference = 2 * np.linalg.multi_dot([some, lost[:half].T, inputs[:half]]) - total[::SAMPLE]
    gain, noise = map(rounder.error_reduction, (total[::SAMPLE], difference))
    total *= np.float32(max(0.0, 1 - noise / gain) / len(inputs) if gain > 0 else 0.0)
    return total


class StreamingOps(NumpyOps):
    """`NumpyOps` that read each matrix when it is used and keep none. replaced: matrices to use instead."""

    def __init__(self, weights: CheckpointWeights) -> None:
        super().__init__(weights)
        self._checkpoint, self.replaced = weights, dict[str, F32]()

    @contextlib.contextmanager
    def using(self, name: str, matrix: F32 | None) -> Iterator[None]:
        """Uses a matrix in place of the checkpoint's of this name; None: the checkpoint's."""
        self.replaced = {} if matrix is None else {name: matrix}
        try:
            yield
        finally:
            self.replaced = {}

    def _matrix(self, name: str) -> F32:
        return self.replaced[name] if name in self.replaced else self.weights.matrix(name)

    def _stored_linear(self, x: F32, name: str) -> F32:
        if name in self.replaced:
            return super()._stored_linear(x, name)
        outputs, bias = [x @ rows.T for rows in self._checkpoint.rows_of(name, STREAMED)], self.weights.bias(name)
        y: F32 = np.concatenate(outputs, axis=1)
        return y if bias is None else y + bias


class CalibratingOps(StreamingOps):
    """Operators that round each linear layer when it is called, once, and hand it to ``write``.

    Activations are (2 n, channels): n rows of the exact model, then those of the rounded one for the same tokens.
    The head is rounded, but returns no outputs.
    """

    def __init__(self, weights: CheckpointWeights, form: ModelFormat, write: Write) -> None:
        super().__init__(weights)
        self._write, self._rounds_experts = write, False
        pieces = ((name, piece.form) for name in self._linears for piece in form.of(name).pieces)
        self._bits = {name: stored.bits for name, stored in pieces if stored.rotated}

    def linear(self, x: F32, name: str) -> F32:
        """Returns the linear layer's outputs (n, rows) of x (n, columns)."""
        if name.endswith(ROUTER):
            return super().linear(x, name)
        rounded = self._write_rounded(name, self._round_linear(x, name))
        if name == "head":
            return np.empty((0, self.arch.config.vocab_size), np.float32)
        exact, approximate = np.split(x, 2)
        outputs = super().linear(exact, name)
        with self.using(name, rounded):
            return np.concatenate([outputs, super().linear(approximate, name)])

    def add_experts(self, x: F32, y: F32, i: int) -> F32:
        """Returns x (2 n, hidden) plus what layer i's experts make of y; its halves may choose different ones."""
        self._write(f"{i}{ROUTER}", None)
        exact, approximate = zip(np.split(x, 2), np.split(y, 2), strict=True)
        outputs = super().add_experts(*exact, i)
        self._rounds_experts = True
        try:
            return np.concatenate([outputs, super().add_experts(*approximate, i)])
        finally:
            self._rounds_experts = False

    def expert_products(self, rows: F32, expert_ids: I64, name: str) -> F32:
        """Returns outputs (m, n) of rows (m, columns), each through its expert in expert_ids (m,), ascending."""
        parts = self._round_experts(rows, expert_ids, name)
        with self.using(name, self._write_rounded(name, parts) if self._rounds_experts else None):
            return super().expert_products(rows, expert_ids, name)

    def _write_rounded(self, name: str, parts: Iterable[tuple[U8, Array]]) -> F32 | None:
        """Writes a layer's codes and scales, and returns the weights (rows, columns) that they stand for.

        Returns None if its format is not one of rotated weights: it is then written as without a text.
        """
        if name not in self._bits:
            self._write(name, None)
            return None
        codes, scales = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        self._write(name, (codes, scales))
        return gaussian.dequantize(codes, scales, self._bits[name], self._linears[name].columns)

    def _round_linear(self, x: F32, name: str) -> Iterator[tuple[U8, Array]]:
        """Yields codes and scales of a linear layer's rows; x (2 n, columns): its inputs in both models."""
        exact, inputs = map(rotate, np.split(x, 2))
        rounder, lost = Rounder(hessian(inputs), self._bits[name]), exact - inputs
        for rows in map(rotate, self._checkpoint.rows_of(name, ROUND_ELEMENTS)):
            yield rounder.round(rows, output_correction(rounder, rows, lost, inputs))

    def _round_experts(self, rows: F32, expert_ids: I64, name: str) -> Iterator[tuple[U8, Array]]:
        """Yields codes and scales of each expert, rounded for the rows (m, columns) that it gets, uncorrected."""
        linear = self._linears[name]
        parts = [self._checkpoint.rows_of(name, linear.n_elements)] * (len(linear.parts) // linear.n_experts)
        for i, rotated in enumerate(map(rotate, map(np.concatenate, zip(*parts, strict=True)))):
            rounder = Rounder(hessian(rotate(rows[expert_ids == i])), self._bits[name])
            yield rounder.round(rotated, np.zeros_like(rotated))


@exact_division_kernel
def _round_block(first: int, last: int, thread: int, arguments: int) -> None:
    """Rounds rows of a block, from its last pair to its first, with several scales; keeps the cheapest.

    Before the block's arrays: targets t (r, 128); factor (128, 128), [j, i] is L_ij / L_jj; costs (128,): L_jj^2,
    of the squared error of a column; factors (CANDIDATES,): scales to try, times the row's deviation; scratch.
    """
    targets_at, factor, costs_at, factors_at, scratch = load_arguments(arguments, 5)
    p = load_tuple(BlockArrays, arguments + 8 * 5)
    costs, factors, near, levels = floats(costs_at), floats(factors_at), chars(p.near), floats(p.levels)
    kept = scratch + 4 * thread * SCRATCH
    pairs, sums, targets = floats(kept + 4 * PAIRS_AT), floats(kept + 4 * SUMS_AT), floats(kept + 4 * TARGETS_AT)
    for r in range(first, last):
        row = 4 * BLOCK * r
        t, weight, errors = floats(targets_at + row), floats(p.weight + row), floats(p.errors + row)
        codes = chars(p.codes + BLOCK * r)
        squares = np.float32(0)
        for j in range(BLOCK):
            squares += get(t, j) * get(t, j)
        deviation = np.sqrt(squares / np.float32(BLOCK))
        for s in range(CANDIDATES):
            put(sums, s, np.float32(0))
            for j in range(BLOCK):
                put(floats(kept + 4 * BLOCK * s), j, np.float32(0))
        for j in range(BLOCK - 2, -1, -2):
            of_x, of_y = floats(factor + 4 * BLOCK * j), floats(factor + 4 * BLOCK * (j + 1))
            cost, ratio, share = get(costs, j), get(costs, j + 1) / get(costs, j), get(of_x, j + 1)
            for s in range(CANDIDATES):  # a loop of its own, which is faster on out-of-order processors
                tried, x, y = floats(kept + 4 * BLOCK * s), get(t, j), get(t, j + 1)
                for i in range(BLOCK):  # errors before j are 0
                    x += get(tried, i) * get(of_x, i)
                    y += get(tried, i) * get(of_y, i)
                put(targets, s, x)
                put(targets, s + CANDIDATES, y)
            for s in range(CANDIDATES):
                tried, x, y = floats(kept + 4 * BLOCK * s), get(targets, s), get(targets, s + CANDIDATES)
                scale = deviation * get(factors, s)
                inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
                x += (get(weight, j + 1) - y) * share
                code_x, code_y, level_x, level_y = round_pair(x * inverse, y * inverse, share, ratio, near, levels)
                lost_y = y - scale * level_y
                lost_x = x + share * lost_y - scale * level_x
                put(pairs, (s * BLOCK + j) // 2, np.float32(np.int32(code_x) + 256 * np.int32(code_y)))
                put(tried, j, get(weight, j) - scale * level_x)
                put(tried, j + 1, get(weight, j + 1) - scale * level_y)
                put(sums, s, get(sums, s) + cost * (lost_x * lost_x + ratio * lost_y * lost_y))
        best = 0
        for s in range(1, CANDIDATES):
            best = s if get(sums, s) < get(sums, best) else best
        put(floats(p.scales), r, deviation * get(factors, best))
        for j in range(BLOCK):
            pair = int(get(pairs, (best * BLOCK + j) // 2))
            put(codes, j, np.uint8(pair >> 8 if j & 1 else pair & 255))
            put(errors, j, get(floats(kept), best * BLOCK + j))


@exact_division_kernel
def _round_block_again(first: int, last: int, thread: int, arguments: int) -> None:
    """Rounds rows of a block again; before its arrays: slopes s (r, 128), kept up to date, and H (128, 128)."""
    slopes, hessian_at = load_arguments(arguments, 2)
    p = load_tuple(BlockArrays, arguments + 8 * 2)
    hessian, near, levels, scales = floats(hessian_at), chars(p.near), floats(p.levels), floats(p.scales)
    for r in range(first, last):
        row = 4 * BLOCK * r
        slope, weight, errors = floats(slopes + row), floats(p.weight + row), floats(p.errors + row)
        codes = chars(p.codes + BLOCK * r)
        gain, curvature = np.float32(0), np.float32(0)
        for j in range(BLOCK):
            product, value = np.float32(0), get(weight, j) - get(errors, j)
            for i in range(BLOCK):
                product += get(hessian, BLOCK * j + i) * (get(weight, i) - get(errors, i))
            gain += get(slope, j) * value
            curvature += product * value
        factor = np.float32(1) + (gain / curvature if curvature > 0 else np.float32(0))
        scale = get(scales, r) * factor
        put(scales, r, scale)
        inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
        for j in range(0, BLOCK, 2):  # the same codes with the new scale
            x, y = get(weight, j) - get(errors, j), get(weight, j + 1) - get(errors, j + 1)
            _set_pair(j, x * factor, y * factor, hessian, weight, errors, slope)
        for j in range(0, BLOCK, 2):
            of_x, of_y = get(hessian, BLOCK * j + j), get(hessian, BLOCK * (j + 1) + j + 1)
            share = get(hessian, BLOCK * j + j + 1) / of_x
            left = of_y - share * share * of_x  # y's part of H, less what x makes up for
            change = (get(slope, j + 1) - share * get(slope, j)) / left
            y = get(weight, j + 1) - get(errors, j + 1) + change
            x = get(weight, j) - get(errors, j) + get(slope, j) / of_x - share * change
            ratio = left / of_x
            code_x, code_y, level_x, level_y = round_pair(x * inverse, y * inverse, share, ratio, near, levels)
            if code_x != get(codes, j) or code_y != get(codes, j + 1):
                put(codes, j, code_x)
                put(codes, j + 1, code_y)
                _set_pair(j, scale * level_x, scale * level_y, hessian, weight, errors, slope)


@inline_jit
def _set_pair(j: int, x: np.float32, y: np.float32, hessian: F32, weight: F32, errors: F32, slope: F32) -> None:
    """Rounds weights j and j + 1 to x and y: sets their errors and all slopes."""
    lost_x, lost_y = get(weight, j) - x, get(weight, j + 1) - y
    by_x, by_y = lost_x - get(errors, j), lost_y - get(errors, j + 1)
    put(errors, j, lost_x)
    put(errors, j + 1, lost_y)
    for i in range(BLOCK):
        added = by_x * get(hessian, BLOCK * j + i) + by_y * get(hessian, BLOCK * (j + 1) + i)
        put(slope, i, get(slope, i) + added)
